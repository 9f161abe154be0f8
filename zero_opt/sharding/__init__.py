"""Which rank has which part of the parameters."""
