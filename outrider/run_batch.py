"""`outrider run-batch`: sends the requests of a file in OpenAI's batch format to a gateway, and writes the answers to a file.

Answers are written as they come; a further run with the same files goes on where the last ended.  The command line's process.
"""

import asyncio
import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from backend.config import sources
from backend.config.logs import configure_logging
from backend.config.runtime import StateError
from backend.config.sources import CommandError, ConfigError, Parser, Say
from backend.launch import state
from gateway.storage.batches import lines
from gateway.storage.batches.lines import BatchLine, LineAnswer, again
from outrider.connection import is_here

CONCURRENCY = 32
"""Less than a gateway's default `max_in_flight`, so that other clients are served too."""
MAX_BODY_BYTES = 1 << 30
"""Only bounds the memory; the gateway has limits of its own."""
PATIENCE_S = 300.0
"""Seconds in which a line is tried again while no gateway answers or has room.  Long enough for a restart."""
RETRY_S = (0.5, 30.0)
"""Seconds between two attempts: first and longest wait."""
REPORT_S = 5.0
SHOWN_ERRORS = 5


class _Answer(msgspec.Struct):
    """The fields that are read from a line of an earlier output."""

    custom_id: str
    response: dict[str, Any] | None = None


def main(arguments: list[str], say: Say) -> int:
    """Returns how many requests failed.  Raises `ConfigError` or `CommandError`."""
    parser = Parser(
        prog="outrider run-batch", description="Carries out OpenAI batch requests; run again, it goes on.", allow_abbrev=False
    )
    parser.add_argument("-i", "--input-file", type=Path, required=True, help="requests, as OpenAI's batch input (JSONL)")
    parser.add_argument("-o", "--output-file", type=Path, required=True, help="answers, as OpenAI's batch output (JSONL)")
    parser.add_argument("--url", help="a gateway; default: that of the fleet that runs on this host")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY, help=f"requests at a time (default: {CONCURRENCY})")
    parser.epilog = "--api-key KEY, or @FILE, is sent where the gateway wants one."
    given, rest = parser.parse_known_args(arguments)
    settings = sources.load(rest, "outrider run-batch").settings
    configure_logging("warning")
    if given.concurrency < 1:
        raise ConfigError("--concurrency: must be 1 or more")
    url, key = _url(given.url), settings.gateway.api_key
    return asyncio.run(carry_out(url, key, given.input_file, given.output_file, given.concurrency, say))


async def carry_out(url: str, key: str | None, source: Path, target: Path, concurrency: int, say: Say) -> int:
    """Writes the gateway's answers to the lines of `source`; returns how many are errors.  Raises `CommandError`."""
    try:
        total = _checked(source)
        done, failed = _resume(source, target)
        output = target.open("ab")
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from error
    if done:
        say(f"{len(done)} of {total} requests are answered already")
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=concurrency)
    timeout = httpx.Timeout(None, connect=10.0)
    # With a transport of its own, no proxy is asked.
    transport = httpx.AsyncHTTPTransport(limits=limits) if is_here(url) else None
    with output:
        async with httpx.AsyncClient(
            base_url=url, headers=headers, limits=limits, timeout=timeout, transport=transport
        ) as http:
            await _greet(http)
            requests = (each for each in _requests(source) if each.custom_id not in done)
            reported_at = time.monotonic()

            async def go_on() -> None:
                nonlocal failed, reported_at
                for line in requests:
                    answer = await _answer(http, line)
                    output.write(answer.line() + b"\n")
                    output.flush()
                    done.add(line.custom_id)
                    failed += answer.failed
                    if time.monotonic() - reported_at > REPORT_S:
                        reported_at = time.monotonic()
                        say(f"{len(done)} of {total}")

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(concurrency):
                        group.create_task(go_on())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
    say(f"{total} requests, {failed} of them failed")
    return failed


async def _answer(http: httpx.AsyncClient, line: BatchLine) -> LineAnswer:
    """Answers one line.  Raises `CommandError` if no gateway answers for too long, because other lines would fail too."""
    request_id = uuid.uuid4().hex
    headers = {"content-type": "application/json", "x-request-id": request_id}
    since, (wait_s, most_s) = None, RETRY_S
    while True:
        try:
            response = await http.post(line.url, content=bytes(line.body), headers=headers)
        except httpx.TransportError as error:
            since = since or time.monotonic()
            if time.monotonic() - since > PATIENCE_S:
                why = f"the gateway does not answer ({type(error).__name__}); run this again to go on"
                raise CommandError(why) from error
            after = 0.0
        else:
            since = since or time.monotonic()
            if not again(response.status_code, response.headers, response.content) or time.monotonic() - since > PATIENCE_S:
                return LineAnswer(line.custom_id, response.status_code, _json(response.content), request_id)
            after = _seconds(response.headers.get("retry-after"))
        await asyncio.sleep(max(after, random.uniform(0.5, 1) * wait_s))
        wait_s = min(2 * wait_s, most_s)


def _url(given: str | None) -> str:
    if given is None:
        try:
            given = state.find(None).url
        except StateError as error:
            raise CommandError(f"{error}, or --url") from error
        if not given:
            raise CommandError("the fleet on this host has no gateway yet")
    if not given.startswith(("http://", "https://")):
        raise ConfigError("--url: must begin with http:// or https://")
    return given.rstrip("/").removesuffix("/v1")


async def _greet(http: httpx.AsyncClient) -> None:
    try:
        status = (await http.get("/v1/models")).status_code
    except httpx.HTTPError as error:
        raise CommandError(f"no gateway answers at {http.base_url} ({type(error).__name__})") from error
    if status == 401:
        raise CommandError("the gateway wants another key (--api-key)")


def _checked(source: Path) -> int:
    checked = lines.check(source, None, MAX_BODY_BYTES)
    if checked.errors:
        shown = [f"{source}:{each.line or 1}: {each.message}" for each in checked.errors[:SHOWN_ERRORS]]
        more = len(checked.errors) - len(shown)
        raise CommandError("; ".join([*shown, f"and {more} more"] if more else shown))
    return checked.total


def _requests(source: Path) -> Iterator[BatchLine]:
    return (lines.parsed(text) for _, text in lines.read(source))


def _resume(source: Path, target: Path) -> tuple[set[str], int]:
    """The ids that `target` has answers to, and how many of them failed.  Removes lines that are no answers from the file."""
    if not target.exists():
        return set(), 0
    wanted_ids = {each.custom_id for each in _requests(source)}
    partial = target.with_name(f"{target.name}.partial")
    done: set[str] = set()
    failed = 0
    with target.open("rb") as before, partial.open("wb") as kept:
        for text in before:
            try:
                answer = msgspec.json.decode(text, type=_Answer)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                if text.endswith(b"\n"):
                    raise CommandError(f"{target}: is no output of a batch; name another file") from None
                continue
            if answer.custom_id not in wanted_ids:
                raise CommandError(f"{target}: has answers to other requests; name another file")
            if answer.response is not None and answer.custom_id not in done and text.endswith(b"\n"):
                done.add(answer.custom_id)
                failed += answer.response.get("status_code") != 200
                kept.write(text)
    partial.replace(target)
    return done, failed


def _json(content: bytes) -> msgspec.Raw:
    """An answer's body.  If it is not JSON, for example a proxy's error page, it becomes a JSON string."""
    try:
        msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.Raw(msgspec.json.encode(content.decode(errors="replace")))
    return msgspec.Raw(content)


def _seconds(text: str | None) -> float:
    return min(float(text), RETRY_S[1]) if text is not None and text.isdecimal() else 0.0
