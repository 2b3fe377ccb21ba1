"""vLLM's engine arguments for LoRA adapters, and the numbers of adapters.  Reads files; needs no engine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from backend.config.settings import VerifierSettings

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for `max_lora_rank`."""
DEFAULT_RANK = 16
"""`max_lora_rank` at least, if adapters may be loaded later; vLLM's own default."""


def adapter_arguments(verifier: VerifierSettings) -> dict[str, Any]:
    """vLLM's engine arguments for the configured adapters; empty without adapters.

    Raises `ValueError` for an adapter that cannot be read.
    """
    if not verifier.adapters and not verifier.adapters_loadable:
        return {}
    largest = max([DEFAULT_RANK * verifier.adapters_loadable, *(_rank(*each) for each in verifier.adapters.items())])
    return {"enable_lora": True, "max_lora_rank": next((rank for rank in RANKS if rank >= largest), RANKS[-1])}


def adapter_number(name: str, path: str) -> int:
    """vLLM's number of an adapter.  It is equal at every gateway, because verifiers identify adapters by it alone."""
    return int.from_bytes(hashlib.sha256(f"{name}\0{path}".encode()).digest()[:4], "big") >> 1 or 1


def _rank(name: str, path: str) -> int:
    try:
        return int(json.loads((Path(path) / "adapter_config.json").read_text())["r"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"verifier.adapters: {name!r} has no adapter_config.json with a rank") from None
