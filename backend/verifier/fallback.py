"""Drafts without a drafter: prompt lookup on the verifier, for when the remote draft is late, lost or worse.

Pure; scheduler's process and thread.  Every request's tokens are indexed as they come.  What the look-up would have drafted is
compared with what the target then said, whether or not it was verified, so its acceptance is known before it is first used, and
costs no verification to learn.  A look-up is used

- in place of a remote draft that did not come (late, lost, drafter down, none assigned), where it is expected to pay for the
  tokens it adds to the step;
- in place of asking for a remote draft at all, where the request has shown that it brings clearly more (it copies, or repeats
  itself), the wait for the drafter counted in.

Costs about five microseconds per request and step; a long prompt is indexed over several steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from backend.lookup import Lookup

SHORTEST, LONGEST = 2, 4
"""Suffixes looked up, in tokens."""
WINDOW = 4096
"""Tokens of a prompt that are indexed, the latest: bounds the memory of a request to about a megabyte."""
INDEXED_PER_STEP = 512
"""Tokens indexed per step over all requests, so that a batch of long prompts does not stop the engine."""
FORGET = 0.9
"""Weight of a draft after one newer one: text turns from copying to not copying within sentences."""
EVIDENCE = 5.0
"""Decayed number of look-ups that must have been seen through before a look-up is preferred to a drafter."""
GAIN = 1.1
"""It must promise this much more."""
ALWAYS = 1 - 1e-9
"""Chances from here on are certainty: the sum of their powers is a difference of rounding errors."""
REMEMBERED = 0.998
"""Weight of a look-up after one newer one of whatever request, for what look-ups bring in general."""
ENOUGH = 32.0
"""Look-ups that must have been seen through before anything is said of them in general."""
PROBE_STEPS = 32
"""Every so many steps all requests ask their drafters, so that what these would bring stays known."""


@dataclass
class Chance:
    """P(a draft token is kept | those before it were), decayed; starts from a prior of some tries."""

    kept: float
    tried: float
    seen: float = 0.0
    """Drafts it was learned from, decayed."""

    def observe(self, drafted: int, accepted: int) -> None:
        """One draft: the first `accepted` of `drafted` tokens were kept."""
        self.kept = FORGET * self.kept + accepted
        self.tried = FORGET * self.tried + min(accepted + 1, drafted)
        self.seen = FORGET * self.seen + 1

    def length(self, k: int) -> float:
        """Expected tokens per verification of `k` draft tokens: 1 + p + p^2 + ... + p^k."""
        p = self.kept / self.tried
        return k + 1.0 if p > ALWAYS else (1 - p ** (k + 1)) / (1 - p)


@dataclass
class _Track:
    """What is known of one request."""

    lookup: Lookup
    greedy: bool
    own: Chance = field(default_factory=lambda: Chance(1.0, 4.0))
    """Of look-ups that found something."""
    remote: Chance = field(default_factory=lambda: Chance(2.8, 4.0))
    found: float = 0.0
    looked: float = 1.0
    """Look-ups that found something, of all; both decayed."""
    guess: tuple[int, list[int]] | None = None
    """A look-up whose outcome is awaited: the length it was made at, its tokens."""

    def expected(self, k: int) -> float:
        """Tokens per verification if look-ups alone drafted, those that find nothing counted in."""
        share = self.found / self.looked
        return share * self.own.length(k) + 1 - share


@dataclass
class _General:
    """Look-ups of all requests, decayed."""

    looked: float = 0.0
    found: float = 0.0
    seen: float = 0.0
    """Through to their end."""
    matched: float = 0.0
    """Tokens of these that were right."""

    def note_seen(self, matched: int) -> None:
        """One was seen through."""
        self.seen = REMEMBERED * self.seen + 1
        self.matched = REMEMBERED * self.matched + matched

    def note_made(self, found: bool) -> None:
        """One was made."""
        self.looked = REMEMBERED * self.looked + 1
        self.found = REMEMBERED * self.found + found


class Fallback:
    """All requests of one verifier.  `k`: draft tokens at most; 0 switches it off."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._tracks: dict[str, _Track] = {}
        self._budget = INDEXED_PER_STEP
        self._steps = 0
        self._general = {True: _General(), False: _General()}
        """Of greedy requests, and of those that are sampled."""

    @property
    def is_on(self) -> bool:
        """Whether there are look-ups at all."""
        return self._k > 0

    def __len__(self) -> int:
        return len(self._tracks)

    def begin_step(self) -> None:
        """A step begins."""
        self._budget = INDEXED_PER_STEP
        self._steps += 1

    def advance(self, request_id: str, tokens: Sequence[int], greedy: bool = True) -> None:
        """The request's tokens are now `tokens`, prompt included; they only ever grow."""
        if not self._k:
            return
        track = self._tracks.get(request_id)
        if track is None:
            known = list(tokens)
            lookup = Lookup(known, SHORTEST, LONGEST, max(len(known) - WINDOW, 0))
            track = self._tracks[request_id] = _Track(lookup, greedy)
        else:
            track.lookup.tokens.extend(tokens[len(track.lookup.tokens) :])
        self._budget -= track.lookup.index(max(self._budget, 0))
        self._learn(track)

    def draft(self, request_id: str, base_len: int, k: int, price: float) -> list[int]:
        """At most `k` tokens in place of a draft that did not come; none where they would not pay.

        `price`: what a step with `k` draft tokens per request costs, by one without any.
        """
        track = self._tracks.get(request_id)
        if track is None or len(track.lookup.tokens) != base_len or track.own.length(k) <= GAIN * price:
            return []
        return self._look_up(track, k)

    def better(self, request_id: str, base_len: int, k: int, gain: float = GAIN) -> list[int]:
        """At most `k` tokens in place of a remote draft at hand, or (`gain` 1) of one to wait for; none if no better."""
        track = self._tracks.get(request_id)
        if track is None or len(track.lookup.tokens) != base_len or track.own.seen < EVIDENCE:
            return []
        return self._look_up(track, k) if track.own.length(k) > gain * track.remote.length(k) else []

    def preferred(self, request_ids: Collection[str], k: int, step_s: float, wait_s: float) -> frozenset[str]:
        """Which of these requests need no remote draft after their next verification.

        `step_s`: a step's time; `wait_s`: how long it would wait for remote drafts.  A request alone must be clearly better off
        without; all of them together also save the wait.
        """
        if not (self._k and k) or self._steps % PROBE_STEPS == 0:
            return frozenset()
        tracks = {request_id: self._tracks.get(request_id) for request_id in request_ids}
        known = {r: track for r, track in tracks.items() if track is not None and track.own.seen >= EVIDENCE}
        if not known:
            return frozenset()
        if len(known) == len(tracks):
            own = sum(track.expected(k) for track in known.values())
            remote = sum(track.remote.length(k) for track in known.values())
            if own * (step_s + wait_s) > GAIN * remote * step_s:
                return frozenset(known)
        return frozenset(r for r, track in known.items() if track.expected(k) > GAIN * track.remote.length(k))

    def note_remote(self, request_id: str, drafted: int, accepted: int) -> None:
        """A remote draft of this request was verified."""
        track = self._tracks.get(request_id)
        if track is not None:
            track.remote.observe(drafted, accepted)

    def in_general(self, greedy_share: float = 1.0) -> tuple[float, float] | None:
        """Share of verifications that look-ups find a draft for, and the tokens per verification if they alone drafted.

        Where `greedy_share` of the requests are greedy.  None before enough look-ups for such requests were seen through.
        """
        found, length = 0.0, 1.0
        for greedy, weight in ((True, greedy_share), (False, 1 - greedy_share)):
            general = self._general[greedy]
            if weight and general.seen < ENOUGH:
                return None
            if weight:
                share = weight * general.found / general.looked
                found, length = found + share, length + share * general.matched / general.seen
        return found, length

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._tracks.pop(request_id, None)

    def _learn(self, track: _Track) -> None:
        """Sees the awaited look-up through as far as the tokens go, and makes another one."""
        tokens = track.lookup.tokens
        if track.guess is not None:
            base_len, guess = track.guess
            known = len(tokens) - base_len
            most, matched = min(known, len(guess)), 0
            while matched < most and guess[matched] == tokens[base_len + matched]:
                matched += 1
            if matched == known < len(guess):
                return
            track.own.observe(len(guess), matched)
            self._general[track.greedy].note_seen(matched)
        guess = track.lookup.look_up([], self._k)
        track.guess = (len(tokens), guess) if guess else None
        track.found = FORGET * track.found + bool(guess)
        track.looked = FORGET * track.looked + 1
        self._general[track.greedy].note_made(bool(guess))

    def _look_up(self, track: _Track, k: int) -> list[int]:
        if track.guess is not None and track.guess[0] == len(track.lookup.tokens):
            return track.guess[1][:k]
        return track.lookup.look_up([], k)
