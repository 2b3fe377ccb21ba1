"""Reads the `config.json` of a drafter: of a head in either layout, or of a draft model.  Imports no torch.

Heads have two layouts.  SafeAILab's is a Llama configuration with a few extra keys; speculators' wraps one in
`transformer_layer_config` and keeps the extra keys outside.  Defaults follow vLLM's reading of both.  A draft model is a
language model of its own, in the layout of transformers.  DFlash and DSpark heads, which draft in one pass, have both layouts
too.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
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


def rope_of(config: dict[str, Any]) -> Rope:
    """Rotary parameters of a transformers configuration, under its older or newer keys."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    return Rope(float(theta), kind, dict(scaling))


def load_config(head_dir: str, target_dir: str | None = None) -> HeadConfig:
    """Reads a head's configuration; values that it leaves to the target come from `target_dir`.  Raises `CheckpointError`."""
    config = _load(_parse, head_dir, target_dir)
    return replace(config, num_layers=1) if config.num_layers > 1 and _is_midlayer_alone(head_dir) else config


def load_model_config(model_dir: str, target_dir: str) -> HeadConfig:
    """Reads a draft model's configuration.  Raises `CheckpointError`."""
    return _load(_parse_model, model_dir, target_dir)


def _load(parse: Callable[[dict[str, Any], dict[str, Any]], HeadConfig], directory: str, target_dir: str | None) -> HeadConfig:
    own = read_config(directory)
    if (Path(directory) / MODELOPT).is_file():
        own.setdefault("quantization_config", {"quant_method": "modelopt"})
    own["mask_embedding"] = (Path(directory) / MASK_EMBEDDING).is_file()
    target = text_config(read_config(target_dir)) if target_dir else {}
    if target_dir and target.get("vocab_size") is None:
        target = target | {"vocab_size": _embedding_rows(target_dir)}
    try:
        return parse(own, target)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{directory}/config.json: {type(error).__name__}: {error}") from error


def _embedding_rows(target_dir: str) -> int:
    """The vocabulary size of a target whose configuration leaves it to its class, as Gemma 3's does."""
    files = TensorFiles(target_dir)
    name = files.find(EMBEDDING)
    if name is None:
        raise CheckpointError(f"{target_dir}/config.json: no vocab_size, and no embedding in the weights tells it")
    return files.tensors[name].shape[0]


def _is_midlayer_alone(head_dir: str) -> bool:
    """Whether the head has SafeAILab's one layer.  Its configuration may repeat the target's number of layers."""
    parts = {name.removeprefix("model.").partition(".")[0] for name in TensorFiles(head_dir).tensors}
    return "midlayer" in parts and "layers" not in parts


def same_features(new: HeadConfig, old: HeadConfig) -> str | None:
    """Why the head `new` cannot draft from the features that verifiers send for `old`; None: it can."""
    for what in ("kind", "hidden_size", "target_hidden_size", "vocab_size", "aux_layers"):
        if getattr(new, what) != getattr(old, what):
            return f"{what} is {getattr(new, what)}, the fleet's heads have {getattr(old, what)}"
    return None


def _parse_model(own: dict[str, Any], target: dict[str, Any]) -> HeadConfig:
    vocab, longest = int(target["vocab_size"]), int(own["max_position_embeddings"])
    problems = _unsupported(own, own)
    if own.get("model_type") not in FAMILIES:
        problems.insert(
            0, f"draft models of model_type {own.get('model_type')!r} are not supported ({', '.join(FAMILIES)} are)"
        )
    # Qwen2 names a window that it does not use; Mistral's counts unless it is null.
    window = own.get("sliding_window") if own.get("use_sliding_window", own.get("model_type") == "mistral") else None
    if window is not None and int(window) < longest:
        problems.append("sliding-window attention is not supported")
    return HeadConfig(
        kind=DRAFT_MODEL,
        target_hidden_size=0,
        num_layers=int(own["num_hidden_layers"]),
        vocab_size=vocab,
        draft_vocab_size=min(int(own["vocab_size"]), vocab),
        max_position=longest,
        dtype=str(_dtype(own) or "float32"),
        unsupported=tuple(dict.fromkeys(problems)),
        **_layers(own),
    )


def _layers(layer: dict[str, Any]) -> dict[str, Any]:
    """What the layers of heads and of draft models have in common, as fields of `HeadConfig`."""
    hidden, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
    return {
        "model_type": str(layer.get("model_type", "llama")),
        "hidden_size": hidden,
        "intermediate_size": int(layer["intermediate_size"]),
        "num_heads": heads,
        "num_kv_heads": int(layer.get("num_key_value_heads") or heads),
        "head_dim": int(layer.get("head_dim") or hidden // heads),
        "own_vocab_size": int(layer.get("vocab_size") or 0),
        "rms_norm_eps": float(layer.get("rms_norm_eps", 1e-6)),
        "rope": rope_of(layer),
    }


def _parse(outer: dict[str, Any], target: dict[str, Any]) -> HeadConfig:
    speculators = outer.get("speculators_model_type")
    if speculators not in (None, "eagle3", DFLASH, DSPARK):
        raise ValueError(f"speculators_model_type {speculators!r} is not supported, only 'eagle3', 'dflash' and 'dspark'")
    layer = outer["transformer_layer_config"] if speculators else outer
    own_vocab = int(layer.get("vocab_size") or 0)
    if isinstance(layer.get("model"), dict):
        layer = {**layer["model"], **layer}
    kind = speculators or _kind(outer)
    is_block = kind in (DFLASH, DSPARK)
    if is_block:
        # Its layers are Qwen3's, whatever the target's are.
        layer = {"rope_theta": 1e6, **layer, "model_type": "qwen3"}
    vocab = int(target.get("vocab_size") or layer["vocab_size"])
    draft_vocab = int(outer.get("draft_vocab_size") or vocab) if kind != "eagle" else vocab
    # An absent key means True in speculators' layout and False in the other (vLLM reads them so).
    before_residual = bool(outer.get("norm_before_residual", bool(speculators)))
    eagle = outer.get("eagle_config") or {}
    before_fc = bool(eagle.get("norm_before_fc", outer.get("norm_before_fc", False)))
    return HeadConfig(
        kind=kind,
        target_hidden_size=int(outer.get("target_hidden_size") or layer.get("target_hidden_size") or layer["hidden_size"]),
        num_layers=int(layer.get("num_hidden_layers", 1)),
        vocab_size=vocab,
        # The tokens that a DSpark head has beyond the target's, such as its mask, are not drafted.
        draft_vocab_size=min(draft_vocab, vocab) if kind == DSPARK else draft_vocab,
        max_position=int(layer.get("max_position_embeddings") or 2048),
        aux_layers=_aux_layers(outer, kind, target),
        uses_aux=is_block or (kind == "eagle3" and bool(eagle.get("use_aux_hidden_state", True))),
        norm_before_residual=before_residual,
        norm_before_fc=before_fc,
        fc_norm=bool(outer.get("fc_norm", False)),
        norm_output=bool(outer.get("norm_output", False)),
        dtype=str(_dtype(outer) or _dtype(layer) or "float32"),
        block=_block(outer, layer, kind) if is_block else None,
        unsupported=tuple(_unsupported_block(outer, layer, kind) if is_block else _unsupported(outer, layer)),
        **_layers(layer) | {"own_vocab_size": own_vocab},
    )


def _block(outer: dict[str, Any], layer: dict[str, Any], kind: HeadKind) -> OnePassDrafting:
    """Reads what vLLM reads, with its order of precedence."""
    own = _of_dflash(outer, kind)
    count, window = int(layer["num_hidden_layers"]), own.get("swa_window_size", layer.get("sliding_window"))
    sliding = [kind == "sliding_attention" for kind in layer.get("layer_types") or [False] * count]
    is_causal = next((each for each in (layer.get("is_causal"), own.get("causal")) if each is not None), None)
    causal = tuple(each if is_causal is None else bool(is_causal) for each in sliding)
    if own.get("use_swa") and not any(sliding):
        sliding = [True] * count
    if len(sliding) != count:
        raise ValueError(f"{len(sliding)} layer_types for {count} layers")
    if any(sliding) and not window:
        raise ValueError("sliding-window attention without a size of the window")
    windows = tuple(int(window or 0) if each else 0 for each in sliding)
    size, mask = int(outer.get("block_size") or outer.get("dspark_block_size") or 0), int(own["mask_token_id"])
    if kind == DFLASH:
        return OnePassDrafting(mask, max(size - 1, 0), causal, windows)
    anchored = bool(outer.get("sample_from_anchor", not outer.get("speculators_model_type")))
    longest = size if anchored else max(size - 1, 0)
    return OnePassDrafting(mask, longest, causal, windows, anchored, int(outer["markov_rank"]))


def _of_dflash(outer: dict[str, Any], kind: HeadKind) -> dict[str, Any]:
    """`dflash_config`; speculators' layout has the same under other keys."""
    mask = outer.get("mask_token_id", outer.get("dspark_noise_token_id"))
    if not outer.get("speculators_model_type"):
        return {"mask_token_id": mask, **(outer.get("dflash_config") or {})}
    if kind == DSPARK:
        return {"mask_token_id": mask}
    causal = not outer.get("sliding_window_non_causal", True)
    return {"mask_token_id": mask, "sample_from_anchor": outer.get("sample_from_anchor"), "causal": causal}


def _dtype(config: dict[str, Any]) -> Any:
    """The type of the weights; `dtype` is the key since transformers 4.56."""
    return config.get("torch_dtype") or config.get("dtype")


def _kind(config: dict[str, Any]) -> HeadKind:
    names = [str(name) for name in config.get("architectures") or []]
    if any("DSpark" in name for name in names):
        return DSPARK
    if "dflash_config" in config or any(part in name for name in names for part in ONE_PASS):
        return DFLASH
    eagle3_keys = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "target_hidden_size")
    if any("Eagle3" in name for name in names) or any(key in config for key in eagle3_keys):
        return "eagle3"
    return "eagle"


def _aux_layers(outer: dict[str, Any], kind: HeadKind, target: dict[str, Any]) -> tuple[int, ...]:
    eagle = outer.get("eagle_config") or {}
    if kind in (DFLASH, DSPARK):
        # `target_layer_ids` are layers whose outputs are meant: the inputs of the next ones.
        places = (outer.get("dflash_config") or {}).get("target_layer_ids"), outer.get("dspark_target_layer_ids")
        outputs = next((each for each in (*places, outer.get("target_layer_ids")) if each), ())
        inputs = outer.get("eagle_aux_hidden_state_layer_ids") or outer.get("aux_hidden_state_layer_ids")
        return tuple(int(i) for i in inputs) if inputs else tuple(int(i) + 1 for i in outputs)
    if kind == "eagle" or not eagle.get("use_aux_hidden_state", True):
        return ()
    ids = outer.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    if ids:
        return tuple(int(i) for i in ids)
    return default_aux_layers(int(target["num_hidden_layers"])) if target else ()


def _unsupported(outer: dict[str, Any], layer: dict[str, Any]) -> list[str]:
    problems = []
    rope = rope_of(layer)
    if rope.kind not in ("default", "linear", "llama3"):
        problems.append(f"rope type {rope.kind!r} is not supported (default, linear and llama3 are)")
    if float(layer.get("partial_rotary_factor") or rope.scaling.get("partial_rotary_factor") or 1.0) != 1.0:
        problems.append("partial_rotary_factor other than 1 is not supported")
    if layer.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act {layer['hidden_act']!r} is not supported, only 'silu'")
    if outer.get("quantization_config"):
        problems.append("quantised drafters are not supported")
    if "sliding_attention" in (layer.get("layer_types") or []):
        problems.append("sliding-window attention is not supported")
    if outer.get("speculators_model_type") and layer.get("model_type", "llama") not in ("llama", "qwen3"):
        problems.append(f"model_type {layer['model_type']!r} is not supported, only 'llama' and 'qwen3'")
    return problems


def _unsupported_block(outer: dict[str, Any], layer: dict[str, Any], kind: HeadKind) -> list[str]:
    problems = _unsupported(outer, {key: value for key, value in layer.items() if key != "layer_types"})
    names, own = outer.get("architectures") or [], _of_dflash(outer, kind)
    # What older heads of Qwen3's kind are called is also the name of DeepSeek-V4's.
    is_known = names in ([DFLASH_ARCHITECTURE], [DSPARK_ARCHITECTURE]) or (
        names == ["DSparkDraftModel"] and outer.get("model_type") == "qwen3"
    )
    if not outer.get("speculators_model_type") and not is_known:
        supported = f"{DFLASH_ARCHITECTURE} and {DSPARK_ARCHITECTURE} are supported"
        problems.insert(0, f"{', '.join(names)}: of heads that draft in one pass, only {supported}")
    flags = {
        "attention sinks": own.get("attention_sink_bias", layer.get("add_swa_attention_sink_bias")),
        "attention_value_scale": own.get("attention_value_scale") not in (None, 1),
        "logit_scale": outer.get("logit_scale") not in (None, 1),
        "is_neox_style false": not layer.get("is_neox_style", True),
        "sample_from_anchor": own.get("sample_from_anchor"),
        "use_aux_hidden_state false": not own.get("use_aux_hidden_state", outer.get("use_aux_hidden_state", True)),
        "dspark_draft_topk": outer.get("dspark_draft_topk"),
        f"markov_head_type {outer.get('markov_head_type')!r}": outer.get("markov_head_type") not in (None, "vanilla"),
        MASK_EMBEDDING: outer["mask_embedding"],
    }
    problems += [f"{name} is not supported" for name, is_set in flags.items() if is_set]
    if not _aux_layers(outer, kind, {}):
        problems.append("the configuration names no target_layer_ids")
    block = _block(outer, layer, kind)
    if any(window and not causal for window, causal in zip(block.windows, block.causal, strict=True)):
        problems.append("sliding-window attention that is not causal is not supported")
    return problems
