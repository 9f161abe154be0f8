"""Shards that a worker process steps."""
