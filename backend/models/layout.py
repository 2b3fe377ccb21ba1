"""Which tensors a drafter's files must hold, and how each layout names them.  Pure data, any process."""

from backend.models.head_config import DRAFT_MODEL, HeadConfig, load_config, load_model_config
from backend.models.tensor_files import EMBEDDING, TensorFiles

Shape = tuple[int, ...]
MARKOV_IN, MARKOV_OUT = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


def canonical_names(files: TensorFiles) -> dict[str, str]:
    """Canonical name -> name in the files, for every tensor of a drafter (`midlayer.` becomes `layers.0.`)."""
    return {name.removeprefix("model.").replace("midlayer.", "layers.0."): name for name in files.tensors}


def is_draft_model(files: TensorFiles) -> bool:
    """Whether these are weights of a whole language model.  Heads differ: they have an `fc` or a norm for features."""
    names = canonical_names(files)
    whole = {"embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight"}
    return whole <= names.keys() and not {"fc.weight", "hidden_norm.weight", "layers.0.hidden_norm.weight"} & names.keys()


def drafter_config(directory: str, target_dir: str) -> HeadConfig:
    """The configuration of the head or draft model in `directory`.  Raises `CheckpointError`."""
    load = load_model_config if is_draft_model(TensorFiles(directory)) else load_config
    return load(directory, target_dir)


def required_tensors(config: HeadConfig) -> dict[str, Shape]:
    """Shapes of the tensors that the drafter's own files must hold, `fc` included; projections are `[out, in]`."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {}
    if config.kind == DRAFT_MODEL:
        shapes["norm.weight"] = (hidden,)
    elif config.kind == "eagle":
        shapes["fc.weight"] = (hidden, 2 * hidden)
    elif config.block is not None:
        shapes |= {"norm.weight": (hidden,), "hidden_norm.weight": (hidden,)} | _fc_tensors(config)
        if rank := config.block.markov_rank:
            shapes |= {MARKOV_IN: (config.vocab_size, rank), MARKOV_OUT: (config.draft_vocab_size, rank)}
        if config.own_vocab_size > config.vocab_size:
            shapes[EMBEDDING] = (config.own_vocab_size, hidden)
    else:
        shapes["norm.weight"] = (hidden,)
        shapes["layers.0.hidden_norm.weight"] = (hidden,)
        shapes["layers.0.input_layernorm.weight"] = (hidden,)
        shapes |= _fc_tensors(config)
    for index in range(config.num_layers):
        shapes |= _layer_tensors(config, index)
    if config.kind != DRAFT_MODEL and config.draft_vocab_size != config.vocab_size:
        shapes["d2t"] = (config.draft_vocab_size,)
        shapes["lm_head.weight"] = (config.draft_vocab_size, hidden)
    return shapes


def _fc_tensors(config: HeadConfig) -> dict[str, Shape]:
    if not config.uses_aux:
        return {}
    count, width = len(config.aux_layers) or 3, config.target_hidden_size
    shapes: dict[str, Shape] = {"fc.weight": (config.hidden_size, count * width)}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (count * width,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(count)}
    return shapes


def _layer_tensors(config: HeadConfig, index: int) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width = 2 * hidden if config.kind == "eagle3" and index == 0 else hidden
    shapes: dict[str, Shape] = {
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if index > 0 or config.block is not None or config.kind == DRAFT_MODEL:
        shapes["input_layernorm.weight"] = (hidden,)
    if config.model_type == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return {f"layers.{index}.{name}": shape for name, shape in shapes.items()}
