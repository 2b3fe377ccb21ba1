"""Heads and draft models with random weights, and requests that they draft for.

They stand for published ones: what a pass computes and how long it takes does not depend on the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backend.drafter.dflash import DFlashProposer
from backend.drafter.eagle import EagleProposer, ModelProposer
from backend.drafter.proposer import Drafted, DraftRequest, Premise, Sampling, Until
from backend.drafter.service import MAX_BATCH_OUTCOMES
from backend.models.checkpoint import HeadWeights
from backend.models.head_config import DFLASH, DRAFT_MODEL, DSPARK, HeadConfig, OnePassDrafting, Rope
from backend.models.layout import required_tensors
from backend.wire.drafting import Outcome

NEW_ROWS = 3
"""Tokens that a verification confirms."""

_HEAD = HeadConfig(
    kind="eagle3",
    model_type="llama",
    hidden_size=512,
    target_hidden_size=512,
    intermediate_size=1024,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=32000,
    draft_vocab_size=8000,
    max_position=4096,
    rms_norm_eps=1e-5,
    rope=Rope(500000.0, "default", {}),
    dtype="float32",
    unsupported=(),
)
_ONE_PASS = replace(_HEAD, kind=DFLASH, model_type="qwen3", num_layers=2, block=OnePassDrafting(3, 0, (False, True), (0, 0)))
SMALL = {
    "head": _HEAD,
    "one-pass head": _ONE_PASS,
    "one-pass head with a Markov head": replace(
        _ONE_PASS, kind=DSPARK, block=OnePassDrafting(3, 0, (False, True), (0, 0), anchored=True, markov_rank=64)
    ),
    "head of two layers": replace(_HEAD, kind="eagle", num_layers=2, draft_vocab_size=32000),
    "draft model": replace(_HEAD, kind=DRAFT_MODEL, model_type="qwen3", num_layers=4, draft_vocab_size=32000),
}
_HEAD_OF_8B = replace(
    _HEAD, hidden_size=4096, target_hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"
)
_ONE_PASS_OF_8B = replace(
    _HEAD_OF_8B,
    kind=DFLASH,
    model_type="qwen3",
    intermediate_size=12288,
    num_layers=5,
    vocab_size=151936,
    draft_vocab_size=151936,
    block=OnePassDrafting(3, 15, (False,) * 5, (0,) * 5),
)
LARGE = {
    "EAGLE-3 head of an 8B target": replace(_HEAD_OF_8B, intermediate_size=14336, vocab_size=128256, draft_vocab_size=32000),
    "DFlash head of an 8B target, 5 layers": _ONE_PASS_OF_8B,
    "DSpark head of an 8B target, 5 layers": replace(
        _ONE_PASS_OF_8B, kind=DSPARK, block=OnePassDrafting(3, 15, (False,) * 5, (0,) * 5, anchored=True, markov_rank=256)
    ),
    "draft model of 0.6B, 28 layers": replace(
        _HEAD_OF_8B,
        kind=DRAFT_MODEL,
        model_type="qwen3",
        hidden_size=1024,
        target_hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        vocab_size=151936,
        draft_vocab_size=151936,
    ),
}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def random_head(config: HeadConfig, device: str = "cpu") -> HeadWeights:
    """A head or draft model with random weights, drawn on a device, whose logits have a standard deviation of about 4."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = TYPES[config.dtype]

    def draw(shape: tuple[int, ...], scale: float) -> Tensor:
        return torch.empty(shape, device=device).normal_(0, scale, generator=generator).to("cpu", dtype)

    shapes = required_tensors(config)
    is_cut = shapes.pop("d2t", None) is not None
    shapes.pop("lm_head.weight", None)
    tensors = {n: draw(s, 2 * s[1] ** -0.5) if len(s) == 2 else 1 + draw(s, 0.1) for n, s in shapes.items()}
    hidden = config.hidden_size
    return HeadWeights(
        config,
        tensors,
        draw((config.vocab_size, hidden), 1.0),
        draw((config.draft_vocab_size, hidden), 4 * hidden**-0.5),
        torch.arange(config.draft_vocab_size) * (config.vocab_size // config.draft_vocab_size) if is_cut else None,
        config.max_position,
        frozenset(),
        None,
    )


@dataclass
class Requests:
    """Requests of one proposer, all with texts of one length; every text and feature is random but repeatable."""

    proposer: EagleProposer
    count: int
    length: int
    samplings: Sequence[Sampling]

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(5)
        self._rows = torch.randn(self.length + 40, self.proposer.hidden, generator=self._random).to(self.proposer.dtype)
        self.lengths = [self.length + 7 * (i % 5) for i in range(self.count)]
        for key in range(self.count):
            tokens = self._tokens(self.lengths[key])
            rows = len(tokens) - 1 if self.proposer.hidden else 0
            self.proposer.open(key, tokens, rows, self.samplings[key % len(self.samplings)])
            self.proposer.draft([DraftRequest(key, len(tokens), rows, self._features(rows))])
            # A draft model reads a long prompt in several batches.
            self.proposer.draft([DraftRequest(key, len(tokens), 0, None, Until(1))])

    def commit_and_draft(self, until: Until) -> list[Drafted]:
        """Adds `NEW_ROWS` tokens to every text, and drafts for each."""
        asks = []
        for key in range(self.count):
            self.lengths[key] += NEW_ROWS
            rows = NEW_ROWS if self.proposer.hidden else 0
            self.proposer.commit(key, self.lengths[key], self._tokens(NEW_ROWS), rows)
            asks.append(DraftRequest(key, self.lengths[key], rows, self._features(rows), until))
        return self.proposer.draft(asks)

    def draft(self, until: Until) -> list[Drafted]:
        """Drafts anew for all texts as they are: the same tokens, unless they are samples."""
        return self.proposer.draft([DraftRequest(key, self.lengths[key], 0, None, until) for key in range(self.count)])

    def enumerate(self, drafts: list[Drafted], outcomes: int, until: Until) -> list[list[Outcome]]:
        """Outcomes of the verification of `drafts`, in batches as a drafter makes them."""
        texts = zip(range(self.count), self.lengths, drafts, strict=True)
        premises = [Premise(key, length, until, drafted.tokens, outcomes) for key, length, drafted in texts]
        size = MAX_BATCH_OUTCOMES // outcomes
        batches = [premises[first : first + size] for first in range(0, self.count, size)]
        return [found for batch in batches for found in self.proposer.draft_outcomes(batch)]

    def _tokens(self, count: int) -> list[int]:
        return torch.randint(0, 30000, (count,), generator=self._random).tolist()

    def _features(self, rows: int) -> Tensor | None:
        return self._rows[:rows] if self.proposer.hidden else None


def proposer_of(weights: HeadWeights, cache_tokens: int, device: str, graphs: bool = True) -> EagleProposer:
    """Drafts with these weights on a device."""
    made = {DRAFT_MODEL: ModelProposer, DFLASH: DFlashProposer}.get(weights.config.drafter_kind, EagleProposer)
    return made(weights, cache_tokens, device, graphs)
