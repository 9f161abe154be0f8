"""Tests of what spans the rooms of the package."""
