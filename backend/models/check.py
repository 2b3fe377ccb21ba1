"""Checks whether a drafter, or other weights of the target, fit the target.  Any process; reads no weights.

With `errors` the pair cannot work at all.  With `warnings` it works, but few drafts may be accepted, and no error would ever
say so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.models.head_config import (
    DRAFT_MODEL,
    DSPARK,
    CheckpointError,
    HeadConfig,
    Rope,
    default_aux_layers,
    load_config,
    read_config,
    rope_of,
    text_config,
)
from backend.models.kinds import DrafterKind
from backend.models.layout import MARKOV_IN, MARKOV_OUT, Shape, required_tensors
from backend.models.tensor_files import EMBEDDING, LM_HEAD, TensorFiles
from backend.models.vocabulary import shared_tokens

TEACHING = frozenset(
    [
        "llama",
        "llama4_text",
        "mistral",
        "mixtral",
        "phi3",
        "gpt_oss",
        "qwen2",
        "qwen2_moe",
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "qwen3",
        "qwen3_moe",
        "qwen3_vl_text",
        "qwen3_vl_moe_text",
    ]
)
"""Targets that can teach a head: their last norm is Llama's, and their scores are its product with the output matrix."""


@dataclass
class Misfits:
    """What is wrong with a pair of drafter and target.  `kind`: what the drafter's files hold."""

    kind: DrafterKind = "eagle"
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def find_misfits(head_dir: str, target_dir: str) -> Misfits:
    """All misfits, with errors and warnings in separate lists."""
    found = Misfits()
    try:
        head, files = load_config(head_dir, target_dir), TensorFiles(head_dir)
        target = text_config(read_config(target_dir))
        found.kind = head.drafter_kind
        found.errors.extend(head.unsupported)
        found.errors.extend(_errors(head, target) if head.kind != DRAFT_MODEL else ())
        found.errors.extend(misshapen(head, files, target_dir))
        found.warnings.extend(_compared_tokenizers(head, head_dir, target_dir) if head.kind == DRAFT_MODEL else ())
        found.warnings.extend(_warnings(head, target))
        if "mask_hidden" in files.canonical_names:
            found.warnings.append(
                "it was trained to draft all tokens in one pass (P-EAGLE), and drafts them one after the other here: "
                "few may be accepted behind the first"
            )
    except CheckpointError as error:
        found.errors.append(str(error))
    return found


def _compared_tokenizers(model: HeadConfig, own: str, target: str) -> Iterator[str]:
    """Warnings.  A draft is token ids, so both models must give them the same meaning, or ids are mapped."""
    shared = shared_tokens(model, own, target)
    if not all((Path(directory) / "tokenizer.json").is_file() for directory in (own, target)):
        yield "without a tokenizer.json in both directories nobody knows whether their tokens are the same"
    elif shared is not None and (shared.differ or len(shared.ids) < shared.target_size):
        mapped = ", under other ids, which are mapped" if shared.differ else ""
        yield f"it knows {len(shared.ids)} of the target's {shared.target_size} tokens{mapped}"


def _errors(head: HeadConfig, target: dict[str, Any]) -> Iterator[str]:
    """What keeps a head from drafting for a target, by their configurations."""
    width, vocab, layers = (target.get(key) for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
    if width is not None and head.target_hidden_size != width:
        yield f"hidden size: the head was made for a target of {head.target_hidden_size}, this one has {width}"
    is_wider = head.kind == DSPARK and head.own_vocab_size > head.vocab_size
    if vocab is not None and head.own_vocab_size and head.own_vocab_size != vocab and not is_wider:
        yield f"vocabulary: the head was made for {head.own_vocab_size} tokens, this target has {vocab}"
    if head.draft_vocab_size > head.vocab_size:
        yield f"draft vocabulary: {head.draft_vocab_size} tokens are more than the target's {head.vocab_size}"
    tokens = max(head.vocab_size, head.own_vocab_size)
    if head.block is not None and not 0 <= head.block.mask_token < tokens:
        yield f"mask token: {head.block.mask_token} is outside the vocabulary of {tokens}"
    if layers is not None:
        outside = [layer for layer in head.aux_layers if not 0 <= layer <= layers]
        yield from (f"feature layers: {layer} is outside this target's 0..{layers}" for layer in outside)
        if head.aux_layers == default_aux_layers(layers) and len(set(head.aux_layers)) < len(head.aux_layers):
            yield f"feature layers: a target of {layers} layers is too shallow for the default three"


def _warnings(head: HeadConfig, target: dict[str, Any]) -> Iterator[str]:
    """What merely lowers acceptance, by the configurations."""
    longest, layers, rope = target.get("max_position_embeddings"), target.get("num_hidden_layers"), rope_of(target)
    is_shorter = longest is not None and head.max_position < longest
    if head.kind == DRAFT_MODEL:
        if is_shorter:
            yield f"it knows {head.max_position} positions, the target {longest}: nothing is drafted beyond"
        return
    if layers is not None and head.block is None and tuple(each + 1 for each in head.aux_layers) == default_aux_layers(layers):
        # As SpecForge's and ModelOpt's heads name the usual features.  SGLang adds one where the first is 1, except for gpt-oss
        # (sglang#25454, sglang#32334); vLLM never does.
        yield (
            f"feature layers: {', '.join(map(str, head.aux_layers))} are read as the inputs of these layers, as in vLLM; "
            f"if acceptance stays near 1, the trainer meant outputs: add one to each in the head's config.json"
        )
    if is_shorter:
        yield (
            f"max_position_embeddings: the head says {head.max_position}, the target {longest}; "
            f"beyond {head.max_position} tokens acceptance may drop"
        )
    if rope.theta != head.rope.theta:
        yield f"rope_theta: the head says {head.rope.theta:g}, the target {rope.theta:g}"
    if (own := _scaling(head.rope)) != (wanted := _scaling(rope)):
        yield f"rope scaling: the head says {own}, the target {wanted}; acceptance may drop"


def _scaling(rope: Rope) -> str:
    """The kind of scaling, and its numbers, whatever else a configuration has beside them."""
    numbers = {name: value for name, value in rope.scaling.items() if name != "rope_theta" and type(value) in (int, float)}
    return " ".join([rope.kind, *(f"{name}={value:g}" for name, value in sorted(numbers.items()) if rope.kind != "default")])


def misshapen(config: HeadConfig, files: TensorFiles, target_dir: str) -> Iterator[str]:
    """A line for each tensor, of the drafter's own or taken from its target, that is missing or has another shape."""
    names, required = files.canonical_names, required_tensors(config)
    for name, wanted in required.items():
        shape = files.shape(names[name]) if name in names else None
        if shape is None:
            yield f"missing tensor: {name}"
        elif shape != wanted and not (name in (MARKOV_IN, MARKOV_OUT) and shape[0] > wanted[0] and shape[1:] == wanted[1:]):
            yield f"tensor {name}: shape {list(shape)}, expected {list(wanted)}"
    is_model = config.kind == DRAFT_MODEL
    for name, rows in ((EMBEDDING, config.vocab_size), (LM_HEAD, config.draft_vocab_size)):
        if name in required or (is_model and name not in names):
            continue
        target = None if name in names else TensorFiles(target_dir)
        shape = files.shape(names[name]) if target is None else _shape_in_target(name, target)
        expected = [config.own_vocab_size if is_model else rows, config.hidden_size]
        if target is not None and target.is_quantised(name):
            yield f"tensor {name}: quantised in the target, and the head has none of its own"
        elif shape is None:
            yield f"missing tensor: {name}, neither in the head nor in the target"
        # More rows are allowed: vocabularies may be padded.
        elif len(shape) != 2 or shape[0] < expected[0] or shape[1] != expected[1]:
            yield f"tensor {name}: shape {list(shape)}, expected {expected}"


def _shape_in_target(name: str, target: TensorFiles) -> Shape | None:
    """The shape of the target's embedding or output matrix.  A target with tied embeddings may have no output matrix."""
    found = target.find(name) or target.find(EMBEDDING)
    return target.shape(found) if found else None


def why_not_learning(head_dir: str, target_dir: str) -> str | None:
    """Why a head that fits its target cannot learn from live traffic; None: it can.  Raises `CheckpointError`."""
    head = load_config(head_dir, target_dir)
    if head.kind != "eagle3" or not head.uses_aux:
        return "only EAGLE-3 heads that join hidden states of the target learn"
    if head.num_layers != 1 or head.norm_before_residual or head.norm_before_fc or head.fc_norm or head.norm_output:
        return "only EAGLE-3 heads of one layer with the plain norms learn"
    if head.hidden_size != head.target_hidden_size:
        return "only heads as wide as their target learn"
    if any(name.endswith(".bias") for name in TensorFiles(head_dir).tensors):
        return "heads with biases do not learn"
    family, target = text_config(read_config(target_dir)).get("model_type"), TensorFiles(target_dir)
    if target.is_quantised(LM_HEAD):
        return "nothing is learned from a target whose output matrix is quantised"
    if family not in TEACHING or final_norm(target) is None:
        return f"nothing is learned from a target of model_type {family!r}: its last norm or its scores may be unlike Llama's"
    return None


def final_norm(target: TensorFiles) -> str | None:
    """The name of the weight of the target's last norm.  Other modules have norms, too."""
    return target.find("model.norm.weight") or target.find("language_model.norm.weight")


def reads_last_state(head_dir: str, target_dir: str) -> bool:
    """Whether the target's last hidden state, by which heads are taught, is among the head's features."""
    layers = text_config(read_config(target_dir)).get("num_hidden_layers")
    return layers in load_config(head_dir, target_dir).aux_layers


# Other weights of the target.


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
    """Whether the target's output matrix is its embedding.  Gemma's configurations leave that to their class."""
    config = read_config(target_dir)
    is_said = text_config(config).get("tie_word_embeddings", config.get("tie_word_embeddings"))
    return bool(is_said) or TensorFiles(target_dir).find(LM_HEAD) is None


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
