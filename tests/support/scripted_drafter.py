"""A drafter whose answers a test decides.  Tests only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from backend.fleet import DrafterRef
from backend.protocol import (
    PROTOCOL_VERSION,
    Close,
    Draft,
    Drafts,
    Hello,
    Round,
    Welcome,
    decode_to_drafter,
    encode,
)
from backend.transport import Hub, Router, Wire


class Script(Protocol):
    """Draft tokens for a request of which `tokens` are known; None: no answer."""

    def __call__(self, request_id: str, tokens: list[int], k: int) -> list[int] | None: ...


class ScriptedDrafter:
    """Speaks the drafting protocol in a thread of the test."""

    def __init__(self, address: str, script: Script, drafter_id: str = "drafter-0") -> None:
        self.script = script
        self.raw: Callable[[Round], list[bytes] | None] | None = None
        """When set, what is sent back in place of an answer."""
        self.rounds: list[Round] = []
        self.feature_bytes = 0
        self.closed: set[str] = set()
        self.ref = DrafterRef(drafter_id, "incarnation", address, "", 1)
        self._tokens: dict[str, list[int]] = {}
        self._listeners: dict[tuple[str, int], bytes] = {}
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._hub: Hub
        self._thread = threading.Thread(target=self._run, args=(address,), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def close(self) -> None:
        self._stop.set()
        self._hub.wake()
        self._thread.join(10)

    def _run(self, address: str) -> None:
        self._hub = Hub(Wire())
        router = self._hub.router(address)
        self._ready.set()
        while not self._stop.is_set():
            self._hub.poll(0.2)
            while (message := router.receive()) is not None:
                self._take(router, *message)
        self._hub.close()

    def _take(self, router: Router, identity: bytes, frames: list[bytes]) -> None:
        message = decode_to_drafter(frames[0])
        if isinstance(message, Hello):
            if message.role == "drafts":
                self._listeners[message.verifier_id, message.epoch] = identity
            router.send(identity, encode(Welcome(PROTOCOL_VERSION, "drafter-0", "scripted")))
            return
        self.rounds.append(message)
        self.feature_bytes += len(frames[1])
        drafts = []
        for item in message.items:
            if isinstance(item, Close):
                self.closed.add(item.request_id)
                self._tokens.pop(item.request_id, None)
                continue
            known = self._tokens.setdefault(item.request_id, [])
            del known[item.base_len - len(item.tokens) :]
            known.extend(item.tokens)
            if item.k and (tokens := self.script(item.request_id, list(known), item.k)) is not None:
                drafts.append(Draft(item.request_id, item.base_len, tokens))
        answer = [encode(Drafts(message.epoch, message.seq, 100, 0, drafts))]
        if self.raw is not None:
            replaced = self.raw(message)
            if replaced is None:
                return
            answer = replaced
        elif not drafts:
            return
        for (_, epoch), listener in self._listeners.items():
            if epoch == message.epoch:
                router.send(listener, *answer)
