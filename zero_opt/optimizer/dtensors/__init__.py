"""The same over the DTensors of FSDP2."""
