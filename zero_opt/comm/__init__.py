"""How bytes move between ranks."""
