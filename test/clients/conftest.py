"""What the clients need before they are imported: no network, and none of their own process starters."""

import os

for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "ACCELERATE_USE_CPU"):
    os.environ[name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
