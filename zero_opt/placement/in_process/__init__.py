"""Shards that the trainer's own process steps."""
