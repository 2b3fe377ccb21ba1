"""Files and batches in the format of OpenAI's API, and the lines of their files.  Pure data."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OPEN: frozenset[Status] = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
"""States of batches that have not ended."""
Purpose = Literal["batch", "batch_output"]
RETRIED = frozenset({429, 503})
"""Statuses after which a line is tried again, because the fleet cannot serve it now; not if a header forbids it."""


class File(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    expires_at: int
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    status_details: None = None


class LineError(msgspec.Struct, frozen=True):
    """One error in an input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Errors(msgspec.Struct, frozen=True):
    data: list[LineError]
    object: Literal["list"] = "list"


class Counts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class ReasoningTokens(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True):
    """Tokens of all answers so far."""

    input_tokens: int = 0
    input_tokens_details: CachedTokens = CachedTokens()
    output_tokens: int = 0
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: int = 0

    def plus(self, usage: Any) -> BatchUsage:
        """Adds one answer's `usage`, which may have the names of any of the APIs."""
        if not isinstance(usage, dict):
            return self
        taken = _number(usage, "input_tokens", "prompt_tokens")
        given = _number(usage, "output_tokens", "completion_tokens")
        cached = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
        reasoning = usage.get("output_tokens_details") or usage.get("completion_tokens_details") or {}
        return BatchUsage(
            self.input_tokens + taken,
            CachedTokens(self.input_tokens_details.cached_tokens + _number(cached, "cached_tokens")),
            self.output_tokens + given,
            ReasoningTokens(self.output_tokens_details.reasoning_tokens + _number(reasoning, "reasoning_tokens")),
            self.total_tokens + taken + given,
        )


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    object: Literal["batch"] = "batch"
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    model: str | None = None
    """The model that all lines name; null if they name several."""
    errors: Errors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    usage: BatchUsage = BatchUsage()
    metadata: dict[str, str] | None = None

    def entering(self, status: Status, **fields: Any) -> Batch:
        """The batch as it enters a state now, with changes of other fields."""
        return replace(self, status=status, **{f"{status}_at": int(time.time())}, **fields)


class BatchLine(msgspec.Struct, frozen=True):
    """A line of an input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class LineAnswer(msgspec.Struct, frozen=True):
    """The result of a line: a status and a body, or an error if there was no answer."""

    custom_id: str
    status: int
    body: msgspec.Raw | None
    request_id: str
    error: dict[str, str] | None = None
    usage: Any = None

    @property
    def failed(self) -> bool:
        return self.status != 200

    def line(self) -> bytes:
        """The line of the output or error file, without the line end."""
        response = None
        if self.body is not None:
            response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        shown = {"id": new_id("batch_req_"), "custom_id": self.custom_id, "response": response, "error": self.error}
        return msgspec.json.encode(shown)


def again(status: int, headers: Mapping[str, str]) -> bool:
    """Whether a line with such an answer is tried again."""
    return status in RETRIED and headers.get("x-should-retry") != "false"


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def _number(values: Any, *names: str) -> int:
    for name in names:
        value = values.get(name) if isinstance(values, dict) else None
        if isinstance(value, int):
            return value
    return 0
