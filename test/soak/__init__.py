"""Training for a long time with faults, to see whether anything grows."""
