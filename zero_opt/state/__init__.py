"""Optimizer state: how it is shown, saved, loaded, and served to other ranks."""
