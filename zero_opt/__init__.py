"""Shard any torch.optim optimizer over the ranks of a torch.distributed process group."""

__version__ = "0.1.0.dev0"
