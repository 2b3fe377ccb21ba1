"""Compares other weights of the target with its own, by names and shapes of their tensors.  Any process; needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from backend.models.head_config import CheckpointError, read_config, text_config
from backend.models.layout import Shape
from backend.models.tensor_files import TensorFiles


def check_same_shapes(path: str, known: Mapping[str, Shape], tied: bool) -> None:
    """Raises `ValueError` unless the directory holds exactly the `known` tensors, by name and shape.  `tied`: `is_tied`."""
    if not Path(path).is_dir():
        raise ValueError("no such directory on the verifier's machine")
    try:
        found = shapes_of(path)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    check_shapes(needed(known, tied), needed(found, tied))


def is_tied(target_dir: str) -> bool:
    """Whether the target's output matrix is its embedding."""
    config = read_config(target_dir)
    return bool(text_config(config).get("tie_word_embeddings", config.get("tie_word_embeddings")))


def needed(shapes: Mapping[str, Shape], tied: bool) -> dict[str, Shape]:
    """`shapes` without that of a tied output matrix.

    Some checkpoints of such a target have it (Qwen3-0.6B's own), others do not (what transformers writes), and vLLM skips it.
    """
    return {name: shape for name, shape in shapes.items() if not (tied and f".{name}".endswith(".lm_head.weight"))}


def shapes_of(directory: str) -> dict[str, Shape]:
    """The shapes of a checkpoint's tensors.  Raises `CheckpointError`."""
    return {name: each.shape for name, each in TensorFiles(directory).tensors.items()}


def check_shapes(known: Mapping[str, Shape | None], found: Mapping[str, Shape]) -> None:
    """Raises `ValueError`, naming up to three tensors, if names or shapes differ."""
    differing = sorted(name for name in known.keys() | found.keys() if known.get(name) != found.get(name))
    if differing:
        shown = ", ".join(f"{n}: {_shown(found.get(n))} instead of {_shown(known.get(n))}" for n in differing[:3])
        raise ValueError(f"other tensors than the model has: {shown}")


def _shown(shape: Shape | None) -> str:
    return "none" if shape is None else str(list(shape))
