"""Parameters, which rank owns which part, buckets, and updated parameters to all ranks."""
