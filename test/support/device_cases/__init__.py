"""Training programs with the same bits on every device, and the places where they run."""
