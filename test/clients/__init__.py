"""Programs of others that train with ``torch.optim``, run with ``ShardedOptimizer`` in its place."""
