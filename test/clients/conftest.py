"""What the clients need before they are imported.

No network, the CPU alone, and no threads of tokenizers, which a fork would lose.
"""

import os

for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "ACCELERATE_USE_CPU"):
    os.environ[name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
