"""Shards whose state lies in a file."""
