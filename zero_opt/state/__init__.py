"""Optimizer state, as it is shown, saved, loaded and served to other ranks."""
