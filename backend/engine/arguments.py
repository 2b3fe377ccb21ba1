"""vLLM's engine arguments that verifiers and gateways have in common, and the numbers of LoRA adapters.

Reads files; needs no engine.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, get_args

import vllm  # noqa: F401  (first: its submodules do not import alone)
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import EngineArgs

from backend.config import Settings
from backend.config.settings import MAX_NUM_BATCHED_TOKENS, VerifierSettings
from backend.engine.parsers import REASONING, parser_of
from backend.models.head_config import read_config, text_config
from backend.models.resolve import DEMO

RANKS: tuple[int, ...] = get_args(MaxLoRARanks)
"""The values that vLLM accepts for `max_lora_rank`."""
DEFAULT_RANK = 16
"""`max_lora_rank` at least, if adapters may be loaded later; vLLM's own default."""
KEPT_ADAPTERS = 8
"""Adapters in host memory.  vLLM keeps one, and reads another from disk again within a step whenever they alternate."""


BACKENDS = ("xgrammar", "guidance")
"""For structured outputs.  vLLM's others silently ignore many keywords of a schema."""
_STRUCTURED = "structured_outputs_config"


class EngineSetupError(ValueError):
    """The engine cannot be built as configured; the message is one line for a person."""


def common_arguments(settings: Settings, model_dir: str) -> dict[str, Any]:
    """The arguments that decide which requests a model takes.

    Raises `EngineSetupError` for settings of arguments that vLLM does not have, and for an adapter that cannot be read.
    """
    verifier = settings.verifier
    unknown = verifier.engine_args.keys() - EngineArgs.__dataclass_fields__.keys()
    if unknown:
        raise EngineSetupError(f"verifier.engine_args: vLLM has no argument {', '.join(sorted(unknown))}")
    return {
        "model": model_dir,
        "dtype": _dtype(model_dir),
        # Prompts are text.  Otherwise the gateway would fetch any URL that a request names as a picture, and vLLM's cache of
        # pictures, which the gateway mirrors, assumes a single engine.
        "language_model_only": True,
        "max_num_seqs": verifier.max_num_seqs,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "reasoning_parser": parser_of(REASONING, verifier.reasoning_parser, model_dir, settings.gateway.chat_template) or "",
        _STRUCTURED: _structured_outputs(settings, model_dir),
        **_adapter_arguments(verifier),
    }


def other_arguments(verifier: VerifierSettings) -> dict[str, Any]:
    """What people said of vLLM's arguments, but for what `common_arguments` has taken in."""
    return {name: value for name, value in verifier.engine_args.items() if name != _STRUCTURED}


def _structured_outputs(settings: Settings, model_dir: str) -> dict[str, Any]:
    """One backend for the whole fleet: vLLM's `auto` chooses by request, but a verifier keeps that of its first request."""
    given = settings.verifier.engine_args.get(_STRUCTURED, {})
    if not isinstance(given, dict):
        raise EngineSetupError(f"verifier.engine_args: {_STRUCTURED} must be a dictionary")
    backend = given.get("backend", "auto")
    if backend == "auto":
        # As vLLM does for Mistral's own tokenizers: xgrammar does not know their special tokens.
        backend = "guidance" if (Path(model_dir) / "tekken.json").exists() else "xgrammar"
    if backend not in BACKENDS:
        raise EngineSetupError(f"verifier.engine_args: {_STRUCTURED}.backend must be {' or '.join(BACKENDS)}, not {backend!r}")
    # The demo model knows Python: where JSON allows whitespace, it would indent for ever.
    return {"disable_any_whitespace": settings.model == DEMO, **given, "backend": backend}


def _dtype(target_dir: str) -> str:
    """`float32` for a float32 model, which vLLM would round: exact comparisons of modes depend on it.  Else `auto`."""
    own = text_config(read_config(target_dir))
    own_dtype = own.get("dtype") or own.get("torch_dtype")
    return "float32" if own_dtype == "float32" else "auto"


def remote_speculation(k: int) -> dict[str, Any]:
    """vLLM's speculative configuration where vLLM itself drafts nothing; drafts have up to `k` tokens."""
    return {"method": "custom_class", "model": "backend.engine.worker.runner.RemoteProposer", "num_speculative_tokens": k}


def _adapter_arguments(verifier: VerifierSettings) -> dict[str, Any]:
    if not verifier.adapters and not verifier.adapters_loadable:
        return {}
    largest = max([DEFAULT_RANK * verifier.adapters_loadable, *(_rank(*each) for each in verifier.adapters.items())])
    return {
        "enable_lora": True,
        "max_lora_rank": next((rank for rank in RANKS if rank >= largest), RANKS[-1]),
        "max_cpu_loras": max(KEPT_ADAPTERS, verifier.engine_args.get("max_loras", 1)),
    }


def adapter_number(name: str, path: str) -> int:
    """vLLM's number of an adapter.  It is equal at every gateway, because verifiers identify adapters by it alone."""
    return int.from_bytes(hashlib.sha256(f"{name}\0{path}".encode()).digest()[:4], "big") >> 1 or 1


def _rank(name: str, path: str) -> int:
    try:
        return int(json.loads((Path(path) / "adapter_config.json").read_text())["r"])
    except (OSError, ValueError, KeyError, TypeError):
        raise EngineSetupError(f"verifier.adapters: {name!r} has no adapter_config.json with a rank") from None
