"""Results and errors of the Python API.  Used in any process."""

from dataclasses import dataclass, field
from typing import Any


class OutriderError(Exception):
    """A request was refused or got no answer.  `status` is the HTTP status, or 0 if no answer came."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(f"{status} {code}: {message}" if code else f"{status}: {message}")
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True)
class WeightSpan:
    """The version of the target's weights that drew the tokens `[start, end)` of an output."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """One finished output."""

    index: int
    """Position of the prompt in the call."""
    sample: int
    """Number of the sample among those of its prompt, from 0."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    """The output, including the token that ended it, if there was one."""
    text: str | None
    """None if `detokenize` was false."""
    logprobs: list[float] | None
    """Natural logarithms of the output tokens' probabilities; None if `logprobs` was not set."""
    finish_reason: str
    """`stop`, `length`, or `abort` if the request was ended at the server."""
    weight_versions: list[WeightSpan]
    """Several if weights were updated meanwhile."""
    cached_tokens: int
    """Prompt tokens that the verifier had in its prefix cache."""
    account: dict[str, Any] | None
    """Speculation statistics, such as `tokens_per_verification`, `drafted` and `accepted`; None if the fleet sends none."""

    @property
    def weight_version(self) -> str | None:
        """Version of the weights that drew the last token; None for an empty output."""
        return self.weight_versions[-1].version if self.weight_versions else None


@dataclass
class Episode:
    """A conversation of the model with an environment."""

    index: int
    """Position of its start in the call."""
    sample: int
    """Number of the episode among those from its start, from 0."""
    token_ids: list[int]
    """All tokens: the start, the outputs, and the environment's replies."""
    output_mask: list[bool] = field(default_factory=list)
    """For each of `token_ids`, whether the model generated it."""
    turns: list[Sample] = field(default_factory=list)
    """The outputs so far.  A turn's `prompt_token_ids` are all tokens before it."""
    reward: float | None = None
    """The environment's last reply, if it is a number."""
    state: Any = None
    """Free for use by the environment."""
