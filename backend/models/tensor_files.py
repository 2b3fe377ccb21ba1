"""Reads the tensors of a checkpoint directory by name: shapes from headers alone, and data only of the tensors asked for.

Any process.  Handles `.safetensors` and `.bin`, whole or sharded.  torch is imported only when data (or a `.bin`, which has no
header) is read, so that checking a checkpoint stays cheap.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    import torch

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


class CheckpointError(Exception):
    """A checkpoint cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and its shape."""

    path: Path
    shape: tuple[int, ...]


def written(directory: str) -> frozenset[tuple[str, int, int]]:
    """What changes when the files of a directory are written anew: each file's name, size and time."""
    found = [(each.name, each.stat()) for each in Path(directory).glob("*") if each.is_file()]
    return frozenset((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


class TensorFiles:
    """All tensors of one directory.  Raises `CheckpointError` when there are none or a file is broken."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.tensors: dict[str, TensorInfo] = {}
        # Only the first pattern that matches: there may be copies under another vendor's names, or pickles that are no weights.
        for pattern in ("model*.safetensors", "*.safetensors", "pytorch_model*.bin", "*.bin"):
            for path in sorted(self.directory.glob(pattern)):
                read = self._read_safetensors_header if path.suffix == ".safetensors" else self._read_bin_shapes
                read(path)
            if self.tensors:
                return
        raise CheckpointError(f"{directory}: no .safetensors or .bin weights")

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape; None when it is absent."""
        info = self.tensors.get(name)
        return info.shape if info else None

    def find(self, suffix: str) -> str | None:
        """The shortest name that is `suffix` or ends with `.suffix`; None when there is none."""
        names = [name for name in self.tensors if name == suffix or name.endswith(f".{suffix}")]
        return min(names, key=len, default=None)

    def is_quantised(self, name: str) -> bool:
        """Whether a weight is packed or scaled: its module has other tensors than a weight and a bias."""
        module = f".{name.removesuffix('.weight')}"
        paths = (f".{each}".rpartition(".") for each in self.tensors)
        return not {part for path, _, part in paths if path.endswith(module)} <= {"weight", "bias"}

    @property
    def canonical_names(self) -> dict[str, str]:
        """Canonical name -> name in the files, for every tensor of a drafter (`midlayer.` becomes `layers.0.`)."""
        return {name.removeprefix("model.").replace("midlayer.", "layers.0."): name for name in self.tensors}

    @property
    def is_language_model(self) -> bool:
        """Whether these are weights of a whole language model.  Heads differ: they have an `fc` or a norm for features."""
        names = self.canonical_names.keys()
        whole = {EMBEDDING, "norm.weight", "layers.0.input_layernorm.weight"}
        return whole <= names and not {"fc.weight", "hidden_norm.weight", "layers.0.hidden_norm.weight"} & names

    @property
    def has_midlayer_alone(self) -> bool:
        """Whether the head has SafeAILab's one layer, and no others."""
        parts = {name.removeprefix("model.").partition(".")[0] for name in self.tensors}
        return "midlayer" in parts and "layers" not in parts

    def read(self, name: str) -> torch.Tensor:
        """One tensor's data, on the CPU."""
        return self.read_many([name])[name]

    def read_many(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Several tensors' data, each file opened once."""
        by_path: dict[Path, list[str]] = {}
        for name in names:
            by_path.setdefault(self.tensors[name].path, []).append(name)
        found: dict[str, torch.Tensor] = {}
        for path, wanted in by_path.items():
            if path.suffix == ".safetensors":
                try:
                    with safe_open(path, framework="pt") as opened:
                        found.update({name: opened.get_tensor(name) for name in wanted})
                except (OSError, SafetensorError) as error:
                    raise CheckpointError(f"{path}: cannot be read ({error})") from error
            else:
                state = _load_bin(path, "cpu")
                found.update({name: state[name].clone() for name in wanted})
        return found

    def read_canonical(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Several tensors' data, by canonical name."""
        stored = self.canonical_names
        found = self.read_many([stored[name] for name in names])
        return {name: found[stored[name]] for name in names}

    def _read_safetensors_header(self, path: Path) -> None:
        try:
            with safe_open(path, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is not a mapping)
                    self.tensors[name] = TensorInfo(path, tuple(opened.get_slice(name).get_shape()))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: not a safetensors file ({error})") from error

    def _read_bin_shapes(self, path: Path) -> None:
        for name, tensor in _load_bin(path, "meta").items():
            if hasattr(tensor, "shape"):
                self.tensors[name] = TensorInfo(path, tuple(tensor.shape))


def _load_bin(path: Path, device: str) -> dict[str, Any]:
    """A pickled state dict, by torch's loader that runs no code from the file."""
    import torch

    try:
        state = torch.load(path, map_location=device, weights_only=True, mmap=device == "cpu")
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: cannot be loaded ({str(error).splitlines()[0]})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds no state dict")
    return state
