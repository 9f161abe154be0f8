"""Tests that need several ranks, most of them processes, by the room of the package that they are about."""
