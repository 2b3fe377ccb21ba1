"""Which tensors a drafter's files must hold.  Pure data, any process."""

from backend.models.head_config import DRAFT_MODEL, HeadConfig
from backend.models.tensor_files import EMBEDDING, LM_HEAD

Shape = tuple[int, ...]
MARKOV_IN, MARKOV_OUT = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


def required_tensors(config: HeadConfig) -> dict[str, Shape]:
    """Shapes of the tensors that the drafter's own files must hold, `fc` included; projections are `[out, in]`."""
    hidden, width, block = config.hidden_size, config.target_hidden_size, config.block
    shapes: dict[str, Shape] = {}
    if config.kind == "eagle":
        shapes["fc.weight"] = (hidden, 2 * hidden)
    else:
        shapes["norm.weight"] = (hidden,)
    if config.kind == "eagle3":
        shapes["layers.0.hidden_norm.weight"] = (hidden,)
    if block is not None:
        shapes["hidden_norm.weight"] = (hidden,)
        if rank := block.markov_rank:
            shapes |= {MARKOV_IN: (config.vocab_size, rank), MARKOV_OUT: (config.draft_vocab_size, rank)}
        if config.own_vocab_size > config.vocab_size:
            shapes[EMBEDDING] = (config.own_vocab_size, hidden)
    if config.uses_aux:
        count = len(config.aux_layers) or 3
        shapes["fc.weight"] = (hidden, count * width)
        if config.norm_before_fc:
            shapes["input_norm.weight"] = (count * width,)
        if config.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(count)}
    for index in range(config.num_layers):
        shapes |= _layer_tensors(config, index)
    if config.kind != DRAFT_MODEL and config.draft_vocab_size != config.vocab_size:
        shapes |= {"d2t": (config.draft_vocab_size,), LM_HEAD: (config.draft_vocab_size, hidden)}
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
    if index > 0 or config.kind != "eagle":
        shapes["input_layernorm.weight"] = (hidden,)
    if config.model_type == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return {f"layers.{index}.{name}": shape for name, shape in shapes.items()}
