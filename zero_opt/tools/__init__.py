"""Before there is an optimizer: how much memory it will take, and what works here."""
