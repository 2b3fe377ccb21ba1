"""Writes checkpoints: a directory appears whole or not at all.  Launcher, trainers and the laboratory."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
DRAFT_LENGTH = 4
"""Draft length that a written head's configuration suggests to other servers."""


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Yields a new directory to fill.  It replaces `directory` when the block ends without an error."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    fresh.chmod(0o755)
    try:
        yield fresh
        retired = fresh.with_name(fresh.name + "-old")
        if directory.exists():
            directory.rename(retired)
        fresh.rename(directory)
        shutil.rmtree(retired, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_checkpoint(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes `config.json` and weights into an existing directory.  Raises `OSError`."""
    kept = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    save_tensors(kept, directory / WEIGHTS, {"format": "pt"})
    (directory / WEIGHTS).chmod(0o644)
    write_json(directory / "config.json", config)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file.  Raises `OSError`, in place of the library's own error of a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata and dict(metadata))
    except SafetensorError as error:
        raise OSError(str(error)) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Raises `OSError`."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def speculators_config(
    layer: Mapping[str, Any], features: Sequence[int], verifier: str, architectures: Sequence[str]
) -> dict[str, Any]:
    """`config.json` of an EAGLE-3 head with the whole vocabulary: its `layer`, the target layers it reads, and the target."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": layer["vocab_size"],
        "target_hidden_size": layer["hidden_size"],
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(features),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DRAFT_LENGTH}],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "torch_dtype": layer["torch_dtype"],
        "transformer_layer_config": dict(layer),
    }
