"""The engine wire, between a gateway and a verifier: kinds of frames, and the messages that vLLM does not define.

A gateway's DEALER talks to the verifier's ROUTER.  The first frame says what follows.  Requests and outputs are vLLM's own
`EngineCoreRequest` and `EngineCoreOutputs`, encoded by vLLM's `MsgpackEncoder` (which may add raw frames for tensors).

gateway -> verifier   HELLO EngineHello | ADD Addition EngineCoreRequest... | ABORT list of request ids | UTILITY (call id,
                      method, args) | SHARE EmittedText | PING
verifier -> gateway   WELCOME EngineWelcome | TAKEN request id | OUTPUTS EngineCoreOutputs... | ACCOUNTS list of Account |
                      STATS VerifierStats | REFUSED Refusal | PING

UTILITY calls a method of vLLM's engine core or of `WeightControl`; or `take_rows`, which returns the rows of steps and
verifications since the last such call (`GatewayPort`).

A gateway sends PING every second and the verifier echoes it.  A verifier aborts the requests of a client that has been silent
for `EngineHello.lease_s`, and asks that client to greet it again (`Refusal.reason == "unknown"`).

SHARE brings the text of a request that has ended at another verifier, to verifiers that look drafts up in such texts
(`EngineWelcome.looks_up`).  It is never answered.

ACCOUNTS reports what speculation did for requests that asked for it, before their last outputs or after their abort.

TAKEN says, before anything is computed, that the engine has a request.  If the verifier dies then, the request may be why.

ADD names its request in a frame of its own.  If the rest is unreadable, the answer is outputs with the finish reason `error`.
So an unreadable message affects its own request at most.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from backend.fleet.stats import Weights

ENGINE_WIRE_VERSION = 12

HELLO, ADD, ABORT, UTILITY, SHARE, PING = b"h", b"a", b"x", b"u", b"e", b"p"
WELCOME, TAKEN, OUTPUTS, ACCOUNTS, STATS, REFUSED = b"w", b"t", b"o", b"c", b"s", b"r"

GATEWAY_LEASE_S = 10.0
"""Seconds of silence after which a gateway and a verifier give each other up."""

PAUSED = "outrider_paused"
"""Stop reason of a request that a pause has aborted: the request ends and does not move to another verifier."""

NOT_BEGUN = "start_weight_update comes first"
"""The failure of a verifier that has no update by tensors under way."""

FIXED_RESPONSE = "outrider_fixed_response"
"""Key of `SamplingParams.extra_args`: the token ids that a request must emit (`backend/engine/worker/fixed.py`)."""

NOISE_SEED = "outrider_noise_seed"
"""Key of `SamplingParams.extra_args` within a verifier: the seed of a request's noise (`backend/noise`), below 2**64."""
INDEPENDENT = "outrider_independent"
"""Key of `SamplingParams.extra_args` within a verifier: drafts are judged by rejection, since the text need not repeat."""
LOGPROBS_MODE = "outrider_logprobs_mode"
"""Key of `SamplingParams.extra_args` within a verifier: the request's `RequestOptions.logprobs_mode`."""
NOT_LEARNED = "outrider_not_learned"
"""Key of `SamplingParams.extra_args` within a verifier: drafters may not learn from the request (`RequestOptions.learn`)."""
SHARED_SUFFIX = 8
"""Tokens of the longest suffix that is looked up in other requests' texts."""
GREEDY_BELOW = 1e-5
"""Temperature below which vLLM samples greedily."""


class EngineHello(msgspec.Struct, frozen=True):
    """A gateway, or another client, introduces itself; answered by `EngineWelcome` or REFUSED."""

    version: int
    vllm_version: str
    gateway_id: str
    lease_s: float = GATEWAY_LEASE_S
    """Seconds that the client may be silent; `inf`: for ever."""


class RequestOptions(msgspec.Struct, frozen=True):
    """What a request asks for besides vLLM's parameters.  None of it changes the text."""

    account: bool = False
    """Whether the verifier should send the request's `Account`."""
    mode: Literal["off", "sync", "ahead", "auto"] = "auto"
    """`off`: no drafts; `sync`: fresh drafts only; `ahead`: also drafts for likely outcomes; `auto`: the verifier's choice."""
    longest: int | None = None
    """The request's longest draft; None: the verifier's setting."""
    prediction: list[int] = []
    """Tokens that the answer is likely to repeat; they are used as drafts."""
    logprobs_mode: Literal["raw", "processed"] | None = None
    """Log probabilities of the model's own distribution, or of the one sampled from.  None: `engine_args.logprobs_mode`."""
    learn: bool = True
    """Whether drafters may learn from the request's text, and whether it shares look-ups with its tenant's requests."""
    tenant: str = ""
    """Hash of the API key's name; empty where all requests have the same key, or none."""
    session: str = ""
    """Hash of the session's name; empty where the client names none."""

    def salted(self, cache_salt: str | None) -> RequestOptions:
        """The options of a request with this `cache_salt`: its tenant shares look-ups with requests of this salt alone."""
        return msgspec.structs.replace(self, tenant=f"{self.tenant}/{cache_salt}") if cache_salt else self


class EmittedText(msgspec.Struct, frozen=True):
    """The output of a request that has ended."""

    tenant: str
    """The tenant of its `RequestOptions`, salted."""
    before: list[int]
    """The last `SHARED_SUFFIX` tokens of its prompt."""
    tokens: list[int]


class Tally(msgspec.Struct):
    """Counts of a request's verified drafts, for one drafter and source."""

    source: str
    """`fresh`, `ahead`, `lookup`, `prediction`, `shared`, or `native`."""
    drafter: str
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    """Draft tokens, as in `drafted`."""


class Account(msgspec.Struct):
    """What speculation did for one request at one verifier."""

    request_id: str
    tokens: int = 0
    verifications: int = 0
    """Steps that emitted tokens for the request, the end of its prefill included."""
    accepted_lengths: list[int] = []
    """Item n: number of drafted verifications that accepted n draft tokens."""
    tallies: list[Tally] = []
    waited_s: float = 0.0
    """Seconds that the request's steps waited for drafts of any request."""
    rule: str = ""
    """How its drafts are judged: `greedy`, `shared_noise` or `rejection_sampling`."""


class Addition(msgspec.Struct, frozen=True):
    """The frame before an added request."""

    request_id: str
    """The id at this verifier and in its outputs; it replaces the one in the request.  A request gets a new id with each move,
    so that late outputs of its previous verifier are not mistaken for current ones."""
    emitted: list[int] = []
    """Output tokens that the client already has.  The verifier continues after them, as if it had sampled them."""
    options: RequestOptions | None = None
    """None: the defaults."""


class Refusal(msgspec.Struct, frozen=True):
    """Why a verifier refuses a gateway's message."""

    reason: Literal["unknown", "incompatible", "unreadable"]
    """`unknown`: the verifier has no requests of this gateway, which must send HELLO (again).  `incompatible`: another version
    of the wire or of vLLM; trying again is useless.  `unreadable`: one message could not be read; nothing else is affected."""
    message: str


class EngineWelcome(msgspec.Struct, frozen=True):
    """What a gateway must know about a verifier to serve its model."""

    version: int
    verifier_id: str
    incarnation: str
    max_model_len: int
    num_kv_blocks: int
    block_size: int
    supported_tasks: list[str]
    weights: Weights = Weights()
    looks_up: bool = False
    """Whether it looks drafts up in texts of other requests (`EmittedText`)."""
    fixed_responses: bool = False
    """Whether requests may bring the response that they must emit (`FIXED_RESPONSE`)."""
