"""Makes all decisions about drafts for the scheduler: which to verify, which to ask for, whether to wait.  Pure.

Scheduler's process and thread; `now` is in seconds of any monotonic clock.  A step goes through four verbs:

    attach    chooses the draft tokens to verify, by the budget (`budget.py`), and for which requests a fresh draft follows
    ask       looks for each verification's outcome among those drafted ahead; tells drafters what else to draft next
    hold      says until when the next step should wait for drafts (`waiting.py`, `deadlines.py`)
    learn     compares drafts with the text; updates chances, look-ups and expectations (while the device computes)

Every source of drafts competes in one ranking: fresh drafts, drafts made ahead, and the request's own text.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from backend.fleet import LOOKUP
from backend.speculation.candidate import Attached, DraftLimits, Request, begun, early_drafts, lacks_block
from backend.speculation.candidates import LOOKED_UP, RESTS_AFTER, Candidates
from backend.speculation.deadlines import Questions
from backend.speculation.pairing import Pairing, Preference
from backend.speculation.ranking import Ranking
from backend.speculation.step_times import DraftTimes, StepTimes
from backend.speculation.waiting import Ask, Asking, Choice, Pending, StepLoad, Times, bearable_s, waiting_pays
from backend.wire.drafting import Block, Draft, NextItem

RECONSIDER_EVERY = 16
"""Steps between two choices of what to ask for, unless the load doubles or halves; a choice costs some hundred microseconds."""
ROOM = 0.5
"""Drafters stop below this share of the survival that just paid in the last step.  At 1 the budget could not grow."""
FEW = 4
"""Outcomes drafted ahead until it is known how many pay."""
CAUGHT_UP = 3
"""Step of a probe from which on times count: drafters have caught up on the tokens of the time without asking."""
NOTHING = Choice(Ask.PLAIN, 0, 0.0)


class Speculator:
    """Decides about the drafts of one verifier."""

    def __init__(
        self,
        mode: str,
        longest: int,
        outcomes: int,
        lookups: bool,
        vocab_size: int,
        longest_wait_s: float,
        one_pass: bool = False,
    ) -> None:
        """`mode`: sync, ahead or auto; `longest`: K; `outcomes`: most drafted ahead per request; `lookups`: enabled or not.

        `one_pass`: drafters make a draft in one pass.
        """
        self.step_times = StepTimes()
        self.questions = Questions(longest_wait_s)
        self.candidates = Candidates(longest, outcomes, lookups, vocab_size)
        self.preference = Preference()
        self.changes = 0
        self._fixed = {"sync": Ask.DRAFT, "ahead": Ask.AHEAD}.get(mode)
        self._asking = Asking()
        self._longest = longest
        self._few = min(FEW, outcomes)
        if self._fixed is not None:
            self._asking.choice = Choice(self._fixed, longest, 0.0, self._few * (self._fixed == Ask.AHEAD), longest)
        self._draft_times = DraftTimes(one_pass)
        plain_s, asking_s = (partial(self.step_times.at, asking=asking) for asking in (False, True))
        self._times = Times(plain_s, asking_s, self._draft_times.at, self._draft_times.ahead)
        self._load: StepLoad | None = None
        self._ended, self._unlearned = dict[Request, int](), dict[Request, int]()
        """Requests whose step has ended, with their lengths before it: until `ask`, and from then on until `learn`."""
        self._attached = Attached()
        """What was attached to the running step."""
        self._verifying: set[Request] = set()
        """Requests of the running step, if drafters were asked and have different heads (`pairing.py`)."""
        self._drafter_ids: list[str] = []
        self._probing, self._probed, self._probes, self._asked_ahead = False, 0, 0, False
        self._ranking, self._floor, self._reconsider_at = Ranking(self.step_times), 0.0, 0
        self._decoding, self._passed = 0, 0
        """Requests that the running step decodes, and of how many of them `passed` has told."""
        self._step_s, self._emitted, self._request_s = 0.0, 0, 0.0
        """Seconds of the last step; since the last choice: tokens emitted, and requests times seconds, summed."""
        self.is_deferring, self._blocks_by = False, 0.0
        """Whether `ask` waits for outcomes that were drafted ahead and have not come, and until when it would."""
        self._began, self._came = 0.0, False
        """When the latest step began, and whether drafts came, or became of use, since then."""

    # -- drafters ------------------------------------------------------------------------------------------------------

    def set_drafters(self, heads: Mapping[str, str]) -> None:
        """The assignment changed.  `heads`: drafter to the name of its head."""
        if not self._drafter_ids:
            # Steps without drafters say nothing about the offer that was chosen before.
            self._emitted, self._request_s = 0, 0.0
        self._drafter_ids, self._load, self._blocks_by = sorted(heads), None, 0.0
        self.preference.set_drafters(dict(heads))
        self.questions.set_drafters(self._drafter_ids)

    def renewed(self, drafter_id: str) -> None:
        """Forgets what was learned about a drafter's drafts: it has a new head."""
        self.candidates.renewed(drafter_id)
        self._reconsider_at = 0

    def arrived(self, drafter_id: str, drafts: Sequence[Draft], draft_s: float, now: float) -> list[tuple[str, float | None]]:
        """Takes fresh drafts: each is `ready`, `late` (the text has gone on), `stale` (not asked for) or `invalid`.

        Also returns the seconds since each was asked for, if it was.
        """
        self._came = True
        known, answered = self.candidates.requests, self.questions.answered
        waited = [
            answered(drafter_id, known[draft.request_id], draft.base_len, now) if draft.request_id in known else None
            for draft in drafts
        ]
        awaited = (draft for draft, waited_s in zip(drafts, waited, strict=True) if waited_s is not None)
        verdicts = iter(self.candidates.take_fresh(drafter_id, list(awaited), draft_s, self._floor))
        return [("stale" if waited_s is None else next(verdicts), waited_s) for waited_s in waited]

    def timed(self, rows: int, k: int, draft_s: float, queue_s: float, waited_s: float, now: float) -> None:
        """Notes how long a drafter took: drafts of at most `k` tokens for `rows` requests, read at `now`.

        `draft_s`: the drafter's compute; `queue_s`: its queue; `waited_s`: since the question.  If a step began meanwhile, the
        answer came at an unknown time during it: the drafter must not look as slow as the step, or it is never waited for.
        """
        if not self._is_telling:
            return
        before_s = self._began - (now - waited_s)
        if before_s >= 0:
            waited_s = max(before_s, min(waited_s, draft_s + queue_s))
        # An enumeration that the drafter had to finish first is predicted by itself.
        self._draft_times.observe(rows, k, draft_s, waited_s - queue_s if self._asked_ahead else waited_s)

    def take_blocks(self, drafter_id: str, blocks: Sequence[Block], draft_s: float, now: float) -> None:
        """Takes outcomes that a drafter has drafted ahead."""
        self.questions.heard(drafter_id)
        for request, block in self.candidates.take_blocks(drafter_id, blocks, draft_s):
            self.questions.answered(drafter_id, request, block.base_len, now)
        if self._is_telling and (rows := sum(len(block.outcomes) for block in blocks)):
            k = max(len(outcome.tokens) for block in blocks for outcome in block.outcomes)
            self._draft_times.enumerated(rows, k, draft_s)

    # -- requests ------------------------------------------------------------------------------------------------------

    def pair(self, request: Request, adapter: str, session: str) -> Pairing:
        """The request enters the batch: decides on its head and drafter, unless that is decided.  See `Preference.begin`."""
        if request.pairing is None:
            request.pairing, request.score = self.preference.begin(request.id, adapter, session)
        return request.pairing

    def ended(self, request: Request, text: list[int], began: int, now: float) -> None:
        """A step added tokens to a request that goes on.  `text`: all its tokens; `began`: its length before the step."""
        self.candidates.grown(request, text, began)
        if request.id in self._attached.asks and (drafter_id := self.preference.drafter_of(request.pairing)) is not None:
            self.questions.asked(request, len(text), drafter_id, now)
        self._ended[request] = began
        if request.score is not None and request in self._verifying:
            request.score.learn(len(text) - began)

    def passed(self, requests: int) -> None:
        """A quiet step (`Attached.is_quiet`) added one token to each of so many requests that `ended` has told of before."""
        self._passed += requests

    def release(self, request: Request) -> None:
        """The request is preempted: none of its drafts is verified for a while."""
        self.questions.stop_waiting([request])
        self._ended.pop(request, None)
        request.drop_drafts()

    def finish(self, request: Request) -> None:
        """The request is over."""
        self.release(request)
        self._unlearned.pop(request, None)
        self.candidates.finish(request)
        self.preference.finish(request.pairing)

    # -- a step --------------------------------------------------------------------------------------------------------

    @property
    def choice(self) -> Choice:
        """What is asked for at present."""
        return self._asking.choice if self._drafter_ids and not self._asking.paused else NOTHING

    @property
    def _is_telling(self) -> bool:
        """Whether times and hits are typical.  In a probe's first steps they are not: the drafter catches up."""
        return self.choice.ask != Ask.PLAIN or self._probed >= CAUGHT_UP

    @property
    def outcomes(self) -> int:
        """Outcomes drafted ahead per request at present."""
        if self.choice.ask == Ask.PLAIN and self._probing:
            # Every other probe only, so that fresh drafts are also timed without an enumeration before them.
            return self._few if self._probes % 2 else 0
        return self.choice.outcomes or (self._few if self._probing else 0)

    def may_be_early(self) -> bool:
        """Whether the next step may begin before the text of the one before is known: no probe, no draft, no look-up."""
        is_plain = self.choice.ask == Ask.PLAIN and not (self.candidates.forced or self._came)
        probes = bool(self._drafter_ids) and self._fixed is None and self._asking.probes_next
        looks_up = not self.candidates.rests or self.candidates.predicted or (self.candidates.steps + 1) % RESTS_AFTER == 0
        return is_plain and not (probes or looks_up or self._asking.paused)

    def attach(
        self, decoding: Collection[Request], prefill: int, now: float, *, is_early: bool = False, limits: DraftLimits = None
    ) -> Attached:
        """Chooses the draft tokens for the step that begins, over `decoding` requests and `prefill` prompt tokens.

        There are none for a step that begins early (`may_be_early`).  `limits`: the most of each.
        """
        attached = self._attached = Attached(lost=[question.drafter_id for question in self.questions.expire(now)])
        self.questions.stop_waiting()
        self.candidates.steps, self._began = self.candidates.steps + 1, now
        rests = self.candidates.rests and not self.candidates.predicted
        self._probing = bool(self._drafter_ids) and self._fixed != Ask.DRAFT and self._asking.stepped(rests)
        self._probed = self._probed + 1 if self._probing else 0
        self._probes += self._probed == 1
        of_all = self._probing or self.choice.ask != Ask.PLAIN
        attached.features_needed = of_all or self.candidates.forced > 0
        self.step_times.asking = attached.features_needed or self._asking.paused == 1
        if self._asking.paused == 2:
            self.step_times.doubt()
        self._decoding = len(decoding)
        came, self._came = self._came, False
        is_plain = self.candidates.rests and not attached.features_needed and not came
        is_bare = is_early or (self._asking.paused > 1 and not self.candidates.forced)
        gain = self._gain(self.candidates.awake(decoding), prefill) if is_plain and not is_bare else None
        if is_bare or (gain is not None and gain <= LOOKED_UP):
            self._verifying, attached.is_quiet = set(), True
            if came:
                self.candidates.discard()
            self.candidates.rest(self._decoding, gain)
            return attached
        known = begun(decoding)
        self._verifying = set(known) if self.preference.has_choice and attached.features_needed else set()
        candidates = self.candidates.best(known)
        most = None if limits is None else [limits[request.id] for request in known]
        spent, looked_up = self._ranking.cut(candidates, prefill, most), 0.0
        if spent is not None:
            self._floor = ROOM * spent.threshold
        lengths = spent.lengths if spent is not None else [0] * len(known)
        for request, candidate, length in zip(known, candidates, lengths, strict=True):
            drafted, request.candidate, request.verified, request.verified_length = request.candidate, None, None, 0
            request.offered = candidate
            if length and candidate is not None:
                request.verified, request.verified_length = candidate, length
                attached.tokens[request.id] = candidate.tokens[:length]
                if candidate.proposal is not None:
                    attached.proposals[request.id] = candidate.proposal.part(0, length)
                looked_up += sum(candidate.survivals[:length]) if candidate.source.drafter_id == LOOKUP else 0.0
            if drafted is not None:
                self.candidates.decided(request, drafted)
        gain = self._ranking.gain(spent) * looked_up / spent.gained if spent and looked_up else 0.0
        self.candidates.rest(self._decoding, gain)
        self._ranking.forget()
        if attached.features_needed and not self.outcomes:
            attached.asks = early_drafts(known, self.choice.k or self._longest, self._least_survival, of_all=of_all)
        return attached

    def _gain(self, looked_up: Collection[Request], prefill: int) -> float:
        """What look-ups promise to gain, if only these of the requests are looked up."""
        spent = self._ranking.cut([*self.candidates.best(looked_up), *[None] * (self._decoding - len(looked_up))], prefill)
        self._ranking.forget()
        return self._ranking.gain(spent)

    def ask(self, now: float, may_wait: bool = True) -> dict[str, list[NextItem]]:
        """What each drafter, by id, is to draft for the requests whose step has ended.  It may defer that if it `may_wait`."""
        choice, asks, self.is_deferring = self.choice, dict[str, list[NextItem]](), False
        of_all = choice.ask != Ask.PLAIN or self._probing
        if self._drafter_ids and (of_all or self.candidates.forced):
            may_wait &= now < self._blocks_by
            self.is_deferring = may_wait and any(lacks_block(each, n) for each, n in self._ended.items())
            if self.is_deferring:
                return {}
            self._asked_ahead = self.outcomes > 0
            began = self._ended if of_all else {each: n for each, n in self._ended.items() if each.ask is not None}
            self.candidates.look_up(began, self._floor, counts=self._is_telling)
            self._came = self._came or any(each.candidate is not None for each in began)
            asks = self._ask_for(began, now)
        if choice.ask == Ask.PLAIN and not self.candidates.forced:
            self.questions.stop_waiting()
        self._unlearned.update(self._ended)
        self._ended.clear()
        return asks

    def _ask_for(self, began: Mapping[Request, int], now: float) -> dict[str, list[NextItem]]:
        """Asks drafters for drafts of the requests `began`."""
        choice, of_each, early, floor = self.choice, self.outcomes, self._attached.asks, self._least_survival
        longest, asks = choice.k or self._longest, dict[str, list[NextItem]]()
        candidates = self.candidates.best(self._ended)
        # A verification ends at the latest behind what will be verified of a draft.  It is not decided before the step begins.
        spent = self._ranking.expected(candidates) if of_each or self.candidates.forced else None
        lengths = spent.lengths if spent is not None else [0] * len(candidates)
        for request, best, cut in zip(self._ended, candidates, lengths, strict=True):
            k, drafter_id = min(longest, request.longest), self.preference.drafter_of(request.pairing)
            if not k or drafter_id is None or request not in began:
                continue
            is_asked, outcomes, length = request.id in early, of_each, len(request.text)
            if request.ask is not None or is_asked:
                outcomes = (outcomes or self._few) if request.ask == Ask.AHEAD else 0
            request.outcomes, request.outcomes_at = outcomes, length
            if best is not None and request.candidate is None and best.worth < self.load.drafted.gains[k]:
                # The request's own text has a draft, but a drafter's is expected to be better.
                best = None
            request.offered = None
            if best is not None and not outcomes:
                self.questions.stop_waiting([request])
            elif not is_asked:
                verifying = best.tokens[: min(max(cut, 1), longest)] if best is not None else []
                fresh_k = min(k, choice.miss_k) if outcomes and choice.ask == Ask.AHEAD and not self._probing else k
                item = NextItem(request.id, length, k, verifying, outcomes, floor, fresh_k)
                asks.setdefault(drafter_id, []).append(item)
                if not verifying:
                    self.questions.asked(request, length, drafter_id, now, awaited=item.is_fresh)
        self.questions.expects(asks, now)
        if asks and choice.ask == Ask.AHEAD and not self.questions.down():
            self._blocks_by = now + min(bearable_s(self.load, choice, self._times), self.questions.longest_wait_s)
        return asks

    @property
    def _least_survival(self) -> float:
        """Where drafts end.  A probe asks for whole drafts: tokens that did not pay in this step may pay in the next one."""
        return 0.0 if self._probing else self._floor

    def hold(self, decoding: Iterable[Request], prefill: int, now: float) -> float | None:
        """Until when the next step should wait for drafts; call again then.  None: the step should begin."""
        if self.is_deferring:
            return max(self._blocks_by, now + 1e-4)
        deadline = self.questions.deadline()
        if deadline is None or now >= deadline:
            return None
        if self._fixed == Ask.DRAFT:
            return deadline
        known = begun(decoding)
        missing = [i for i, request in enumerate(known) if request in self.questions.pending]
        if not missing:
            return None
        at, k = partial(self.step_times.at, prefill=prefill), self.choice.miss_k or self.choice.k or self._longest
        draft_s = self._draft_times.at(len(missing), k)
        waited_s = now - min(self.questions.pending[known[i]].asked_at for i in missing)
        candidates = self.candidates.best(known)
        rows = [candidate.expected if candidate is not None else [] for candidate in candidates]
        pending = Pending(missing, k, draft_s, waited_s)
        if not waiting_pays(self._ranking.expected(candidates, prefill), rows, pending, self.load.drafted, at):
            return None
        return min(deadline, now + max(pending.left_s, draft_s / 8))

    def stepped(self, base: int, drafted: int, seconds: float | None, between_s: float) -> None:
        """Notes the time of a step over `base` tokens and `drafted` draft tokens, and the time since the one before.

        `seconds`: None for a step with prefill, which counts like one without.
        """
        if seconds is not None:
            self.step_times.observe(base + drafted, seconds, drafted)
        self._step_s = between_s + (seconds or self.step_times.at(base, drafted))

    def learn(self) -> None:
        """Learns from the last step's text."""
        self.candidates.begin_learning()
        requests, unlearned = self.candidates.requests.values(), self._unlearned
        if self._asking.is_typical:
            self._request_s += (len(unlearned) + self._passed) * self._step_s
            self._emitted += self._passed + sum(len(request.text) - n for request, n in unlearned.items())
        # Begins with another request each time: the room for indexing may not suffice for all.
        looked_up = (self.candidates.predicted if self.candidates.asleep else requests) if self.candidates.rests else ()
        of_step = list(dict.fromkeys((*unlearned, *looked_up)))
        first = self.candidates.steps // self.candidates.every % max(len(of_step), 1)
        for request in of_step[first:] + of_step[:first]:
            self.candidates.learn(request)
        if of_step:
            self.candidates.index_shared()
        self._passed, self._unlearned = 0, {}
        changed = self._load is not None and not self._load.requests / 2 < self._requests < self._load.requests * 2
        if (changed or self.candidates.steps >= self._reconsider_at) and self._drafter_ids and self.candidates.requests:
            self._reconsider_at = self.candidates.steps + RECONSIDER_EVERY
            self._reconsider()

    @property
    def load(self) -> StepLoad:
        """What drafts are expected to add to a step, as of the last choice.  Without drafters it is computed at each call."""
        load = self._load or self._new_load()
        self._load = load if self._drafter_ids else None
        return load

    @property
    def _requests(self) -> int:
        """How many are decoding and known."""
        return max(min(self._decoding, len(self.candidates.requests)), 1)

    def _new_load(self) -> StepLoad:
        n, candidates = self._requests, self.candidates
        times = self.step_times.row(n, n * self._longest + 2).tolist()
        drafted, ahead = (outlook.prospect(n, times) for outlook in (candidates.drafted, candidates.foreseen))
        return StepLoad(n, candidates.alone.prospect(n, times, candidates.every), drafted, candidates.foresight, ahead)

    def _reconsider(self) -> None:
        self._load = load = self._new_load()
        before = self._asking.choice.ask
        brought = self._emitted / self._request_s if self._request_s else 0.0
        tokens, self._emitted, self._request_s = self._emitted, 0, 0.0
        self._asking.choose(load, self._times, self._fixed, brought, tokens)
        self.changes += self._asking.choice.ask != before
