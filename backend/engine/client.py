"""A synchronous client of the engine wire.  Used by benchmarks, rollouts and tests.

Any process; a client belongs to one thread.  Uses vLLM's request and output structs and their codec, but no engine.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

from backend.engine.speech import EngineCodec
from backend.fleet import VerifierStats
from backend.fleet.stats import Weights
from backend.records.kept import RowBatch
from backend.transport import Hub, Wire
from backend.wire.engine import FIXED_RESPONSE, Account, EngineWelcome, Refusal, RequestOptions

PING_EVERY_S = 1.0
POLL_S = 0.2


class EngineRefused(Exception):
    """The verifier refused this client's greeting; the message is the verifier's reason."""


@dataclass
class Answer:
    """What came back for one request.  Times are `time.monotonic()` seconds at this client."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    sent_at: float = 0.0
    first_at: float = 0.0
    """When the first token came; 0 until then."""
    last_at: float = 0.0
    account: Account | None = None
    """None unless `RequestOptions.account` asked for it."""


def engine_request(request_id: str, prompt: list[int], params: SamplingParams, **fields: Any) -> EngineCoreRequest:
    """vLLM's request for token ids; `fields` are further fields of `EngineCoreRequest`."""
    values: dict[str, Any] = {
        "mm_features": None,
        "pooling_params": None,
        "arrival_time": time.time(),
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params, **(values | fields))


def sampling(max_tokens: int, temperature: float) -> SamplingParams:
    """Parameters for exactly `max_tokens` tokens; greedy at temperature 0."""
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)


def fixed_sampling(tokens: list[int], temperature: float) -> SamplingParams:
    """Parameters for a fixed response of these tokens; see `fixed.py`."""
    params = sampling(len(tokens), temperature)
    params.extra_args = {FIXED_RESPONSE: tokens}
    params.output_kind, params.detokenize = RequestOutputKind.FINAL_ONLY, False
    return params


class EngineClient:
    """A connection to one verifier; the constructor waits for the answer to its greeting.

    `watch` is called during waits and may raise to end them (if the verifier's process has ended).  Several clients of one
    thread may share a `hub`, which its owner polls and closes.  A tcp address requires the verifier's `server_key`.  `lease_s`
    and `rows` are those of `EngineHello`; a client with a lease must ping, or wait, as often.
    Raises `EngineRefused`, `TimeoutError`.
    """

    def __init__(
        self,
        address: str,
        name: str = "client",
        watch: Callable[[], None] | None = None,
        hub: Hub | None = None,
        server_key: str = "",
        lease_s: float = math.inf,
        rows: bool = False,
        welcome_s: float = 120.0,
    ) -> None:
        self.hub = hub or Hub(Wire())
        self._shares_hub = hub is not None
        self.dealer = self.hub.dealer(address, server_key, watched=True)
        self._speech = EngineCodec()
        self.answers: dict[str, Answer] = {}
        self.stats: VerifierStats | None = None
        self.stats_at = 0.0
        """When `stats` arrived, in `time.monotonic()` seconds."""
        self.rows = RowBatch()
        """Rows received in answer to `ask_rows`."""
        self._rows_asked = self._rows_answered = 0
        """Numbers of the last call of `ask_rows`, and of the last one that has its answer or waits for none."""
        self.is_cut = False
        """Messages may have been lost: the connection was cut, or the verifier has forgotten its requests or calls."""
        self.heard_at = time.monotonic()
        self.welcome: EngineWelcome | None = None
        self.refusals: list[str] = []
        self.results: dict[int, str | None] = {}
        """Results of `call` by number: why it failed, or None."""
        self._calls = 0
        self._unanswered: set[int] = set()
        self._watch = watch
        self._greeting = True
        """A greeting has no answer yet: the verifier refuses what was sent before it."""
        self._hello = self._speech.hello(name, lease_s, rows)
        self.dealer.send(*self._hello)
        try:
            self.run_until(lambda: self.welcome is not None or bool(self.refusals), welcome_s)
        except BaseException:
            self.close()
            raise
        if self.welcome is None:
            self.close()
            raise EngineRefused(self.refusals[0])

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str | None = None,
        emitted: Sequence[int] = (),
        asked: RequestOptions | None = None,
        **fields: Any,
    ) -> str:
        """Sends an `engine_request`, to be continued after the `emitted` output tokens; returns its id."""
        request_id = request_id or f"req-{uuid.uuid4().hex[:8]}"
        request = engine_request(request_id, prompt, params, **fields)
        self.answers[request_id] = Answer(sent_at=time.monotonic())
        self.dealer.send(*self._speech.add(request, request_id, emitted, asked=asked))
        return request_id

    def abort(self, request_id: str) -> None:
        self.dealer.send(*self._speech.abort([request_id]))

    def call(self, method: str, *args: Any) -> int:
        """Calls a method of the verifier's engine core; returns the key of its result in `results`."""
        number = self._calls = self._calls + 1
        self._unanswered.add(number)
        self.dealer.send(*self._speech.call(number, method, args))
        return number

    @property
    def weights(self) -> Weights:
        """The target's weights that the verifier runs, as it last reported them."""
        said = self.stats or self.welcome
        return said.weights if said is not None else Weights()

    def ping(self) -> None:
        """Tells the verifier that this client is alive; `run_until` does so by itself."""
        self.dealer.send(*self._speech.ping())

    def ask_rows(self) -> None:
        """Asks for the rows that the verifier keeps; they are added to `rows`."""
        self._rows_asked += 1
        self.dealer.send(*self._speech.ask_rows(self._rows_asked))

    @property
    def rows_awaited(self) -> bool:
        """Whether the last call of `ask_rows` has no answer yet."""
        return self._rows_answered < self._rows_asked

    def mend(self) -> None:
        """Goes on after messages were lost: the client is no longer `is_cut`, and waits for no rows."""
        self.is_cut, self._rows_answered = False, self._rows_asked

    def fetch_rows(self, timeout_s: float = 120.0) -> RowBatch:
        """Waits for and returns all rows up to now.  Raises `TimeoutError`."""
        # Anew even if rows are awaited: their answer may tell of the time before this call.
        self.ask_rows()
        self.run_until(lambda: not self.rows_awaited and not self._greeting, timeout_s)
        taken, self.rows = self.rows, RowBatch()
        return taken

    def run_until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        """Receives until `condition()` is true.

        Raises `TimeoutError` after `timeout_s`, `ConnectionError` while the client `is_cut`, and what `watch` raises.
        """
        deadline = time.monotonic() + timeout_s
        pinged = 0.0
        while not condition():
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError("the condition was not met in time")
            if now - pinged > PING_EVERY_S:
                self.ping()
                pinged = now
                if self._watch is not None:
                    self._watch()
            self.hub.poll(POLL_S)
            self.receive()
            if self.is_cut:
                raise ConnectionError("the connection to the verifier was cut, and messages may be lost")

    def receive(self) -> None:
        """Takes everything that has arrived, without waiting."""
        while (frames := self.dealer.receive()) is not None:
            self._take(frames)
        if self.dealer.was_cut():
            # The verifier takes the next connection for another client's, and refuses all that comes before a greeting.
            self.is_cut = self._greeting = True
            self.dealer.send(*self._hello)

    def finish_all(self, timeout_s: float = 300.0) -> None:
        """Waits until every request has ended."""
        self.run_until(lambda: all(a.finish_reason is not None for a in self.answers.values()), timeout_s)

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams | list[SamplingParams], **fields: Any
    ) -> list[Answer]:
        """Sends all prompts at once; returns their answers in the same order."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        ids = [self.add(prompt, p, **fields) for prompt, p in zip(prompts, each, strict=True)]
        self.finish_all()
        return [self.answers.pop(request_id) for request_id in ids]

    def fresh_stats(self) -> VerifierStats:
        """Waits for counters that were published after this call."""
        for _ in range(2):
            # The first ones may have been sent before this call.
            self.stats = None
            self.run_until(lambda: self.stats is not None)
        assert self.stats is not None
        return self.stats

    def close(self) -> None:
        if self._shares_hub:
            self.hub.drop(self.dealer)
        else:
            self.hub.close()

    def _take(self, frames: list[bytes]) -> None:
        now = self.heard_at = time.monotonic()
        heard = self._speech.hear(frames)
        if isinstance(heard, EngineCoreOutputs):
            for output in heard.outputs:
                self._take_output(output, now)
            if heard.utility_output is not None:
                self.results[heard.utility_output.call_id] = heard.utility_output.failure_message
                self._unanswered.discard(heard.utility_output.call_id)
        elif isinstance(heard, list):
            for account in heard:
                if account.request_id in self.answers:
                    self.answers[account.request_id].account = account
        elif isinstance(heard, VerifierStats):
            self.stats, self.stats_at = heard, now
        elif isinstance(heard, RowBatch):
            self.rows.add(heard)
            self._rows_answered = max(self._rows_answered, heard.asked)
        elif isinstance(heard, EngineWelcome):
            # Counters from before the greeting name weights that may have changed since.
            self.welcome, self.stats, self._greeting = heard, None, False
        elif isinstance(heard, Refusal):
            if self.welcome is None or heard.reason != "unknown":
                self.refusals.append(heard.message)
            elif not self._greeting:
                # Silent for longer than the lease, as between two rounds of a rollout: the verifier has forgotten all.
                self._rows_answered = self._rows_asked
                self.is_cut |= any(answer.finish_reason is None for answer in self.answers.values()) or bool(self._unanswered)
                self._unanswered.clear()
                self._greeting = True
                self.dealer.send(*self._hello)

    def _take_output(self, output: EngineCoreOutput, now: float) -> None:
        answer = self.answers.get(output.request_id)
        if answer is None:
            return
        if output.new_token_ids:
            answer.tokens.extend(output.new_token_ids)
            answer.first_at = answer.first_at or now
            answer.last_at = now
        answer.outputs.append(output)
        if output.finish_reason is not None:
            answer.finish_reason = str(output.finish_reason)
