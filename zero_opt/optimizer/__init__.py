"""``ShardedOptimizer`` and its engine."""
