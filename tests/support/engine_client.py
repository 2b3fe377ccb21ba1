"""A minimal client of the engine wire: what a gateway does, without HTTP.  Tests only."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from backend.engine_wire import (
    ABORT,
    ADD,
    ENGINE_WIRE_VERSION,
    HELLO,
    OUTPUTS,
    PING,
    REFUSED,
    STATS,
    WELCOME,
    EngineHello,
    EngineWelcome,
)
from backend.fleet import VerifierStats
from backend.transport import Hub, Wire
from backend.verifier.engine import vllm_version


@dataclass
class Answer:
    """What came back for one request."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    outputs: list[EngineCoreOutput] = field(default_factory=list)


class EngineClient:
    """Synchronous; one thread."""

    def __init__(self, address: str) -> None:
        self.hub = Hub(Wire())
        self.dealer = self.hub.dealer(address, f"test-{uuid.uuid4().hex}")
        self.encoder = MsgpackEncoder()
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.answers: dict[str, Answer] = {}
        self.stats: VerifierStats | None = None
        self.welcome: EngineWelcome | None = None
        self.refusals: list[str] = []
        hello = EngineHello(ENGINE_WIRE_VERSION, vllm_version(), "test")
        self.dealer.send(HELLO, msgspec.msgpack.encode(hello))
        self.run_until(lambda: self.welcome is not None)

    def add(self, prompt: list[int], params: SamplingParams, request_id: str | None = None, **fields: Any) -> str:
        request_id = request_id or f"req-{uuid.uuid4().hex[:8]}"
        values: dict[str, Any] = {
            "request_id": request_id,
            "prompt_token_ids": prompt,
            "mm_features": None,
            "sampling_params": params,
            "pooling_params": None,
            "arrival_time": time.time(),
            "lora_request": None,
            "cache_salt": None,
            "data_parallel_rank": None,
        }
        request = EngineCoreRequest(**(values | fields))
        self.answers[request_id] = Answer()
        self.dealer.send(ADD, *(bytes(frame) for frame in self.encoder.encode(request)))
        return request_id

    def abort(self, request_id: str) -> None:
        self.dealer.send(ABORT, msgspec.msgpack.encode([request_id]))

    def run_until(self, condition: Any, timeout_s: float = 120.0) -> None:
        """Receives until `condition()`; fails after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        pinged = 0.0
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the condition was not met in time")
            if time.monotonic() - pinged > 1.0:
                self.dealer.send(PING)
                pinged = time.monotonic()
            self.hub.poll(0.2)
            while (frames := self.dealer.receive()) is not None:
                self._take(frames)

    def finish_all(self, timeout_s: float = 300.0) -> None:
        self.run_until(lambda: all(a.finish_reason is not None for a in self.answers.values()), timeout_s)

    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams], **fields: Any) -> list[Answer]:
        """All prompts at once; answers in the same order."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        ids = [self.add(prompt, p, **fields) for prompt, p in zip(prompts, each, strict=True)]
        self.finish_all()
        return [self.answers.pop(request_id) for request_id in ids]

    def fresh_stats(self) -> VerifierStats:
        """Counters published after this call."""
        self.stats = None
        self.run_until(lambda: self.stats is not None)
        assert self.stats is not None
        self.stats = None
        self.run_until(lambda: self.stats is not None)
        return self.stats

    def close(self) -> None:
        self.hub.close()

    def _take(self, frames: list[bytes]) -> None:
        kind, payload = frames[0], frames[1:]
        if kind == OUTPUTS:
            outputs: EngineCoreOutputs = self.decoder.decode(payload)
            for output in outputs.outputs:
                answer = self.answers.get(output.request_id)
                if answer is None:
                    continue
                answer.tokens.extend(output.new_token_ids)
                answer.outputs.append(output)
                if output.finish_reason is not None:
                    answer.finish_reason = str(output.finish_reason)
        elif kind == STATS:
            self.stats = msgspec.msgpack.decode(payload[0], type=VerifierStats)
        elif kind == WELCOME:
            self.welcome = msgspec.msgpack.decode(payload[0], type=EngineWelcome)
        elif kind == REFUSED:
            self.refusals.append(payload[0].decode())
