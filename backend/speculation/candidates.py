"""Keeps the available drafts of each request, from all sources, and learns from them once the text is known.  Pure.

Scheduler's process and thread.  A `Candidate` is one available draft.  Three kinds compete: fresh drafts, drafts made ahead for
the outcome that came, and look-ups in texts (`texts.py`).  `calibration.py` gives each token's chance; `guesses.py` compares
all drafts, verified or not, with the text later.
"""

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence

from backend.fleet import LOOKUP
from backend.speculation.budget import survivals
from backend.speculation.calibration import Calibration
from backend.speculation.candidate import (
    Candidate,
    Made,
    Request,
    Source,
    begun,
    candidate_of,
    candidates_of,
    has_rest,
    rank_of,
)
from backend.speculation.chances import Rule, chances
from backend.speculation.guesses import Resolved
from backend.speculation.outlook import Foresight, Outlook
from backend.speculation.prediction import PredictedText
from backend.speculation.proposals import unpack
from backend.speculation.shared import SharedTexts
from backend.speculation.texts import LookupSource, OwnText
from backend.speculation.waiting import Ask
from backend.wire.drafting import Block, Draft, Outcome
from backend.wire.engine import EmittedText, RequestOptions

_ASKS = {"off": Ask.PLAIN, "sync": Ask.DRAFT, "ahead": Ask.AHEAD, "auto": None}

SAMPLED = 8
"""Requests per step, on average, whose drafts are learned from: in larger batches, all would cost too much time."""
INDEXED_PER_STEP = 512
"""Tokens indexed for look-ups per step, over all requests, so that a batch of long prompts does not stop the engine."""
FOR_OTHERS = 64
"""The part of `INDEXED_PER_STEP` that is kept for other verifiers' outputs."""
RESTS_AFTER = 16
"""Steps over which the gain of look-ups is averaged, and after which they rest without any: then requests are looked up in one
step of so many at most."""
LOOKED_UP = 1 / 16
"""Gain in tokens per second that keeps look-ups awake, or wakes them: about what looking up all requests in each step costs."""


_Given = tuple[Request, Source, Draft | Outcome, float]
"""A drafter's draft: its request, its source, the draft, and its drafter's compute time in seconds."""


class Candidates:
    """The available drafts of all requests of one verifier."""

    def __init__(self, longest: int, outcomes: int, lookups: bool, vocab_size: int) -> None:
        """Drafts have at most `longest` tokens; at most `outcomes` are drafted ahead per request."""
        self.requests: dict[str, Request] = {}
        """Those that have been decoded, by id."""
        self.foresight = Foresight(outcomes, longest)
        self._prior = survivals(chances(Calibration(longest).weights, [0.0] * (2 * longest)))
        self.drafted, self.foreseen, self.alone = Outlook(longest, self._prior), Outlook(longest, self._prior), Outlook(longest)
        """What drafts are expected to add: fresh ones, those made ahead, and look-ups alone."""
        self.steps = 0
        self.forced = 0
        """Requests whose client asks for drafts, whatever the verifier chooses for all."""
        self.predicted: set[Request] = set()
        """Those of them whose client has predicted the answer."""
        self.asleep, self.every = False, 1
        """Whether only requests with a prediction are looked up and indexed, until the next step's drafts are chosen; all are
        in one step of so many."""
        self._gain = LOOKED_UP * math.e
        """Mean gain in tokens per second by look-ups, decayed; at first, what falls to `LOOKED_UP` in `RESTS_AFTER` steps."""
        self._longest, self._vocab_size = longest, vocab_size
        self._shared = SharedTexts() if lookups else None
        self._room = 0
        self._calibrations: dict[Source, Calibration] = {}
        self._lots = random.Random(0)
        unpack([bytes(8)], [[0]], vocab_size)  # Compiles it.
        self._foreseen: list[tuple[int | None, int, int]] = []
        """What `Foresight.observe` takes, of the step that ended."""

    # -- requests ------------------------------------------------------------------------------------------------------

    def begin(self, request_id: str, options: RequestOptions, rule: Rule, prompt_len: int) -> Request:
        """A request has come, with a prompt of so many tokens; it is not decoded yet."""
        longest = self._longest if options.longest is None else min(options.longest, self._longest)
        self.forced += options.mode in ("sync", "ahead")
        return Request(request_id, rule, 0 if options.mode == "off" else longest, _ASKS[options.mode], options, prompt_len)

    def grown(self, request: Request, text: list[int], began: int) -> None:
        """A step added tokens to the request.  `text`: all its tokens; `began`: its length before the step."""
        if not request.text:
            self.requests[request.id] = request
            request.texts = self._texts(request, len(text))
        request.text, emitted, candidate = text, len(text) - began, request.verified
        if candidate is not None and candidate.proposal is not None:
            request.judged = candidate, emitted - 1, min(emitted, request.verified_length)

    def finish(self, request: Request) -> None:
        """The request is over."""
        self.forced -= request.options.mode in ("sync", "ahead")
        self.predicted.discard(request)
        self.requests.pop(request.id, None)
        self._learn_from(request, request.guesses.finish(request.text))

    def renewed(self, drafter_id: str) -> None:
        """The drafter has a new head: forgets what was learned about its drafts."""
        self._calibrations = {s: known for s, known in self._calibrations.items() if s.drafter_id != drafter_id}
        self.drafted, self.foreseen = Outlook(self._longest, self._prior), Outlook(self._longest, self._prior)

    def share(self, emitted: EmittedText) -> None:
        """Takes the output of a request that has ended at another verifier."""
        if self._shared is not None:
            self._shared.take(emitted.tenant, [*emitted.before, *emitted.tokens], len(emitted.before))

    # -- drafts that come ----------------------------------------------------------------------------------------------

    def take_fresh(self, drafter_id: str, drafts: Sequence[Draft], draft_s: float, floor: float) -> list[str]:
        """Takes a drafter's answers; `floor`: the survival below which the drafter was to stop.  Returns a verdict on each.

        `ready`: it, or its rest, is of use; `late`: the text went on otherwise; `stale`: no request of that length; `invalid`.
        """
        verdicts = ["stale"] * len(drafts)
        current = [
            (i, draft, request)
            for i, draft in enumerate(drafts)
            if (request := self.requests.get(draft.request_id)) is not None and draft.base_len <= len(request.text)
        ]
        sources = {rule: Source(drafter_id, rule) for rule in Rule}
        candidates = self._checked([(request, sources[request.rule], draft, draft_s) for _, draft, request in current])
        for (i, draft, request), candidate in zip(current, candidates, strict=True):
            in_time = draft.base_len == len(request.text)
            if candidate is not None:
                self._take(request, candidate, draft.base_len)
                in_time = in_time or self._go_on(request, candidate, request.text[draft.base_len :])
            elif draft.tokens:
                verdicts[i] = "invalid"
                continue
            else:
                # The drafter had no draft, or its first token was below the floor.
                self._compare(request, "fresh", [floor], floor)
            verdicts[i] = "ready" if in_time else "late"
        return verdicts

    def take_blocks(self, drafter_id: str, blocks: Sequence[Block], draft_s: float) -> list[tuple[Request, Block]]:
        """Takes outcomes that a drafter has drafted ahead; returns those of known requests."""
        taken = [(request, each) for each in blocks if (request := self.requests.get(each.request_id)) is not None]
        for request, block in taken:
            request.block = drafter_id, block, draft_s
        return taken

    def look_up(self, began: Mapping[Request, int], floor: float, *, counts: bool) -> None:
        """Makes available the drafts made ahead for the outcomes that came.  `counts`: count hits.

        `began`: each request's length before the step that ended; `floor`: as for `take_fresh`.
        """
        hits: list[_Given] = []
        for request, base_len in began.items():
            if not request.outcomes or request.outcomes_at != base_len:
                continue
            block, request.block = request.block, None
            offered, emitted = request.offered, request.text[base_len:]
            if offered is not None and offered.source.drafter_id != LOOKUP and has_rest(request, offered, len(emitted)):
                # The step verified only part of this draft, or nothing: the rest may still be used.
                self._go_on(request, offered, emitted)
            if request.candidate is None and block is not None and block[1].base_len == base_len:
                drafter_id, outcomes, draft_s = block
                rank = rank_of(outcomes, emitted) if emitted else None
                if rank is not None:
                    source = Source(drafter_id, request.rule, "ahead")
                    hits.append((request, source, outcomes.outcomes[rank], draft_s))
                if counts:
                    tokens = request.verified_length if request.verified is not None else 0
                    self._foreseen.append((rank, request.outcomes, tokens))
        for (request, _, outcome, _), candidate in zip(hits, self._checked(hits), strict=True):
            if candidate is not None:
                self._take(request, candidate, len(request.text))
            elif not outcome.tokens:
                self._compare(request, "ahead", [floor], floor)

    def best(self, known: Iterable[Request]) -> list[Candidate | None]:
        """The best draft for each request's present length, from a drafter or a look-up."""
        found = []
        for request in known:
            # A draft that comes while a step runs that began early is for a length that will have passed.
            candidate = request.candidate if request.candidate_at == len(request.text) else None
            # Written out for speed: most of the time no look-up is awake.
            if not self.asleep or request.looked_up_at == len(request.text) or request in self.predicted:
                looked_up = self._look_up(request)
                if looked_up is not None and (candidate is None or looked_up.worth > candidate.worth):
                    candidate = looked_up
            found.append(candidate)
        return found

    @property
    def rests(self) -> bool:
        """Whether look-ups rest."""
        return self._gain < LOOKED_UP

    def awake(self, decoding: Iterable[Request]) -> Collection[Request]:
        """Those of the given requests that are looked up at present."""
        return self.predicted if self.asleep else begun(decoding)

    def discard(self) -> None:
        """No draft is verified in this step: drops drafters' drafts that are there."""
        for request in self.requests.values():
            request.candidate = None

    def rest(self, requests: int, gain: float | None) -> None:
        """Counts a step over so many requests.  `gain`: in tokens per second, relative, by look-ups; None: none took place.

        While they gain little, all are looked up in one step of sixteen, or fewer where there are fewer requests.  In each step
        they would lengthen it, and so would a few of them by turns, whose data no cache has.
        """
        if gain is not None and not self.asleep:
            self._gain += (gain - self._gain) / RESTS_AFTER
        self.every = min(1 << max(requests, 1).bit_length() - 1, RESTS_AFTER) if self.rests else 1
        self.asleep = (self.steps + 1) % self.every > 0

    # -- learning ------------------------------------------------------------------------------------------------------

    def begin_learning(self) -> None:
        """Call once per step, before `learn` for its requests."""
        for rank, outcomes, tokens in self._foreseen:
            self.foresight.observe(rank, outcomes, tokens)
        self._foreseen.clear()
        self._room = (INDEXED_PER_STEP - FOR_OTHERS) * self.every

    def learn(self, request: Request) -> None:
        """Compares the request's drafts with its text, and indexes new text for look-ups."""
        if known := request.guesses.advance(request.text):
            self._learn_from(request, known)
        if request.judged is not None:
            candidate, accepted, judged = request.judged
            request.judged = None
            if self._is_sampled():
                self._calibration(candidate.source).observe(request.offsets, candidate.signs, accepted, judged)
        for each in request.texts if not self.asleep or request in self.predicted else ():
            if self._room > 0:
                self._room -= each.advance(request.text, self._room)

    def index_shared(self) -> None:
        """Call once per step, after `learn` for its requests: indexes other verifiers' outputs."""
        if self._shared is not None:
            self._shared.advance(self._room + FOR_OTHERS)

    def chance_weights(self, drafter_id: str) -> list[list[float]]:
        """The weights (`chances.py`) by which a drafter judges its drafts, by `Rule`."""
        return [self._calibration(Source(drafter_id, rule)).weights for rule in Rule]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _texts(self, request: Request, length: int) -> list[LookupSource]:
        """What drafts are looked up in for a request that is `length` tokens long now."""
        options, texts = request.options, list[LookupSource]()
        if options.prediction:
            texts.append(PredictedText(options.prediction, request.prompt_len))
            self.predicted.add(request)
        if self._shared is not None:
            texts.append(OwnText())
            if options.learn:
                texts.append(self._shared.reader(options.tenant, length))
        return texts

    def _look_up(self, request: Request) -> Candidate | None:
        if request.looked_up_at == len(request.text):
            return request.looked_up
        if self.asleep and request not in self.predicted:
            return None
        request.looked_up, request.looked_up_at = None, len(request.text)
        for each in request.texts:
            tokens, signs = each.propose(request.text, request.longest)
            if tokens:
                source = Source(LOOKUP, request.rule, each.kind)
                candidate = candidate_of(source, tokens, signs, self._calibration(source).chances(request.offsets, signs))
                self._note(request, candidate, request.looked_up_at)
                if request.looked_up is None or candidate.worth > request.looked_up.worth:
                    request.looked_up = candidate
        if request.texts and self._is_sampled():
            self.alone.note(request.looked_up.survivals if request.looked_up is not None else [], self.steps)
        return request.looked_up

    def _go_on(self, request: Request, candidate: Candidate, emitted: list[int]) -> bool:
        """Uses the rest of an older draft.  False: the text went on otherwise, or a better one is there."""
        done = len(emitted)
        if len(candidate.tokens) <= done or candidate.tokens[:done] != emitted:
            return False
        tokens, signs, proposal = candidate.tokens[done:], candidate.signs[2 * done :], candidate.proposal
        if proposal is not None:
            proposal = proposal.part(done, len(candidate.tokens))
        of_each = self._calibration(candidate.source).chances(request.offsets, signs)
        rest = candidate_of(candidate.source, tokens, signs, of_each, candidate.draft_s, proposal)
        if request.candidate is not None and request.candidate.worth >= rest.worth:
            return False
        request.candidate, request.candidate_at = rest, len(request.text)
        return True

    def _take(self, request: Request, candidate: Candidate, base_len: int) -> None:
        """Learns from a draft made at `base_len`; makes it available if the request still has that length."""
        self._note(request, candidate, base_len)
        if candidate.proposal is None or base_len != len(request.text):
            drafted = candidate.survivals if candidate.proposal is None else candidate.expected
            self._compare(request, candidate.source.kind, drafted, candidate.worth)
        if base_len == len(request.text):
            request.candidate, request.candidate_at = candidate, base_len

    def decided(self, request: Request, candidate: Candidate) -> None:
        """A step has begun that verifies some of a draft, or none: notes what it promised.

        A sampled draft's survivals count as far as they were read: later ones depend on tokens that may be verified yet.
        """
        if candidate.proposal is not None:
            read = 1 + (request.verified_length if request.verified is candidate else 0)
            self._compare(request, candidate.source.kind, candidate.survivals[:read], candidate.worth)

    def _compare(self, request: Request, kind: str, drafted: list[float], worth: float) -> None:
        """Notes what a drafter's answer, with survivals `drafted`, adds; or the request's look-up, if that is better."""
        if self._is_sampled():
            looked_up = self._look_up(request)
            is_better = looked_up is not None and looked_up.worth > worth
            outlook = self.foreseen if kind == "ahead" else self.drafted
            outlook.note(looked_up.survivals if looked_up is not None and is_better else drafted, self.steps)

    def _is_sampled(self) -> bool:
        """Whether this call is sampled.  By lot: turns could always fall on the same one of several calls per request."""
        return self._lots.random() * len(self.requests) < SAMPLED

    def _note(self, request: Request, candidate: Candidate, base_len: int) -> None:
        # The text depends on a sampled draft: it is learned from where it was verified (`judged`).
        if candidate.proposal is None and self._is_sampled():
            known = request.guesses.note(candidate.source, base_len, candidate.tokens, candidate.signs, request.text)
            self._learn_from(request, known)

    def _learn_from(self, request: Request, resolved: Iterable[Resolved]) -> None:
        for draft in resolved:
            source = draft.source
            assert isinstance(source, Source)
            self._calibration(source).observe(request.offsets, draft.signs, draft.matched, draft.seen)
            for each in request.texts:
                if each.kind == source.kind:
                    each.scored(draft.matched, draft.seen)

    def _checked(self, given: Sequence[_Given]) -> list[Candidate | None]:
        """Drafters' drafts, cut to the lengths asked for; None for one that is empty or malformed."""
        found: list[Candidate | None] = [None] * len(given)
        sound = [
            i
            for i, (_, _, draft, _) in enumerate(given)
            if (tokens := draft.tokens)
            and len(draft.signs) in (0, 2 * len(tokens))
            and min(tokens) >= 0
            and max(tokens) < self._vocab_size
        ]
        drafts = [given[i][2] for i in sound]
        proposals = unpack([each.proposal for each in drafts], [each.tokens for each in drafts], self._vocab_size)
        of_source: dict[Source, list[tuple[int, Made]]] = {}
        for i, proposal in zip(sound, proposals, strict=True):
            request, source, draft, draft_s = given[i]
            if draft.proposal and (proposal is None or request.rule != Rule.INDEPENDENT):
                continue
            tokens, signs = draft.tokens, draft.signs or [0.0] * (2 * len(draft.tokens))
            if len(tokens) > request.longest:
                tokens, signs = tokens[: request.longest], signs[: 2 * request.longest]
                proposal = proposal.part(0, request.longest) if proposal is not None else None
            of_source.setdefault(source, []).append((i, (tokens, signs, draft_s, proposal)))
        for source, numbered in of_source.items():
            places, drafts_of = [i for i, _ in numbered], [each for _, each in numbered]
            own = [given[i][0].offsets for i in places]
            of_each = self._calibration(source).chances_of_many(own, [each[1] for each in drafts_of])
            for i, candidate in zip(places, candidates_of(source, drafts_of, of_each), strict=True):
                found[i] = candidate
        return found

    def _calibration(self, source: Source) -> Calibration:
        known = self._calibrations.get(source)
        if known is None:
            known = self._calibrations[source] = Calibration(self._longest)
        return known
