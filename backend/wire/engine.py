"""The wire between a gateway and a verifier: frame kinds and the small messages that vLLM does not define.

A gateway's DEALER talks to the verifier's ROUTER.  The first frame says what follows.  Requests and outputs are vLLM's own
`EngineCoreRequest` and `EngineCoreOutputs`, encoded by vLLM's `MsgpackEncoder` (which may add raw frames for tensors).

gateway -> verifier   HELLO EngineHello | ADD Addition EngineCoreRequest... | ABORT list of request ids | UTILITY (call id,
                      method, args) | ROWS | PING
verifier -> gateway   WELCOME EngineWelcome | TAKEN request id | OUTPUTS EngineCoreOutputs... | ACCOUNTS list of Account |
                      STATS VerifierStats | ROWS RowBatch | REFUSED Refusal | PING

ROWS takes what the verifier keeps of its steps (`verifier.kept_rows`); it is answered after everything that came before it.

A gateway pings every second and the verifier echoes it; a verifier aborts the requests of a gateway it has not heard of for
`gateway_lease_s`, and asks that gateway to greet it again (`Refusal.reason == "unknown"`).

ACCOUNTS says what speculation did for requests that asked for it; it comes before their last outputs, or after their abortion.

TAKEN says, before anything is computed, that the engine has a request: should the verifier die now, the request may be why.

A message the verifier cannot read costs its own request at most: ADD names the request in a frame of its own, so that even
one whose body is unreadable is answered by outputs with the finish reason `error`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from backend.fleet.stats import Weights

ENGINE_WIRE_VERSION = 6

HELLO, ADD, ABORT, UTILITY, ROWS, PING = b"h", b"a", b"x", b"u", b"q", b"p"
WELCOME, TAKEN, OUTPUTS, ACCOUNTS, STATS, REFUSED = b"w", b"t", b"o", b"c", b"s", b"r"

PAUSED = "outrider_paused"
"""Stop reason of a request that a pause has aborted: it ends, and does not go on elsewhere."""

FIXED_RESPONSE = "outrider_fixed_response"
"""Key of `SamplingParams.extra_args`: the token ids a request must emit (`backend/engine/fixed.py`)."""

NOISE_SEED = "outrider_noise_seed"
"""Key of `SamplingParams.extra_args` within a verifier: the seed of a request's noise (`backend/noise`), below 2**64."""
LOGPROBS_MODE = "outrider_logprobs_mode"
"""Key of `SamplingParams.extra_args` within a verifier: a request's own `Asked.logprobs_mode`."""
NOT_LEARNED = "outrider_not_learned"
"""Key of `SamplingParams.extra_args` within a verifier: drafters may not learn from the request (`Asked.learn`)."""
GREEDY_BELOW = 1e-5
"""Temperature below which vLLM takes the likeliest token."""


class EngineHello(msgspec.Struct, frozen=True):
    """A gateway introduces itself; answered by `EngineWelcome` or REFUSED."""

    version: int
    vllm_version: str
    gateway_id: str


class Asked(msgspec.Struct, frozen=True):
    """What a request asks beside vLLM's parameters.  It changes no token."""

    account: bool = False
    """Whether its `Account` is wanted."""
    mode: Literal["off", "sync", "ahead", "auto"] = "auto"
    """`off`: no drafts; `sync`: fresh ones only; `ahead`: for likely outcomes, too; `auto`: as the verifier decides for all."""
    longest: int | None = None
    """Its longest draft; None: the verifier's own."""
    prediction: list[int] = []
    """Tokens that the answer is likely to repeat: they are drafts, too."""
    logprobs_mode: Literal["raw", "processed"] | None = None
    """Log probabilities of the model, or of what was drawn from; None: as `engine_args.logprobs_mode` says."""
    learn: bool = True
    """Whether drafters may learn from its text, and others of its tenant may look it up."""
    tenant: str = ""
    """Whose it is: only requests of one tenant look each other's outputs up."""


class Tally(msgspec.Struct):
    """The drafts of one drafter and source that were verified for a request."""

    source: str
    """`fresh`, `ahead`, `lookup`, `prediction`, `shared`, or `native`."""
    drafter: str
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    """Draft tokens."""


class Account(msgspec.Struct):
    """What speculation did for one request at one verifier."""

    request_id: str
    tokens: int = 0
    verifications: int = 0
    """Steps that brought it tokens, the end of its prefill among them."""
    accepted_lengths: list[int] = []
    """Drafted verifications by how many draft tokens were accepted, from none upwards."""
    tallies: list[Tally] = []
    waited_s: float = 0.0
    """How long its steps waited for drafts, of whichever request."""


class Addition(msgspec.Struct, frozen=True):
    """Comes before the request itself."""

    request_id: str
    """The id it runs under at this verifier and that its outputs carry; it replaces the one in the request.  Each time a
    request is moved it gets another, so that what an earlier place still emits is not taken for what the present one does."""
    emitted: list[int] = []
    """Tokens the client already has: output, not prompt.  The verifier goes on after them, as if it had sampled them."""
    noise_seed: int | None = None
    """The seed of a request that names none itself, below 2**64; the same at every verifier the request is given to.  None: the
    verifier draws one."""
    asked: Asked | None = None
    """None: nothing that is not as for all requests."""


class Refusal(msgspec.Struct, frozen=True):
    """Why a verifier does not do what a gateway asked."""

    reason: Literal["unknown", "incompatible", "unreadable"]
    """`unknown`: say hello (again), nothing of yours is here; `incompatible`: another wire or vLLM, in vain for ever;
    `unreadable`: one message was not understood and nothing else is affected."""
    message: str


class EngineWelcome(msgspec.Struct, frozen=True):
    """What a gateway needs to know of a verifier to serve its model."""

    version: int
    verifier_id: str
    incarnation: str
    model: str
    max_model_len: int
    num_kv_blocks: int
    block_size: int
    supported_tasks: list[str]
    weights: Weights = Weights()
