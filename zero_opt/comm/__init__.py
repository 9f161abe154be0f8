"""Groups of ranks, bytes between them, agreement, and waits that end."""
