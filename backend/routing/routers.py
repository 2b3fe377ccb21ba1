"""Decides which verifier a request goes to.  Pure: candidates in, an id out; no clock, no socket.

Runs in the gateway's event loop, once per sequence.  Randomness comes from a seed.  Every policy is a `Router`.  `WithAffinity`
wraps another router, and prefers the verifier that has seen a session, or the beginning of a prompt, before.  `make_router`
builds the router that the settings name.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Protocol, assert_never

import msgspec

from backend.config.settings import Affinity, Routing
from backend.fleet.speed import Speed, mean_speed
from backend.routing.affinity import PrefixMap, RecentMap

SLACK = 8
"""A verifier is preferred only while it has at most 8 requests more than the least loaded one."""
ENTRIES = 65536
"""Most sessions, and most prompt blocks of 16 tokens, that are remembered."""


class Measured(msgspec.Struct, frozen=True, gc=False):
    """A verifier's latest report."""

    running: int
    waiting: int
    kv_free: float
    """Tokens the KV cache still has room for; infinite where its size is unknown."""
    kv_held: float
    """Tokens in the KV cache."""
    speed: Speed
    response_tokens: float
    """Mean length of a finished response."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A verifier that may be given work, as this gateway sees it."""

    id: str
    tokens: int
    """Tokens of this gateway's requests there: prompts and emitted tokens."""
    requests: int
    """This gateway's requests there."""
    routed: int
    """Requests this gateway has ever sent there."""
    measured: Measured | None = None
    """None before its first report with steps."""
    others: int = 0
    """Requests of other gateways there, by its latest report."""

    @property
    def load(self) -> int:
        """All requests there, as far as known."""
        return self.requests + self.others


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What routing may know of a request."""

    tokens: int
    """Tokens to compute before the next one is generated: the prompt, and tokens already emitted at another verifier."""
    prompt: Sequence[int] = ()
    scope: str = ""
    """Adapter and cache salt: cached prefixes are shared only between requests of one scope."""
    session: str | None = None


class Router(Protocol):
    """Chooses among the verifiers that take requests."""

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> str | None:
        """The id of one of `candidates`, or None when there is none."""
        ...

    def forget(self, verifier_ids: Collection[str]) -> None:
        """The verifiers have lost their caches.  Routers that remember no caches do nothing."""
        return


def _least(candidate: Candidate) -> tuple[int, int, int, str]:
    """Sorts by tokens in flight, then requests in flight, then requests ever sent."""
    return candidate.tokens, candidate.requests, candidate.routed, candidate.id


class LeastLoaded(Router):
    """Chooses the verifier with the fewest tokens of this gateway in flight."""

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> str | None:
        return min(candidates, key=_least).id if candidates else None


class PowerOfTwo(Router):
    """Chooses the less loaded of two verifiers drawn at random (Mitzenmacher, 2001).

    The random draw keeps several gateways from all sending their requests to the same least loaded verifier.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> str | None:
        if not candidates:
            return None
        pair = self._random.sample(candidates, min(2, len(candidates)))
        return min(pair, key=lambda each: (each.load, *_least(each))).id


class PredictedTgs(Router):
    """Chooses the verifier where the request is predicted to get the most tokens per second, counting its wait in the queue.

    A verifier that has not been measured is taken to be as fast as the others on average.  `slots` is the largest batch.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> str | None:
        known = [each.measured for each in candidates if each.measured is not None]
        speed = mean_speed([each.speed for each in known])
        if speed is None:
            return LeastLoaded().choose(ask, candidates)
        typical = Measured(0, 0, float("inf"), 0.0, speed, sum(each.response_tokens for each in known) / len(known))

        def rank(each: Candidate) -> tuple[float, tuple[int, int, int, str]]:
            return -predicted_tgs(ask.tokens, each, each.measured or typical, self._slots), _least(each)

        return min(candidates, key=rank).id


def predicted_tgs(tokens: int, candidate: Candidate, measured: Measured, slots: int) -> float:
    """Tokens per second, from arrival to the last token, that a new request of `tokens` tokens would get at this verifier.

    A step over the batch takes `speed.step_s(batch)` seconds and emits `speed.tokens` tokens per sequence.  If the batch is
    full, or the KV cache has too little room, the request waits for others to finish.  A full batch of `b` finishes
    `b / (response time)` requests per second.
    """
    batch = min(candidate.load + 1, slots)
    if measured.waiting:
        # Requests are waiting, so the verifier cannot admit more than it runs now, whatever its limit.
        batch = max(measured.running, 1)
    response_s = _response_s(measured, batch)
    queued = max(candidate.load + 1 - batch, 0)
    wait_s = queued * response_s / batch
    missing = tokens + measured.response_tokens - measured.kv_free
    if missing > 0 and measured.running:
        held_by_each = max(measured.kv_held / measured.running, 1.0)
        wait_s = max(wait_s, missing / held_by_each * _response_s(measured, measured.running) / measured.running)
    return measured.response_tokens / (wait_s + response_s)


def _response_s(measured: Measured, batch: int) -> float:
    return measured.response_tokens * measured.speed.step_s(batch) / measured.speed.tokens


class WithAffinity(Router):
    """Sends a session, or a prompt with a known beginning, where it went before.  `base` chooses for all other requests.

    A verifier is preferred only while it has at most `slack` requests more than the least loaded one: a popular prefix must
    not fill one verifier while others idle.  At most `entries` sessions and blocks are remembered, the most recently used.
    """

    def __init__(self, base: Router, affinity: Affinity, slack: int = SLACK, entries: int = ENTRIES) -> None:
        self._base = base
        self._slack = slack
        self._sessions = RecentMap[str](entries) if affinity in ("session", "both") else None
        self._prefixes = PrefixMap(entries) if affinity in ("prefix", "both") else None

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> str | None:
        chosen = self._preferred(ask, candidates) or self._base.choose(ask, candidates)
        if chosen is not None:
            if self._sessions is not None and ask.session:
                self._sessions.put(ask.session, chosen)
            if self._prefixes is not None:
                self._prefixes.put_prompt(ask.scope, ask.prompt, chosen)
        return chosen

    def forget(self, verifier_ids: Collection[str]) -> None:
        """The verifiers have lost their caches: forgets their sessions and prefixes."""
        for each in (self._sessions, self._prefixes):
            if each is not None:
                each.forget(verifier_ids)
        self._base.forget(verifier_ids)

    def _preferred(self, ask: Ask, candidates: Sequence[Candidate]) -> str | None:
        wanted = self._sessions.get(ask.session) if self._sessions is not None and ask.session else None
        if wanted is None and self._prefixes is not None:
            wanted = self._prefixes.longest(ask.scope, ask.prompt)
        if wanted is None:
            return None
        loads = {each.id: each.load for each in candidates}
        if wanted not in loads or loads[wanted] > min(loads.values()) + self._slack:
            return None
        return wanted


def make_router(policy: Routing, affinity: Affinity = "none", *, seed: int, slots: int) -> Router:
    """The router that the settings name; `slots` is `verifier.max_num_seqs`."""
    base: Router
    match policy:
        case "least-loaded":
            base = LeastLoaded()
        case "power-of-two":
            base = PowerOfTwo(seed)
        case "predicted-tgs":
            base = PredictedTgs(slots)
        case _:
            assert_never(policy)
    return base if affinity == "none" else WithAffinity(base, affinity)
