"""The lines of a batch's input file, and their answers.

All lines are checked before the first is carried out, then read one by one.  Files are read in a thread.
"""

import sys
import uuid
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

MAX_LINES = 50_000
"""Most lines of a file; OpenAI's limit."""
MAX_ERRORS = 100
"""Most errors shown for one file.  More probably have one cause."""
LONGEST_ID = 512
"""Most characters of a `custom_id`."""
ENVELOPE_BYTES = 1 << 12
"""Most bytes of a line besides its body."""
RETRIED = frozenset({429, 503})
"""Statuses after which a line is tried again, because the fleet cannot serve it now; not if a header forbids it."""


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


class LineError(NamedTuple):
    """One error in an input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


_EMPTY = LineError("empty_file", "The input file is empty. It must have at least one request.")
_TOO_MANY = LineError("too_many_tasks", f"The input file has more than {MAX_LINES} requests.")
_NOT_JSON = "This line is not parseable as valid JSON."
parsed = msgspec.json.Decoder(BatchLine).decode
"""Decodes a line that was checked before."""


class Checked(NamedTuple):
    total: int
    model: str | None
    """The model that all requests name, if it is one."""
    errors: list[LineError]


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _End(msgspec.Struct):
    """How an answer ended: a chat's or completion's choices, or a response.  One that is too long says why it is incomplete."""

    choices: list[_Choice] = []
    status: Any = None
    incomplete_details: Any = None

    @property
    def is_cut_off(self) -> bool:
        lacks_reason = self.status == "incomplete" and self.incomplete_details is None
        return lacks_reason or any(each.finish_reason == "abort" for each in self.choices)


def again(status: int, headers: Mapping[str, str], body: bytes) -> bool:
    """Whether a line with such an answer is tried again: also where it was cut off, as by a pause of all verifiers."""
    if status == 200:
        try:
            return msgspec.json.decode(body, type=_End).is_cut_off
        except msgspec.DecodeError:
            return False
    return status in RETRIED and headers.get("x-should-retry") != "false"


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def read(path: Path, max_body_bytes: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and text of each line that is not blank; no text for a line that is too long.

    Lines that were checked need no bound.
    """
    most = sys.maxsize - 1 if max_body_bytes is None else max_body_bytes + ENVELOPE_BYTES
    with path.open("rb") as file:
        number = 0
        while text := file.readline(most + 1):
            number += 1
            if number == 1:
                text = text.removeprefix(BOM_UTF8)
            if len(text) <= most or text.endswith(b"\n"):
                if text.strip():
                    yield number, text
                continue
            while text and not text.endswith(b"\n"):
                text = file.readline(1 << 20)
            yield number, b""


def check(path: Path, endpoint: str | None, max_body_bytes: int) -> Checked:
    """Checks that every line is a request to `endpoint` with a unique id.  None: any endpoint, any number of lines."""
    total = 0
    errors: list[LineError] = []
    models: set[str] = set()
    seen: set[str] = set()
    for number, text in read(path, max_body_bytes):
        total += 1
        if total > MAX_LINES and endpoint is not None:
            return Checked(total, None, [_TOO_MANY])
        if len(errors) == MAX_ERRORS:
            break
        if not text:
            errors.append(LineError("line_too_long", f"The request is larger than {max_body_bytes} bytes.", number))
            continue
        try:
            fields = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            errors.append(LineError("invalid_json_line", _NOT_JSON, number))
            continue
        error = _error(fields, endpoint, seen)
        if error is not None:
            code, message, param = error
            errors.append(LineError(code, message, number, param))
            continue
        seen.add(fields["custom_id"])
        models.add(str(fields["body"].get("model")))
    if not total:
        errors.append(_EMPTY)
    return Checked(total, models.pop() if len(models) == 1 else None, errors)


def _error(fields: Any, endpoint: str | None, seen: set[str]) -> tuple[str, str, str | None] | None:
    """Code, message and parameter of the first error in a line; None: the line is correct."""
    if not isinstance(fields, dict):
        return "invalid_json_line", "This line is not a JSON object.", None
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if fields.get(name) is None:
            return "missing_required_parameter", f"Missing required parameter: '{name}'.", name
        if not isinstance(fields[name], kind):
            return "invalid_type", f"'{name}' must be {'an object' if kind is dict else 'a string'}.", name
    for name in fields.keys() - {"custom_id", "method", "url", "body"}:
        return "unknown_parameter", f"Unknown parameter: '{name[:64]}'.", name[:64]
    if not 0 < len(fields["custom_id"]) <= LONGEST_ID:
        return "invalid_value", f"'custom_id' must have 1 to {LONGEST_ID} characters.", "custom_id"
    if fields["custom_id"] in seen:
        return "duplicate_custom_id", "Another request has this custom_id. It must be unique within a batch.", "custom_id"
    if fields["method"] != "POST":
        return "invalid_method", "The method must be POST.", "method"
    if endpoint is None and not fields["url"].startswith("/v1/"):
        return "invalid_url", "The url must begin with /v1/.", "url"
    if endpoint not in (None, fields["url"]):
        return "mismatched_url", "The url does not match the endpoint of the batch.", "url"
    for name in ("stream", "background"):
        if fields["body"].get(name):
            return "invalid_value", f"'{name}' has no place in a batch.", f"body.{name}"
    return None
