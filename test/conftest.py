"""Settings every test starts from."""

import torch

# Tests fork: OpenMP's worker threads do not survive that, so none may exist in the parent. One thread per
# rank also keeps several ranks quick on two cores.
torch.set_num_threads(1)
