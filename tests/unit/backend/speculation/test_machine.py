"""A speculator over an unreliable link, with requests that come, are preempted and end: what holds whatever happens."""

import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.fleet import LOOKUP
from backend.speculation.candidate import Attached
from backend.speculation.chances import Rule
from backend.wire.drafting import Block, Draft, NextItem, Outcome
from backend.wire.engine import RequestOptions
from tests.support.properties import examples
from tests.support.speculator import assert_nothing_is_left
from tests.unit.backend.speculation.driven import LONGEST_WAIT_S, K, Named, all_asks

FAULTS = ("sender", "length", "token", "signs", "long", "empty")
SMALL = 4
"""Tokens of the machine's alphabet: right drafts, repetitions and outcomes that come true all happen."""

PREDICTED = [(i * i + i // 3) % SMALL for i in range(40)]
OPTIONS = [
    None,
    RequestOptions(mode="off"),
    RequestOptions(mode="sync"),
    RequestOptions(mode="ahead"),
    RequestOptions(longest=1),
    RequestOptions(prediction=PREDICTED),
    RequestOptions(mode="off", prediction=PREDICTED),
]


class SpeculatorMachine(RuleBasedStateMachine):
    """Two drafters over an unreliable link, requests that come, are preempted and end; any mode."""

    def __init__(self) -> None:
        super().__init__()
        self.dice = random.Random(7)
        self.now = 100.0
        self.texts: dict[str, list[int]] = {}
        self.written: dict[str, list[int]] = {}
        """Those of ended requests, too."""
        self.decoding: set[str] = set()
        self.made: set[tuple[str, int, tuple[int, ...]]] = set()
        """All valid drafts that came: request, length, tokens."""
        self.open: set[tuple[str, str, int]] = set()
        """Questions not answered yet: drafter, request, length."""
        self.link: list[tuple[str, NextItem]] = []
        self.options: dict[str, RequestOptions] = {}
        self.next_id = 0
        self.drafters = ["d0", "d1"]

    @initialize(mode=st.sampled_from(["sync", "ahead", "auto"]), lookups=st.booleans(), requests=st.integers(1, 4))
    def begin(self, mode: str, lookups: bool, requests: int) -> None:
        self.speculator = Named(mode, lookups, SMALL)
        self.speculator.set_drafters(dict.fromkeys(self.drafters, ""))
        for _ in range(requests):
            self.new_request(sampled=False, options=None)

    @rule(sampled=st.booleans(), options=st.sampled_from(OPTIONS))
    def new_request(self, sampled: bool, options: RequestOptions | None) -> None:
        """Its prompt has been computed, its first token is there."""
        self.next_id += 1
        name = f"r{self.next_id}"
        self.texts[name] = self.written[name] = [self.dice.randrange(SMALL) for _ in range(6)]
        self.decoding.add(name)
        self.options[name] = options or RequestOptions()
        self.speculator.begin(name, options, Rule.SHARED if sampled else Rule.GREEDY, 5)
        self.speculator.ended(name, self.texts[name], 5, self.now)
        self._ask(Attached())

    @precondition(lambda self: self.decoding)
    @rule(prefill=st.sampled_from([0, 0, 30]), right=st.booleans(), answered=st.integers(0, 4))
    def step(self, prefill: int, right: bool, answered: int) -> None:
        """`right`: the target says what was drafted; `answered`: questions, before that."""
        self.now += 1e-3
        self._answer(answered)
        present = sorted(self.decoding)
        attached = self.speculator.attach(present, prefill, self.now)
        assert attached.tokens.keys() <= self.decoding
        assert not self.speculator.questions.pending, "a step waits for nobody any more"
        for name in present:
            self._verify(name, attached.tokens.get(name, []), right)
        self.speculator.step_times.observe(len(present), 5e-3)
        self._ask(attached)
        self.speculator.learn()

    def _verify(self, name: str, draft: list[int], right: bool) -> None:
        text, candidate = self.texts[name], self.speculator.verified(name)
        length = len(text)
        if draft:
            assert candidate is not None
            assert 0 < len(draft) <= self._longest(name)
            assert draft == candidate.tokens[: len(draft)]
            if candidate.source.kind == "prediction":
                assert self.options[name].prediction
                self._is_predicted(text[5:], draft)
            elif candidate.source.kind == "shared":
                others = [each for other, each in self.written.items() if other != name]
                assert any(each[i : i + 5] == [*text[-4:], draft[0]] for each in others for i in range(len(each) - 4))
            elif candidate.source.drafter_id == LOOKUP:
                assert any(text[i : i + 3] == [*text[-2:], draft[0]] for i in range(length - 2)), "it stands there already"
            else:
                assert self._was_made(name, text, tuple(candidate.tokens)), "made for another length, or by nobody"
        accepted = len(draft) if right else self.dice.randrange(len(draft) + 1)
        rejected = draft[accepted] if accepted < len(draft) else -1
        text += [*draft[:accepted], self.dice.choice([token for token in range(SMALL) if token != rejected])]
        self.speculator.ended(name, text, length, self.now)

    def _longest(self, name: str) -> int:
        options = self.options[name]
        return 0 if options.mode == "off" else options.longest or K

    @staticmethod
    def _is_predicted(emitted: list[int], draft: list[int]) -> None:
        n, places = len(draft), range(len(PREDICTED))
        aligned = [at for at in places if PREDICTED[at : at + n] == draft]
        assert any(PREDICTED[max(at - 2, 0) : at] == emitted[-2:] for at in aligned), "it follows there what was said"

    def _was_made(self, name: str, text: list[int], tokens: tuple[int, ...]) -> bool:
        """Whether that is a draft for the text, or what is left of one whose beginning the text has said."""
        whole = ((at, (*text[at:], *tokens)) for at in range(max(len(text) - K, 0), len(text) + 1))
        return any((name, at, draft) in self.made for at, draft in whole)

    def _ask(self, attached: Attached) -> None:
        asks = all_asks(self.speculator, attached, self.now)
        if self.speculator.is_deferring:
            until = self.speculator.hold(sorted(self.decoding), 0, self.now)
            assert until is not None
            assert self.now < until <= self.now + LONGEST_WAIT_S
            self.now = until
            asks = all_asks(self.speculator, attached, self.now)
        assert not self.speculator.is_deferring, "outcomes are not waited for for ever"
        for drafter_id, items in asks.items():
            assert drafter_id in self.drafters
            assert len({item.request_id for item in items}) == len(items)
            for item in items:
                assert item.base_len == len(self.texts[item.request_id])
                options = self.options[item.request_id]
                assert 0 < item.k <= self._longest(item.request_id)
                assert not (item.outcomes and options.mode == "sync")
                if item.is_fresh:
                    self.open.add((drafter_id, item.request_id, item.base_len))
                self.link.append((drafter_id, item))

    @precondition(lambda self: self.link)
    @rule(most=st.integers(1, 4), twice=st.booleans(), fault=st.sampled_from([None, None, *FAULTS]))
    def answer(self, most: int, twice: bool, fault: str | None) -> None:
        """Some of what was asked, in any order."""
        self._answer(most, twice, fault)

    def _answer(self, most: int, twice: bool = False, fault: str | None = None) -> None:
        for _ in range(min(most, len(self.link))):
            drafter_id, item = self.link.pop(self.dice.randrange(len(self.link)))
            if fault == "sender":
                drafter_id = "d1" if drafter_id == "d0" else "d0"
            if item.is_fresh:
                draft = self._made_up(item, fault)
                for _ in range(2 if twice else 1):
                    self._draft(drafter_id, draft)
            if item.outcomes:
                self._block(drafter_id, item)

    def _made_up(self, item: NextItem, fault: str | None) -> Draft:
        dice = self.dice
        tokens = [dice.randrange(SMALL) for _ in range(K + 3 if fault == "long" else 1 + dice.randrange(item.k))]
        if fault == "token":
            tokens[-1] = dice.choice([SMALL, -1, 2**40])
        if fault == "empty":
            tokens = []
        signs = [dice.choice([8.0, 0.0, -9.0, float("nan")]) for _ in range(2 * len(tokens) - (fault == "signs"))]
        return Draft(item.request_id, item.base_len + (fault == "length"), tokens, signs)

    def _draft(self, drafter_id: str, draft: Draft) -> None:
        question = drafter_id, draft.request_id, draft.base_len
        ((verdict, waited_s),) = self.speculator.arrived(drafter_id, [draft], 1e-3, self.now)
        text = self.texts.get(draft.request_id)
        if waited_s is None:
            # Nobody asked, or so long ago that it was forgotten.
            assert verdict == "stale"
            gone = text is None or drafter_id not in self.drafters or draft.base_len < len(text)
            assert gone or question not in self.open
            return
        assert question in self.open, "nobody asked"
        self.open.discard(question)
        assert text is not None
        sound = len(draft.signs) in (0, 2 * len(draft.tokens)) and all(0 <= token < SMALL for token in draft.tokens)
        emitted = text[draft.base_len :]
        tokens = draft.tokens[:K]
        assert (verdict == "invalid") != sound
        if not emitted:
            assert verdict in ("ready", "invalid")
        elif verdict == "ready":
            assert tokens[: len(emitted)] == emitted, "what is left of it goes on"
            assert len(tokens) > len(emitted)
        if verdict == "ready" and tokens:
            self.made.add((draft.request_id, len(text), tuple(tokens[len(emitted) :])))

    def _block(self, drafter_id: str, item: NextItem) -> None:
        verifying = item.verifying or [self.dice.randrange(SMALL) for _ in range(2)]
        outcomes = []
        for accepted in range(len(verifying) + 1):
            for token in {*range(SMALL)} - {*verifying[accepted : accepted + 1]}:
                tokens = [self.dice.randrange(SMALL) for _ in range(item.k)]
                outcomes.append(Outcome(accepted, token, tokens, [8.0] * (2 * item.k)))
                self.made.add((item.request_id, item.base_len + accepted + 1, tuple(tokens)))
        self.speculator.take_blocks(drafter_id, [Block(item.request_id, item.base_len, verifying, outcomes)], 1e-3, self.now)

    @precondition(lambda self: self.link)
    @rule()
    def lose(self) -> None:
        self.link.pop()

    @rule(seconds=st.sampled_from([0.0, 0.002, 0.2]))
    def hold(self, seconds: float) -> None:
        until = self.speculator.hold(sorted(self.decoding), 0, self.now)
        deadline = self.speculator.questions.deadline()
        if until is not None:
            assert deadline is not None, "nothing is out"
            assert self.now < until <= deadline
        self.now += seconds

    @precondition(lambda self: self.decoding)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.decoding)))
        self.speculator.release(name)
        self.decoding.discard(name)
        self.open = {question for question in self.open if question[1] != name}

    @precondition(lambda self: self.texts.keys() - self.decoding)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """Its text is computed anew, which brings a token."""
        name = data.draw(st.sampled_from(sorted(self.texts.keys() - self.decoding)))
        self.decoding.add(name)
        self._verify(name, [], right=True)
        self._ask(Attached())

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.texts)))
        del self.texts[name]
        self.decoding.discard(name)
        self.speculator.finish(name)
        self.open = {question for question in self.open if question[1] != name}

    @rule(drafters=st.sampled_from([["d0", "d1"], ["d1"], []]))
    def reassign(self, drafters: list[str]) -> None:
        for gone in set(self.drafters) - set(drafters):
            self._forget_pending(gone)
        self.drafters = drafters
        self.speculator.set_drafters(dict.fromkeys(drafters, ""))

    @precondition(lambda self: "d1" in self.drafters)
    @rule()
    def restart(self) -> None:
        self._forget_pending("d1")
        self.speculator.questions.reset_drafter("d1")

    def _forget_pending(self, drafter_id: str) -> None:
        for request, question in self.speculator.questions.pending.items():
            if question.drafter_id == drafter_id:
                self.open.discard((drafter_id, request.id, question.base_len))

    @invariant()
    def only_for_the_present_length(self) -> None:
        for name, request in self.speculator.candidates.requests.items():
            assert request.text is self.texts[name]
        for request, question in self.speculator.questions.pending.items():
            assert question.base_len == len(self.texts[request.id])
            assert question.drafter_id in self.drafters

    def teardown(self) -> None:
        for name in list(self.texts):
            self.speculator.finish(name)
        assert_nothing_is_left(self.speculator.whole)


TestSpeculator = SpeculatorMachine.TestCase
TestSpeculator.settings = examples(80, stateful_step_count=40)
