"""Batches in the format of OpenAI's API, with the tokens of their answers.  Pure data."""

from __future__ import annotations

import time
from typing import Any, Literal

from openai import types
from openai.types.batch_usage import InputTokensDetails, OutputTokensDetails
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OPEN: frozenset[Status] = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
"""States of batches that have not ended."""
NO_USAGE = types.BatchUsage(
    input_tokens=0,
    input_tokens_details=InputTokensDetails(cached_tokens=0),
    output_tokens=0,
    output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
    total_tokens=0,
)


class Batch(types.Batch):
    """OpenAI's batch, with what each has here when it is created.  `model` is null where lines name several."""

    object: Literal["batch"] = "batch"
    completion_window: str = "24h"
    expires_at: int
    status: Status = "validating"
    request_counts: types.BatchRequestCounts = types.BatchRequestCounts(total=0, completed=0, failed=0)
    usage: types.BatchUsage = NO_USAGE
    """Tokens of all answers so far."""
    owner: SkipJsonSchema[str] = Field("", exclude=True)
    lifetime_s: SkipJsonSchema[float] = Field(0.0, exclude=True)
    """How long its output files are kept.  Clients see neither this nor its owner."""

    def entering(self, status: Status, **fields: Any) -> Batch:
        """The batch as it enters a state now, with changes of other fields."""
        return self.model_copy(update={"status": status, f"{status}_at": int(time.time()), **fields})


def added(total: types.BatchUsage, usage: Any) -> types.BatchUsage:
    """`total` and one answer's `usage`, which may have the names of any of the APIs."""
    if not isinstance(usage, dict):
        return total
    taken = _number(usage, "input_tokens", "prompt_tokens")
    given = _number(usage, "output_tokens", "completion_tokens")
    cached = _number(usage.get("input_tokens_details") or usage.get("prompt_tokens_details"), "cached_tokens")
    reasoning = _number(usage.get("output_tokens_details") or usage.get("completion_tokens_details"), "reasoning_tokens")
    return types.BatchUsage(
        input_tokens=total.input_tokens + taken,
        input_tokens_details=InputTokensDetails(cached_tokens=total.input_tokens_details.cached_tokens + cached),
        output_tokens=total.output_tokens + given,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=total.output_tokens_details.reasoning_tokens + reasoning),
        total_tokens=total.total_tokens + taken + given,
    )


def _number(values: Any, *names: str) -> int:
    for name in names:
        value = values.get(name) if isinstance(values, dict) else None
        if isinstance(value, int):
            return value
    return 0
