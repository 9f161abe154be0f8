"""Settings every test starts from."""

import torch
from hypothesis import settings

# Tests fork: OpenMP's worker threads do not survive that, so none may exist in the parent. One thread per
# rank also keeps several ranks quick on two cores.
torch.set_num_threads(1)

# A slow machine is no failure, and the same examples run everywhere.
settings.register_profile("zero_opt", deadline=None, derandomize=True)
settings.load_profile("zero_opt")
