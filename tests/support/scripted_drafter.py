"""A drafter whose answers a test decides.  Tests only."""

import threading
from collections.abc import Callable

from backend.fleet import DrafterRef
from backend.transport import Hub, ServerSocket, Wire
from backend.wire.drafting import (
    Close,
    Draft,
    Drafts,
    Hello,
    Next,
    NextItem,
    Round,
    Welcome,
    decode_to_drafter,
    encode,
)

SURE = 8.0
"""Both signs of every token, value and lead: with these a verifier expects acceptance until it has seen rejections."""


Script = Callable[[str, list[int], int], list[int] | None]
"""Returns up to so many draft tokens for a request with these known tokens; None: no answer."""


class ScriptedDrafter:
    """Speaks the drafting protocol in a thread of the test; it drafts nothing ahead."""

    def __init__(self, address: str, script: Script, drafter_id: str = "drafter-0") -> None:
        self.script = script
        self.raw: Callable[[Next], list[bytes] | None] | None = None
        """When set, makes the frames to send instead of an answer to these items."""
        self.sign = SURE
        self.rounds: list[Round] = []
        self.answers = 0
        self.feature_bytes = 0
        self.closed: set[str] = set()
        self.ref = DrafterRef(drafter_id, "incarnation", address, "", 1)
        self._tokens: dict[str, list[int]] = {}
        self._wanted: dict[str, tuple[bytes, NextItem]] = {}
        """By request: sender and item of a `Next` that arrived before the `Round` with its tokens."""
        self.listeners: set[bytes] = set()
        self._drafts_of: dict[tuple[str, int], bytes] = {}
        """The `drafts` socket of a verifier in an epoch."""
        self._owners: dict[bytes, tuple[str, int]] = {}
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._hub: Hub
        self._thread = threading.Thread(target=self._run, args=(address,), daemon=True)
        self._thread.start()
        assert self._ready.wait(120)

    def close(self) -> None:
        self._stop.set()
        self._hub.wake()
        self._thread.join(10)
        self._hub.close()

    def _run(self, address: str) -> None:
        self._hub = Hub(Wire())
        router = self._hub.router(address)
        self._ready.set()
        while not self._stop.is_set():
            self._hub.poll(0.2)
            while (message := router.receive()) is not None:
                self._take(router, *message)

    def _take(self, router: ServerSocket, identity: bytes, frames: list[bytes]) -> None:
        message = decode_to_drafter(frames[0])
        if isinstance(message, Hello):
            self._owners[identity] = message.verifier_id, message.epoch
            if message.role == "drafts":
                self.listeners.add(identity)
                self._drafts_of[message.verifier_id, message.epoch] = identity
            router.send(identity, encode(Welcome()))
        elif isinstance(message, Round):
            self.rounds.append(message)
            self.feature_bytes += len(frames[1])
            self._extend(message)
            if message.next is not None:
                self._want(self._drafts_of[self._owners[identity]], message.next)
            self._answer(router)
        elif isinstance(message, Next):
            self._want(identity, message)
            self._answer(router)

    def _want(self, listener: bytes, message: Next) -> None:
        self._wanted |= {item.request_id: (listener, item) for item in message.items if not item.verifying}

    def _extend(self, message: Round) -> None:
        for item in message.items:
            if isinstance(item, Close):
                self.closed.add(item.request_id)
                self._tokens.pop(item.request_id, None)
                self._wanted.pop(item.request_id, None)
                continue
            known = self._tokens.setdefault(item.request_id, [])
            del known[item.base_len - len(item.tokens) :]
            known.extend(item.tokens)

    def _answer(self, router: ServerSocket) -> None:
        """Answers the items whose requests have reached their base length."""
        due: dict[bytes, list[NextItem]] = {}
        for request_id, (listener, item) in list(self._wanted.items()):
            if len(self._tokens.get(request_id, [])) == item.base_len:
                del self._wanted[request_id]
                due.setdefault(listener, []).append(item)
        for listener, items in due.items():
            answer = self._drafts(items) if self.raw is None else self.raw(Next(items))
            if answer:
                self.answers += 1
                router.send(listener, *answer)

    def _drafts(self, items: list[NextItem]) -> list[bytes]:
        drafts = []
        for item in items:
            tokens = self.script(item.request_id, list(self._tokens[item.request_id]), item.k)
            if tokens is not None:
                drafts.append(Draft(item.request_id, item.base_len, tokens, [self.sign] * (2 * len(tokens))))
        return [encode(Drafts(100, 0, drafts))] if drafts else []
