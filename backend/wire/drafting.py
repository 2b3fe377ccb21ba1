"""The wire between a verifier and its drafters.  Pure data; used by both sides, in any process.

A verifier's worker ships one `Round` per engine step: a MessagePack header and one raw frame that holds the features (hidden
states after the EAGLE `fc`; raw for EAGLE-1, or where the drafter's head learns and applies its own `fc`) of every row in it,
in item order.  On one host large frames go through shared memory (`transport/ring.py`) and the message holds their position
instead.  Rounds only extend the drafter's cache.  What to draft the verifier's scheduler says with `Next` on its own socket.
The drafter answers with `Drafts` where there is no draft yet, and with `Ahead`: drafts for the likely outcomes of the
verification that goes on meanwhile.  Nothing here is pickled.

Noise.  A request has a seed.  The verifier's token at position t is the one that maximises `log p(v) + G(seed, t, v)`
(`backend/noise`), the draft's the one that maximises `log q(v) + tau G(seed, t, v)`.  A draft token is accepted while it is the
verifier's own, so what a drafter does with the noise changes how many are accepted and never the text.

Signs.  With a draft come two numbers per token, its value and its lead (`backend/speculation/chances.py`), or none where the
drafter has none.

Positions.  A request's tokens are `x[0..n-1]`, `n = base_len`.  Feature row `p` is the target's feature of position `p` and
is paired with the token at `p + 1`.  So a message with `rows` rows and base length `n` carries the features of the positions
`n - 1 - rows .. n - 2`, and `start = n - 1 - rows`.  A drafter that holds more positions than `start` truncates to it; one
that holds fewer keeps a gap (a round was lost, or the target's prefix cache computed nothing there): positions stay right,
only context is missing.  Drafts are therefore never wrong, merely less often accepted.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from backend.transport.ring import RingRef

PROTOCOL_VERSION = 6

HELLO_FIRST = "hello first"
"""The reason of a refusal that greeting again, and opening all requests again, will cure."""

FeatureDtype = Literal["float32", "bfloat16", "float16"]
Role = Literal["features", "drafts"]
TargetTensor = Literal["embed_tokens.weight", "lm_head.weight", "norm.weight"]
"""What a head may share with its target, or be taught by."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message on a socket.  `features` sockets send rounds; `drafts` sockets receive their answers."""

    version: int
    verifier_id: str
    role: Role
    epoch: int
    """Counts this verifier's process starts and reassignments: answers to an older epoch are dropped by both sides."""
    ring: RingRef | None = None
    """Shared memory in which this socket's rounds may leave their features."""
    weights: int = 0
    """Counts the exchanges of the target's weights: features of another number fit these no longer."""
    target: str = ""
    """Names the target's weights: the same for verifiers that run the same; empty: those of the start."""


class Open(msgspec.Struct, frozen=True, tag="open"):
    """(Re)opens a request on a drafter that may know nothing of it: all `base_len` tokens, features for the last `rows`."""

    request_id: str
    base_len: int
    tokens: list[int]
    rows: int
    seed: int = 0
    """Of the noise that verifier and drafter share; 64 bits, unsigned."""
    temperature: float = 0.0
    """The request's; 0: greedy, without noise."""
    trace: str = ""
    """The W3C `traceparent` below which the drafter's span belongs; empty: the request is not traced."""
    prompt: int = 0
    """Tokens of the prompt; the others are the target's own."""
    learn: bool = True
    """Whether a drafter may learn from the request."""


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """What verification decided: the newest tokens, `tokens[-1]` standing at position `base_len - 1`."""

    request_id: str
    base_len: int
    tokens: list[int]
    rows: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The request is gone (finished, aborted, moved); the drafter may keep its cache rows for prefix reuse."""

    request_id: str
    reason: str


class Round(msgspec.Struct, frozen=True, tag="round"):
    """One engine step of one verifier.  The frame behind it holds `[sum(rows), hidden]` features of `dtype`, C order."""

    epoch: int
    dtype: FeatureDtype
    hidden: int
    """Width of a feature row; 0 when no features travel (an n-gram drafter)."""
    items: list[Open | Commit | Close]
    at: int | None = None
    """Where in the ring the features are; there is no frame then."""


class NextItem(msgspec.Struct, frozen=True, array_like=True):
    """What a verifier wants next for one request, once the drafter knows it to be `base_len` tokens long."""

    request_id: str
    base_len: int
    k: int
    """Draft tokens wanted per outcome, and in the fresh draft."""
    verifying: list[int]
    """The draft the verifier is verifying right now at `base_len`; empty: it has none, draft afresh."""
    outcomes: int
    """How many outcomes to precompute at most; 0 = none."""
    floor: float = 0.0
    """A draft ends before the first token whose survival, the product of the chances up to it, falls below this."""


class Next(msgspec.Struct, frozen=True, tag="next"):
    """Once per engine step on the `drafts` socket: before or after the `Round` that brings `base_len`."""

    epoch: int
    items: list[NextItem]
    judges: list[list[float]] = []
    """The weights of `chances` for greedy and for sampled requests; empty: no draft ends before its `k`."""


class Part(msgspec.Struct, frozen=True, tag="part"):
    """The answer to a `Want`.  The frame behind it holds `[rows, width]` of `dtype`, C order."""

    name: TargetTensor
    first: int
    rows: int
    of: int
    """Rows of the whole tensor; a vector is one row; 0: this target has no such tensor to give."""
    width: int
    dtype: FeatureDtype


class Want(msgspec.Struct, frozen=True, tag="want"):
    """On the `drafts` socket: a drafter asks for rows of one of the target's tensors, from `first` on.

    A verifier that cannot read its weights now (they are being exchanged, or sleep) does not answer.
    """

    name: TargetTensor
    first: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The drafter's answer to `Hello`."""

    version: int
    drafter_id: str
    kind: str
    ring: bool = False
    """Whether it reads the ring it was offered."""
    exchanges: int = 0
    """How often its head was exchanged: what is known of its drafts holds for one head."""


class Draft(msgspec.Struct, frozen=True, array_like=True):
    """Draft tokens for one request, valid only while the request is exactly `base_len` tokens long."""

    request_id: str
    base_len: int
    tokens: list[int]
    signs: list[float] = []
    """Value and lead of each token; empty: unknown."""


class Drafts(msgspec.Struct, frozen=True, tag="drafts"):
    """The fresh drafts of a `Next` (or of a part of it, or of several)."""

    epoch: int
    draft_us: int
    """Drafter compute for them, in microseconds."""
    queue_us: int
    """Time the first of them waited at the drafter before its compute began, in microseconds."""
    items: list[Draft]


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """One way verification may end, and the draft for it."""

    accepted: int
    """How many tokens of `verifying` are accepted."""
    token: int
    """The verifier's own token after them."""
    tokens: list[int]
    """The draft to use at `base_len + accepted + 1`."""
    signs: list[float] = []
    """Value and lead of each token (`Draft.signs`)."""


class Block(msgspec.Struct, frozen=True):
    """Outcomes of verifying `verifying` at `base_len`, likeliest first."""

    request_id: str
    base_len: int
    verifying: list[int]
    outcomes: list[Outcome]


class Ahead(msgspec.Struct, frozen=True, tag="ahead"):
    """What was precomputed for a `Next` (or for a part of it, or for several); on the `drafts` socket."""

    epoch: int
    draft_us: int
    """Drafter compute for these blocks, in microseconds."""
    items: list[Block]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The peer speaks another protocol version, or sent something it may not send."""

    reason: str


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """Answer on the `features` socket to commits about requests the drafter does not hold: it wants them opened again.

    Their `Open` was lost, or they were silent for longer than the drafter remembers.
    """

    request_ids: list[str]


ToDrafter = Hello | Round | Next | Part
ToVerifier = Welcome | Drafts | Ahead | Refused | Unknown | Want

_encoder = msgspec.msgpack.Encoder()
_to_drafter: msgspec.msgpack.Decoder[ToDrafter] = msgspec.msgpack.Decoder(ToDrafter)
_to_verifier: msgspec.msgpack.Decoder[ToVerifier] = msgspec.msgpack.Decoder(ToVerifier)


def encode(message: ToDrafter | ToVerifier) -> bytes:
    """One message as MessagePack."""
    return _encoder.encode(message)


def decode_to_drafter(frame: bytes) -> ToDrafter:
    """Decodes what a verifier sent; raises `msgspec.DecodeError` (or its subclass `ValidationError`) on anything else."""
    return _to_drafter.decode(frame)


def decode_to_verifier(frame: bytes) -> ToVerifier:
    """Decodes what a drafter sent; raises `msgspec.DecodeError` (or its subclass `ValidationError`) on anything else."""
    return _to_verifier.decode(frame)
