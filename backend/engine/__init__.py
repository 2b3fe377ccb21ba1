"""All code that uses vLLM.  No other package imports vLLM.

The core (`build.py`, `scheduler.py`, `worker/`) runs in a verifier, `front/` in a gateway.
"""

import logging

from backend.config import environment

# Read when vLLM's request models are imported.  The gateway bounds the strings (`gateway/requests/limits.py`).
environment.export({"VLLM_MAX_STOP_STRINGS": "64"})
# A process without logging of its own (one that checks grammars) would print vLLM's messages bare.
logging.getLogger("vllm").addHandler(logging.NullHandler())
