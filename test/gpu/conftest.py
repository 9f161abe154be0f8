"""Tests here fork; asking the driver whether there is a GPU would make CUDA unusable in the children."""

import os

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
