"""What callers of the Python API are given.  Any process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class OutriderError(Exception):
    """A request was refused, or could not be answered; `status` is 0 where no answer came."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(f"{status} {code}: {message}" if code else f"{status}: {message}")
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True)
class Sample:
    """One finished output."""

    index: int
    """Position of the prompt in the call."""
    sample: int
    """Number of the sample of that prompt, from 0."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    """The output, with the token that ended it if any."""
    text: str
    logprobs: list[float] | None
    """Natural logarithms of the output tokens' probabilities, if `logprobs` was asked for."""
    finish_reason: str
    """`stop` or `length`."""
    account: dict[str, Any] | None
    """What its drafts brought, such as `tokens_per_verification`, `drafted` and `accepted`; None where the fleet sends none."""
