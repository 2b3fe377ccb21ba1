"""Reads the `config.json` of a drafter: of a head in either layout, or of a draft model.  Imports no torch.

Heads have two layouts.  SafeAILab's is a Llama configuration with a few extra keys; speculators' wraps one in
`transformer_layer_config` and keeps the extra keys outside.  Defaults follow vLLM's reading of both.  A draft model is a
language model of its own, in the layout of transformers.  DFlash and DSpark heads, which draft in one pass, have both layouts
too.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from backend.models.kinds import DrafterKind
from backend.models.tensor_files import EMBEDDING, TensorFiles
from backend.models.tensor_files import CheckpointError as CheckpointError

HeadKind = Literal["eagle", "eagle3", "dflash", "dspark", "draft_model"]
DRAFT_MODEL: Literal["draft_model"] = "draft_model"
DFLASH: Literal["dflash"] = "dflash"
DSPARK: Literal["dspark"] = "dspark"
DFLASH_ARCHITECTURE, DSPARK_ARCHITECTURE = "DFlashDraftModel", "Qwen3DSparkModel"
ONE_PASS = ("DFlash", "DSpark", "LiLiCorr")
"""Parts of the names of architectures that draft in one pass."""
MASK_EMBEDDING = "mask_embedding.pt"
"""A file with another embedding for the mask token, which some DFlash heads have."""
MODELOPT = "hf_quant_config.json"
"""Where ModelOpt says how a checkpoint is quantised; its `config.json` may say nothing."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Supported values of a draft model's `model_type`."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base and, unless `kind` is `default`, its scaling parameters."""

    theta: float
    kind: str
    scaling: dict[str, Any]


@dataclass(frozen=True)
class OnePassDrafting:
    """How a head drafts in one pass, over the latest token and mask tokens behind it."""

    mask_token: int
    longest: int
    """Most mask tokens, as in training; 0: the configuration does not say."""
    causal: tuple[bool, ...]
    """By layer: whether the block's rows see only earlier ones."""
    windows: tuple[int, ...]
    """By layer: how many positions back a row sees, its own included; 0: all."""
    anchored: bool = False
    """Whether each row draws the token behind it, the latest token's row too; else each mask draws the token in its place."""
    markov_rank: int = 0
    """Size of the Markov head, by which a token adds to the scores of the next one; 0: there is none."""


@dataclass(frozen=True)
class HeadConfig:
    """A head or a draft model.  `vocab_size` is the target's, `draft_vocab_size` its own."""

    kind: HeadKind
    model_type: str
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: Rope
    dtype: str
    unsupported: tuple[str, ...]
    """Settings in the configuration that our drafter does not support, one line each."""
    own_vocab_size: int = 0
    """The vocabulary size in its own configuration: for a head, the target's; 0: it names none."""
    aux_layers: tuple[int, ...] = ()
    """Target layers whose inputs `fc` joins to a feature; empty if `uses_aux` is False, or if neither the head nor a known
    target says which."""
    uses_aux: bool = False
    """False: the feature is the target's last hidden state, and nothing is projected before the wire."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    block: OnePassDrafting | None = None
    """Of a DFlash or DSpark head."""

    @property
    def drafter_kind(self) -> DrafterKind:
        """What drafts with it."""
        return "eagle" if self.kind == "eagle3" else DFLASH if self.kind == DSPARK else self.kind


def read_config(directory: str, name: str = "config.json") -> dict[str, Any]:
    """A JSON object among a checkpoint's files; raises `CheckpointError`."""
    path = Path(directory) / name
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory}: no {name}: not a model's directory") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a target's configuration (multimodal models nest it)."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The layers vLLM takes features from if neither the head nor the target's class names any."""
    return (2, num_layers // 2, num_layers - 3)


def rope_of(config: Mapping[str, Any], theta: float = 10000.0) -> Rope:
    """Rotary parameters of a transformers configuration, under its older or newer keys.  `theta`: the base if it names none."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "llama3":
        # As in transformers.
        scaling = {"original_max_position_embeddings": config.get("max_position_embeddings")} | scaling
    return Rope(float(scaling.get("rope_theta") or config.get("rope_theta") or theta), kind, dict(scaling))


def load_config(directory: str, target_dir: str | None = None) -> HeadConfig:
    """Reads the configuration of the head or draft model in `directory`; its weights tell which of the two it is.

    Values that it leaves to the target come from `target_dir`.  Raises `CheckpointError`.
    """
    own, files = read_config(directory), TensorFiles(directory)
    if (Path(directory) / MODELOPT).is_file():
        own.setdefault("quantization_config", {"quant_method": "modelopt"})
    own["mask_embedding"] = (Path(directory) / MASK_EMBEDDING).is_file()
    target = text_config(read_config(target_dir)) if target_dir else {}
    if target_dir and target.get("vocab_size") is None:
        target = target | {"vocab_size": _embedding_rows(target_dir)}
    try:
        return _parse(own, target, files)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{directory}/config.json: {type(error).__name__}: {error}") from error


def _embedding_rows(target_dir: str) -> int:
    """The vocabulary size of a target whose configuration leaves it to its class, as Gemma 3's does."""
    files = TensorFiles(target_dir)
    name = files.find(EMBEDDING)
    if name is None:
        raise CheckpointError(f"{target_dir}/config.json: no vocab_size, and no embedding in the weights tells it")
    return files.tensors[name].shape[0]


def same_features(new: HeadConfig, old: HeadConfig) -> str | None:
    """Why the head `new` cannot draft from the features that verifiers send for `old`; None: it can."""
    for what in ("kind", "hidden_size", "target_hidden_size", "vocab_size", "aux_layers"):
        if getattr(new, what) != getattr(old, what):
            return f"{what} is {getattr(new, what)}, the fleet's heads have {getattr(old, what)}"
    return None


def _parse(config: dict[str, Any], target: Mapping[str, Any], files: TensorFiles) -> HeadConfig:
    own = _flat(config)
    kind = _kind(own, files)
    is_block, eagle = kind in (DFLASH, DSPARK), own.get("eagle_config") or {}
    hidden, heads = int(own["hidden_size"]), int(own["num_attention_heads"])
    own_vocab = int(own.get("vocab_size") or 0)
    vocab = int(target.get("vocab_size") or own["vocab_size"])
    draft_vocab = int(own.get("draft_vocab_size") or (own_vocab if kind == DRAFT_MODEL else vocab))
    if kind in (DSPARK, DRAFT_MODEL):
        # Tokens beyond the target's, such as a DSpark head's mask, are not drafted.
        draft_vocab = min(draft_vocab, vocab)
    uses_aux = is_block or (kind == "eagle3" and bool(eagle.get("use_aux_hidden_state", True)))
    aux_layers = _aux_layers(own, is_block, target) if uses_aux else ()
    block = _block(own, kind) if is_block else None
    return HeadConfig(
        kind=kind,
        # The layers of heads that draft in one pass are Qwen3's, whatever the target's are.
        model_type="qwen3" if is_block else str(own.get("model_type", "llama")),
        hidden_size=hidden,
        target_hidden_size=int(own.get("target_hidden_size") or hidden),
        intermediate_size=int(own["intermediate_size"]),
        # SafeAILab's layout has one layer.  Its configuration may repeat the target's number of layers.
        num_layers=1 if files.has_midlayer_alone else int(own.get("num_hidden_layers", 1)),
        num_heads=heads,
        num_kv_heads=int(own.get("num_key_value_heads") or heads),
        head_dim=int(own.get("head_dim") or hidden // heads),
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        max_position=int(own.get("max_position_embeddings") or 2048),
        rms_norm_eps=float(own.get("rms_norm_eps", 1e-6)),
        rope=rope_of(own, 1e6) if is_block else rope_of(own),
        dtype=str(_dtype(own) or "float32"),
        unsupported=_unsupported(own, kind, block, aux_layers),
        own_vocab_size=own_vocab,
        aux_layers=aux_layers,
        uses_aux=uses_aux,
        norm_before_residual=bool(own.get("norm_before_residual", False)),
        norm_before_fc=bool(eagle.get("norm_before_fc", own.get("norm_before_fc", False))),
        fc_norm=bool(own.get("fc_norm", False)),
        norm_output=bool(own.get("norm_output", False)),
        block=block,
    )


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with its layer's keys among the others, as SafeAILab's has them.  Defaults are vLLM's."""
    speculators = config.get("speculators_model_type")
    if speculators is None:
        return {**config["model"], **config} if isinstance(config.get("model"), dict) else config
    if speculators not in ("eagle3", DFLASH, DSPARK):
        raise ValueError(f"speculators_model_type {speculators!r} is not supported, only 'eagle3', 'dflash' and 'dspark'")
    layer: dict[str, Any] = config["transformer_layer_config"]
    flat = {"norm_before_residual": True, "sample_from_anchor": False} | layer
    flat |= {key: value for key, value in config.items() if value is not None}
    if speculators == DFLASH:
        causal = not config.get("sliding_window_non_causal", True)
        flat["dflash_config"] = {"sample_from_anchor": flat["sample_from_anchor"], "causal": causal}
    return flat | {"model_type": layer.get("model_type", "llama"), "torch_dtype": _dtype(config) or _dtype(layer)}


def _dtype(config: Mapping[str, Any]) -> Any:
    """The type of the weights; `dtype` is the key since transformers 4.56."""
    return config.get("torch_dtype") or config.get("dtype")


def _kind(own: Mapping[str, Any], files: TensorFiles) -> HeadKind:
    if files.is_language_model:
        return DRAFT_MODEL
    speculators: HeadKind | None = own.get("speculators_model_type")
    if speculators is not None:
        return speculators
    names = [str(name) for name in own.get("architectures") or []]
    if any("DSpark" in name for name in names):
        return DSPARK
    if "dflash_config" in own or any(part in name for name in names for part in ONE_PASS):
        return DFLASH
    eagle3_keys = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "target_hidden_size")
    return "eagle3" if any("Eagle3" in name for name in names) or any(key in own for key in eagle3_keys) else "eagle"


def _aux_layers(own: Mapping[str, Any], is_block: bool, target: Mapping[str, Any]) -> tuple[int, ...]:
    inputs, eagle = own.get("eagle_aux_hidden_state_layer_ids"), own.get("eagle_config") or {}
    if is_block:
        # `target_layer_ids` are layers whose outputs are meant: the inputs of the next ones.
        places = _dflash(own).get("target_layer_ids"), own.get("dspark_target_layer_ids"), own.get("target_layer_ids")
        outputs = next((each for each in places if each), ())
        inputs = inputs or own.get("aux_hidden_state_layer_ids") or [int(i) + 1 for i in outputs]
    else:
        inputs = inputs or eagle.get("eagle_aux_hidden_state_layer_ids")
        inputs = inputs or (default_aux_layers(int(target["num_hidden_layers"])) if target else ())
    return tuple(int(i) for i in inputs)


def _dflash(own: Mapping[str, Any]) -> dict[str, Any]:
    return {"mask_token_id": own.get("mask_token_id", own.get("dspark_noise_token_id")), **(own.get("dflash_config") or {})}


def _block(own: Mapping[str, Any], kind: HeadKind) -> OnePassDrafting:
    """Reads what vLLM reads, with its order of precedence."""
    dflash = _dflash(own)
    count, window = int(own["num_hidden_layers"]), dflash.get("swa_window_size", own.get("sliding_window"))
    sliding = [each == "sliding_attention" for each in own.get("layer_types") or [None] * count]
    is_causal = next((each for each in (own.get("is_causal"), dflash.get("causal")) if each is not None), None)
    causal = tuple(each if is_causal is None else bool(is_causal) for each in sliding)
    if dflash.get("use_swa") and not any(sliding):
        sliding = [True] * count
    if len(sliding) != count:
        raise ValueError(f"{len(sliding)} layer_types for {count} layers")
    if any(sliding) and not window:
        raise ValueError("sliding-window attention without a size of the window")
    windows = tuple(int(window or 0) if each else 0 for each in sliding)
    size, mask = int(own.get("block_size") or own.get("dspark_block_size") or 0), int(dflash["mask_token_id"])
    anchored = kind == DSPARK and bool(own.get("sample_from_anchor", True))
    rank = int(own["markov_rank"]) if kind == DSPARK else 0
    return OnePassDrafting(mask, size if anchored else max(size - 1, 0), causal, windows, anchored, rank)


def _unsupported(
    own: Mapping[str, Any], kind: HeadKind, block: OnePassDrafting | None, aux_layers: tuple[int, ...]
) -> tuple[str, ...]:
    """What our drafter cannot do, one line each."""
    rope, family = rope_of(own), own.get("model_type", "llama")
    rotated = float(own.get("partial_rotary_factor") or rope.scaling.get("partial_rotary_factor") or 1.0)
    is_windowed = block is None and "sliding_attention" in (own.get("layer_types") or [])
    # Qwen2 names a window that it does not use; Mistral's counts unless it is null.
    if kind == DRAFT_MODEL and own.get("use_sliding_window", family == "mistral") and own.get("sliding_window") is not None:
        is_windowed |= int(own["sliding_window"]) < int(own["max_position_embeddings"])
    is_speculators = own.get("speculators_model_type") is not None
    found: dict[str, bool] = {
        f"draft models of model_type {family!r} are not supported ({', '.join(FAMILIES)} are)": kind == DRAFT_MODEL
        and family not in FAMILIES,
        f"rope type {rope.kind!r} is not supported (default, linear and llama3 are)": rope.kind
        not in ("default", "linear", "llama3"),
        "partial_rotary_factor other than 1 is not supported": rotated != 1.0,
        f"hidden_act {own.get('hidden_act')!r} is not supported, only 'silu'": own.get("hidden_act", "silu") != "silu",
        "quantised drafters are not supported": bool(own.get("quantization_config")),
        "sliding-window attention is not supported": is_windowed,
        f"model_type {family!r} is not supported, only 'llama' and 'qwen3'": is_speculators
        and block is None
        and family not in ("llama", "qwen3"),
    }
    if block is not None:
        names, dflash = own.get("architectures") or [], _dflash(own)
        # What older heads of Qwen3's kind are called is also the name of DeepSeek-V4's.
        is_known = names in ([DFLASH_ARCHITECTURE], [DSPARK_ARCHITECTURE]) or (
            names == ["DSparkDraftModel"] and family == "qwen3"
        )
        only = f"of heads that draft in one pass, only {DFLASH_ARCHITECTURE} and {DSPARK_ARCHITECTURE} are supported"
        flags = {
            "attention sinks": dflash.get("attention_sink_bias", own.get("add_swa_attention_sink_bias")),
            "attention_value_scale": dflash.get("attention_value_scale") not in (None, 1),
            "logit_scale": own.get("logit_scale") not in (None, 1),
            "is_neox_style false": not own.get("is_neox_style", True),
            "sample_from_anchor": dflash.get("sample_from_anchor"),
            "use_aux_hidden_state false": not dflash.get("use_aux_hidden_state", own.get("use_aux_hidden_state", True)),
            "dspark_draft_topk": own.get("dspark_draft_topk"),
            f"markov_head_type {own.get('markov_head_type')!r}": own.get("markov_head_type") not in (None, "vanilla"),
            MASK_EMBEDDING: own["mask_embedding"],
        }
        found = {f"{', '.join(names)}: {only}": not is_speculators and not is_known} | found
        found |= {f"{name} is not supported": bool(is_set) for name, is_set in flags.items()}
        found["the configuration names no target_layer_ids"] = not aux_layers
        found["sliding-window attention that is not causal is not supported"] = any(
            window and not causal for window, causal in zip(block.windows, block.causal, strict=True)
        )
    return tuple(line for line, holds in found.items() if holds)
