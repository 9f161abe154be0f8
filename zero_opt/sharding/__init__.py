"""How parameters are divided among the ranks."""
