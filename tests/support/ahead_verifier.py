"""A verifier as a `DrafterService` sees it: `Round`s on its features socket, `Next`s on its drafts socket.  Tests only."""

from collections.abc import Sequence

import torch

from backend.drafter.service import DrafterService, Reply
from backend.wire.drafting import (
    PROTOCOL_VERSION,
    Ahead,
    Block,
    Close,
    Commit,
    Draft,
    Drafts,
    Hello,
    Next,
    NextItem,
    Open,
    Round,
    ToVerifier,
    decode_to_verifier,
    encode,
)
from tests.support.drafter_heads import TinyHead

HEAD = TinyHead(hidden=16, heads=2, kv_heads=1)
TOKENS = [1, 2, 3, 4, 5, 6]


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def handle(service: DrafterService, identity: bytes, frames: Sequence[bytes]) -> list[Reply]:
    """Has a service take one message and do all work that waits.  Returns its replies."""
    replies = service.receive(identity, frames)
    while service.has_work:
        replies += service.work()
    return replies


class AheadVerifier:
    """Sends `Round`s and `Next`s to a service, and decodes its answers."""

    def __init__(self, service: DrafterService, name: str = "v", epoch: int = 1) -> None:
        self.service = service
        self.features, self.drafts = f"{name}/f/{epoch}".encode(), f"{name}/d/{epoch}".encode()
        handle(service, self.features, [encode(Hello(PROTOCOL_VERSION, name, "features", epoch))])
        handle(service, self.drafts, [encode(Hello(PROTOCOL_VERSION, name, "drafts", epoch))])

    def frames(self, *items: Open | Commit | Close, hidden: int = HEAD.hidden) -> list[bytes]:
        rows = [item for item in items if not isinstance(item, Close)]
        pieces = [torch.randn(i.rows, hidden, generator=torch.Generator().manual_seed(i.base_len)) for i in rows]
        data = torch.cat(pieces).numpy().tobytes() if pieces else b""
        return [encode(Round("float32", hidden, list(items))), data]

    def receive_round(self, *items: Open | Commit | Close) -> None:
        assert self.service.receive(self.features, self.frames(*items)) == []

    def receive_next(self, *items: NextItem) -> None:
        assert self.service.receive(self.drafts, [encode(Next(list(items)))]) == []

    def round(self, *items: Open | Commit | Close) -> list[ToVerifier]:
        self.receive_round(*items)
        return self.work()

    def next(self, *items: NextItem) -> list[ToVerifier]:
        self.receive_next(*items)
        return self.work()

    def step(self) -> list[ToVerifier]:
        return self.read(self.service.work())

    def work(self) -> list[ToVerifier]:
        found: list[ToVerifier] = []
        while self.service.has_work:
            found += self.step()
        return found

    def read(self, replies: list[Reply]) -> list[ToVerifier]:
        messages = [decode_to_verifier(payload) for identity, payload in replies if identity == self.drafts]
        for message in messages:
            assert isinstance(message, Drafts | Ahead)
        return messages


def opening(request_id: str = "a", tokens: list[int] | None = None, seed: int = 0, temperature: float = 0.0) -> Open:
    tokens = TOKENS if tokens is None else tokens
    return Open(request_id, len(tokens), list(tokens), len(tokens) - 1, seed, temperature)


def drafts_of(messages: list[ToVerifier]) -> list[Draft]:
    return [draft for m in messages if isinstance(m, Drafts) for draft in m.items]


def blocks_of(messages: list[ToVerifier]) -> list[Block]:
    return [block for m in messages if isinstance(m, Ahead) for block in m.items]
