"""The tests: one file per module, `distributed` for those that need several ranks."""
