"""How the demo models are trained.  Durations are minutes of wall clock; lengths and batches are in tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """How long a training takes, with what texts and at which learning rates.  `steps`, when set, replaces `minutes`.

    Texts have `length` tokens, and `long_length` in the last `long_share` of the run.
    """

    minutes: float
    steps: int | None = None
    tokens_per_step: int
    length: int
    long_length: int = 0
    long_share: float = 0.0
    matrix_rate: float
    embedding_rate: float
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions(TrainingOptions):
    """How the target is trained.  `positions` is the longest context in the model's configuration."""

    minutes: float = 60.0
    vocab_size: int = 2048
    layers: int = 5
    hidden: int = 256
    tokens_per_step: int = 8192
    length: int = 512
    long_length: int = 2048
    long_share: float = 0.15
    positions: int = 4096
    matrix_rate: float = 0.02
    embedding_rate: float = 3e-3
    weight_decay: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions(TrainingOptions):
    """How a head is trained.

    `generated_tokens` is how much text the target generates for it, which takes time in addition to `minutes`.  `mixture` has
    pairs of temperature and share of that text.  `source_share` is the amount of source code, as a share of the generated text.
    """

    minutes: float = 30.0
    unroll: int = 6
    generated_tokens: int = 450_000
    mixture: tuple[tuple[float, float], ...] = ((0.0, 0.4), (0.8, 0.2), (1.0, 0.4))
    source_share: float = 0.5
    tokens_per_step: int = 2048
    length: int = 256
    long_length: int = 1024
    long_share: float = 0.12
    matrix_rate: float = 0.015
    embedding_rate: float = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelOptions(TrainingOptions):
    """How a draft model is trained for an existing target.

    `first_choice` is the weight of the target's first choice in the goal; the rest is the target's distribution.
    """

    minutes: float = 15.0
    layers: int = 4
    hidden: int = 128
    tokens_per_step: int = 4096
    length: int = 512
    first_choice: float = 0.3
    matrix_rate: float = 0.02
    embedding_rate: float = 3e-3
