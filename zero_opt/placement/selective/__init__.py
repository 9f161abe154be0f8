"""Shards of which a few columns are stepped at a time."""
