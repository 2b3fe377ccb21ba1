"""The drafting wire, between a verifier and its drafters.  Pure data; used by both sides, in any process.

Rounds.  A verifier's worker sends one `Round` per engine step: a MessagePack header and one raw frame with the features of all
its rows, in item order.  Features are hidden states after the EAGLE `fc`, or raw ones (EAGLE-1, or a head that learns and
applies its own `fc`).  On one host, large frames go through shared memory (`transport/ring.py`) and the message holds their
position.  Rounds extend the drafter's cache.

Drafts.  `Next` says what to draft.  What is decided before a step ends comes inside its `Round`, so that drafting begins at
once.  Everything else comes from the verifier's scheduler, on a socket of its own.  There it gets the answers: `Drafts` for
requests without a draft, and `Ahead`: drafts for the likely outcomes of the verification in progress.  Nothing is pickled.

Noise.  A request has a seed.  The verifier's token at position t is the v that maximises `log p(v) + G(seed, t, v)`
(`backend/noise`).  The draft token is the v that maximises `log q(v) + G(seed, t, v)`.  A draft token is accepted while it
equals the verifier's own.  So a drafter's use of the noise changes how many tokens are accepted, never the text.

Independent drafts.  A request without a seed of its own is judged by rejection sampling.  Its draft tokens are samples of q,
drawn afresh for each draft, and q travels with them over its likeliest tokens (`Draft.proposal`).  The verifier's last token
still uses the seed's noise (`backend.noise.behind`), so outcomes are ranked as for shared noise.

Signs.  A draft comes with two numbers per token, its value and its lead (`backend/speculation/chances.py`), or with none.

Positions.  A request's tokens are `x[0..n-1]`, `n = base_len`.  Feature row `p` is the target's feature of position `p` and
is paired with the token at `p + 1`.  So a message with `rows` rows and base length `n` carries the features of the positions
`n - 1 - rows .. n - 2`, and `start = n - 1 - rows`.  A drafter that holds more positions than `start` truncates to it.  One
that holds fewer keeps a gap (a round was lost, or the target took these positions from its prefix cache).  Positions stay right
and only context is missing, so drafts are accepted less often.
"""

import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from backend.transport.ring import RingRef

PROTOCOL_VERSION = 12

HELLO_FIRST = "hello first"
"""The reason in `Refused` after which the verifier must greet the drafter again and open all requests again."""

Length = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Finite = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
"""Numbers whose range the decoder checks."""
FeatureDtype = Literal["float32", "bfloat16", "float16"]
Role = Literal["features", "drafts"]
TargetTensor = Literal["embed_tokens.weight", "lm_head.weight", "norm.weight"]
"""Tensors of the target that a head may share, or that its training uses."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message on a socket.  `features` sockets send rounds; `drafts` sockets send `Next` and receive drafts."""

    version: int
    verifier_id: str
    role: Role
    epoch: int
    """Counts this verifier's process starts and reassignments.  With another epoch, the drafter forgets its requests."""
    ring: RingRef | None = None
    """Shared memory into which this socket's rounds may write their features."""
    weights: int = 0
    """Counts the exchanges of the target's weights.  Features sent under another number no longer fit."""
    target: str = ""
    """Names the target's weights; equal for verifiers with the same weights.  Empty: the weights of the start."""


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Opens a request on a drafter, for the first time or again: all `base_len` tokens, features for the last `rows`."""

    request_id: str
    base_len: Length
    tokens: list[int]
    rows: Count
    seed: Count = 0
    """Seed of the shared noise; 64 bits, unsigned."""
    temperature: Finite = 0.0
    """The request's temperature; 0: greedy, without noise."""
    trace: str = ""
    """The W3C `traceparent` below which the drafter's span belongs; empty: the request is not traced."""
    prompt: int = 0
    """Number of prompt tokens; the target generated the rest."""
    learn: bool = True
    """Whether a drafter may learn from the request."""
    independent: bool = False
    """The verifier judges drafts by rejection sampling: draft tokens must be samples, drawn with noise of the drafter's own."""
    top_k: Annotated[int, Meta(ge=-1)] = 0
    """The request's own; 0: all.  Only for independent drafts, as are the next two."""
    top_p: Share = 1.0
    min_p: Share = 0.0


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """A request's newest tokens, after a verification or prefill; `tokens[-1]` is at `base_len - 1`."""

    request_id: str
    base_len: Length
    tokens: list[int]
    rows: Count


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The request is gone (finished, aborted, moved); the drafter may keep its cache rows for prefix reuse."""

    request_id: str
    reason: str


class NextItem(msgspec.Struct, frozen=True, array_like=True):
    """What to draft next for one request, once the drafter has its first `base_len` tokens."""

    request_id: str
    base_len: Length
    k: Count
    """Longest draft for an outcome, in tokens."""
    verifying: list[int]
    """The draft that the verifier is verifying now at `base_len`; empty: it has none."""
    outcomes: Count
    """Number of outcomes to draft ahead for, at most; 0: none."""
    floor: Share = 0.0
    """A draft ends before the first token whose survival (the product of the chances up to it) is below this."""
    fresh_k: Count = 0
    """Longest fresh draft, in tokens, if `verifying` is empty; 0: none is made, since the verifier goes on without."""

    @property
    def is_fresh(self) -> bool:
        """Whether a fresh draft is to be made."""
        return not self.verifying and self.fresh_k > 0


class Next(msgspec.Struct, frozen=True, tag="next"):
    """What to draft next.  On the `drafts` socket it may come before or after the `Round` that it waits for."""

    items: list[NextItem]
    chance_weights: list[list[float]] = []
    """Weights of `speculation/chances.py`, by its `Rule`; empty: no draft ends before its `k`."""


class Round(msgspec.Struct, frozen=True, tag="round"):
    """One engine step of one verifier.  The frame behind it holds `[sum(rows), hidden]` features of `dtype`, C order."""

    dtype: FeatureDtype
    hidden: int
    """Width of a feature row; 0 when no features travel (an n-gram drafter)."""
    items: list[Open | Commit | Close]
    at: int | None = None
    """Position of the features in the ring; then there is no frame.  None: they are in the frame."""
    next: Next | None = None
    """What to draft for requests of these items, once their rows are there."""


class Part(msgspec.Struct, frozen=True, tag="part"):
    """The answer to a `Want`.  The frame behind it holds `[rows, width]` of `dtype`, C order."""

    name: TargetTensor
    first: int
    rows: int
    of: int
    """Rows of the whole tensor (a vector is one row); 0: the target has no such tensor to send."""
    width: int
    dtype: FeatureDtype


class Want(msgspec.Struct, frozen=True, tag="want"):
    """A drafter's request for rows of one of the target's tensors, from `first` on; sent on the `drafts` socket.

    A verifier does not answer while its weights are being exchanged or sleep.
    """

    name: TargetTensor
    first: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The drafter's answer to `Hello`."""

    ring: bool = False
    """Whether the drafter reads the ring that `Hello` offered."""
    exchanges: int = 0
    """How often the drafter's head was exchanged: what is known of drafts holds for one head."""


class Draft(msgspec.Struct, frozen=True, array_like=True):
    """Draft tokens for one request, valid only while the request is exactly `base_len` tokens long."""

    request_id: str
    base_len: int
    tokens: list[int]
    signs: list[float] = []
    """Value and lead of each token; empty: unknown."""
    proposal: bytes = b""
    """The distributions that the tokens were sampled from: int32 ids `[tokens, M]`, then their float32 probabilities
    `[tokens, M]`.  Empty: the tokens are certain, as those of a look-up; or the request's noise is shared."""


class Drafts(msgspec.Struct, frozen=True, tag="drafts"):
    """Fresh drafts, for a `Next`, a part of one, or several."""

    draft_us: int
    """The drafter's compute time for these drafts, in microseconds."""
    queue_us: int
    """Time that the first item waited at the drafter before compute began, in microseconds."""
    items: list[Draft]


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """One way in which a verification may end, and the draft for that case."""

    accepted: int
    """How many tokens of `verifying` are accepted."""
    token: int
    """The verifier's own token after the accepted ones."""
    tokens: list[int]
    """The draft to use at `base_len + accepted + 1`."""
    signs: list[float] = []
    """Value and lead of each token; see `Draft.signs`."""
    proposal: bytes = b""
    """As in `Draft`."""


class Block(msgspec.Struct, frozen=True):
    """Possible outcomes of verifying the draft `verifying` at `base_len`, likeliest first."""

    request_id: str
    base_len: int
    verifying: list[int]
    outcomes: list[Outcome]


class Ahead(msgspec.Struct, frozen=True, tag="ahead"):
    """Drafts made ahead, for a `Next`, a part of one, or several; sent on the `drafts` socket."""

    draft_us: int
    """The drafter's compute time for these blocks, in microseconds."""
    items: list[Block]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The peer speaks another protocol version, or sent something it may not send."""

    reason: str


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """Answer, on the `features` socket, to commits of requests that the drafter does not hold: they must be opened again.

    Their `Open` was lost, or they were silent for longer than the drafter remembers.
    """

    request_ids: list[str]


ToDrafter = Hello | Round | Next | Part
ToVerifier = Welcome | Drafts | Ahead | Refused | Unknown | Want

encode: Callable[[ToDrafter | ToVerifier], bytes] = msgspec.msgpack.Encoder().encode


def _decoder(kinds: Any) -> Callable[[bytes], Any]:
    decode = msgspec.msgpack.Decoder(kinds).decode

    def decoded(message: bytes) -> Any:
        try:
            return decode(message)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(str(error)) from error

    return decoded


decode_to_drafter: Callable[[bytes], ToDrafter] = _decoder(ToDrafter)
"""Decodes what a verifier sent; raises `msgspec.DecodeError` (or its subclass `ValidationError`) on anything else."""
decode_to_verifier: Callable[[bytes], ToVerifier] = _decoder(ToVerifier)
"""Decodes what a drafter sent; raises `msgspec.DecodeError` (or its subclass `ValidationError`) on anything else."""
