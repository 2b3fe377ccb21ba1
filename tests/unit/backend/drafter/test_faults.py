"""The verifier's drafting and the real drafter service over a network that loses and delays messages.

Virtual time, one process: vLLM's scheduler, our scheduler, engine loop and feature shipper on one side, the service with a tiny
EAGLE head on the other.  Whatever the network does, every request gets the target's tokens within its deadlines, and when the
network is well again drafts are accepted as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from backend.drafter.service import DrafterService
from backend.fleet import DrafterRef
from backend.wire.drafting import Hello, decode_to_drafter
from tests.support.ahead_verifier import HEAD
from tests.support.drafter_heads import make_proposer
from tests.support.properties import examples
from tests.support.speculator import assert_nothing_is_left
from tests.unit.backend.drafter.simulated_link import Faults, SimulatedDrafter, World
from tests.unit.backend.drafter.simulated_verifier import SimulatedVerifier, Text, simulated, write_text

MODES = ("sync", "ahead", "auto")
REQUESTS = 6
LONGEST_WAIT_S = 0.1
STEP_S = 0.02


class Fleet:
    """One simulated verifier and its drafters `d0`, `d1`, ..."""

    def __init__(
        self, directory: Path, seed: int, mode: str, drafters: int = 1, lookup: bool = True, blocks: int = 200
    ) -> None:
        self.mode, self.world = mode, World(seed)
        self.drafters = [self._drafter(directory / f"{mode}{i}", i) for i in range(drafters)]
        self.verifier = SimulatedVerifier(self.world, mode, blocks, lookup)

    def _drafter(self, directory: Path, number: int) -> SimulatedDrafter:
        def make() -> DrafterService:
            proposer = make_proposer(directory, HEAD, cache_tokens=4096)
            return DrafterService(f"d{number}", proposer, 5.0, self.world.monotonic)

        return SimulatedDrafter(self.world, f"sim://d{number}", make, 0.0004)

    def assign(self, *numbers: int, generation: int = 1) -> None:
        self.verifier.links.set_drafters([DrafterRef(f"d{i}", "one", f"sim://d{i}", "", generation) for i in numbers])

    def happen(self, what: str, generation: int) -> None:
        """What may befall the drafters, and their assignment."""
        if what == "restart":
            self.drafters[0].restart()
        elif what == "hang":
            self.drafters[0].hang(0.3)
        else:
            wanted = {"second": (0, 1), "alone": (1,), "none": ()}[what]
            self.verifier.loop._orders.put(lambda: self.assign(*wanted, generation=generation))

    def rate(self, texts: dict[str, Text], must_draft: bool = True) -> float:
        """Share of drafts made from the target's features whose first token is right, while these are answered.

        vLLM's own prefix cache is emptied first: for what it skips there are no features, and a new drafter would miss them.
        """
        assert self.verifier.core.scheduler.reset_prefix_cache()
        before = self.verifier.drafted
        self.verifier.generate(texts)
        assert self.verifier.drafted > before or not must_draft, "no remote draft was verified"
        fresh = [draft for drafter in self.drafters for draft in drafter.fresh if draft.tokens and draft.request_id in texts]
        right = [draft.tokens[0] == texts[draft.request_id].tokens[draft.base_len] for draft in fresh]
        return sum(right) / max(len(right), 1)

    def assert_recovers(self, texts: list[Text], usual: dict[str, float]) -> None:
        """Drafts are soon as good as ever.

        `sync` asks and waits at any rate.  The others may hold for some hundred steps that drafting, or waiting, does not pay.
        """
        is_sync = self.mode == "sync"
        rates = (self.rate(named(texts, f"after{turn}-"), must_draft=is_sync) for turn in range(1 if is_sync else 10))
        assert any(rate >= 0.95 * usual[self.mode] for rate in rates)

    def assert_idle(self) -> None:
        """When all is answered and the time to live is over, drafters hold no request and only their own room."""
        self.world.advance(self.world.now + 6.0)
        for drafter in self.drafters:
            drafter.service.sweep()
            stats = drafter.service.stats()
            assert stats.sequences == 0
            assert 0 <= stats.cache_usage <= 1
            assert not drafter.service._nexts._held
        assert_nothing_is_left(self.verifier.core.scheduler.speculator)


@contextmanager
def fleet(directory: Path, seed: int, mode: str, **options: Any) -> Iterator[Fleet]:
    made = Fleet(directory, seed, mode, **options)
    with simulated(made.world):
        yield made


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def texts(directory: Path) -> list[Text]:
    proposer = make_proposer(directory / "author", HEAD, cache_tokens=8192)
    return [write_text(proposer, seed, prompt=9 + 23 * (seed % 3), length=80 + 7 * seed) for seed in range(REQUESTS)]


def named(texts: list[Text], prefix: str) -> dict[str, Text]:
    return {f"{prefix}{i}": text for i, text in enumerate(texts)}


@pytest.fixture(scope="module")
def usual(directory: Path, texts: list[Text]) -> dict[str, float]:
    """`Fleet.rate` by mode when nothing goes wrong.

    Four in five tokens of these texts are what the head drafts from a true context, hardly one from a spoilt one.
    """
    found = {}
    for mode in MODES:
        with fleet(directory, 0, mode) as calm:
            calm.assign(0)
            found[mode] = calm.rate(named(texts, "r"))
            assert calm.verifier.longest_silence_s < 10 * STEP_S
            assert 0.7 < found[mode] < 0.9
    return found


faults = st.builds(Faults, drop=st.sampled_from([0.0, 0.05, 0.3]), delay_s=st.sampled_from([0.0, 0.004, 0.05, 0.4]))
events = st.lists(st.tuples(st.floats(0.01, 0.6), st.sampled_from(["restart", "hang", "second", "alone", "none"])), max_size=3)


@pytest.mark.parametrize("mode", MODES)
@examples(4, phases=[Phase.explicit, Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), bad=faults, events=events)
def test_faults_cost_speed_only(
    directory: Path,
    texts: list[Text],
    usual: dict[str, float],
    mode: str,
    seed: int,
    bad: Faults,
    events: list[tuple[float, str]],
) -> None:
    with fleet(directory, seed, mode, drafters=2) as storm:
        storm.world.faults = bad
        storm.assign(0)
        for generation, (after, what) in enumerate(events, 2):
            storm.world.at(storm.world.now + after, partial(storm.happen, what, generation))
        storm.verifier.generate(named(texts, "storm"))
        assert storm.verifier.longest_silence_s < 4 * LONGEST_WAIT_S + 10 * STEP_S
        storm.world.faults = Faults()
        storm.world.advance(storm.world.now + 1.0)
        storm.verifier.loop._receive()
        storm.assign(0, generation=99)
        storm.assert_recovers(texts, usual)
        storm.assert_idle()


@pytest.mark.parametrize("mode", MODES)
def test_a_drafter_that_forgot_everything_is_greeted_again(
    directory: Path, texts: list[Text], usual: dict[str, float], mode: str
) -> None:
    """It restarts in place: same address, same incarnation for the coordinator.  Nothing is assigned anew."""
    with fleet(directory, 1, mode, lookup=False) as place:
        place.assign(0)
        place.verifier.generate(named(texts, "before"))
        place.drafters[0].restart()
        sockets = set(place.world.dealers)
        place.world.at(place.world.now + 0.2, place.drafters[0].restart)
        place.verifier.generate(named(texts, "during"))
        place.assert_recovers(texts, usual)
        assert set(place.world.dealers) == sockets, "the same sockets"
        assert place.drafters[0].service.stats().verifiers == ["v"]


def test_an_exchange_of_the_head_loses_no_draft(directory: Path, texts: list[Text]) -> None:
    """All questions come with rounds: the socket for drafts has nothing to send that could be refused."""
    with fleet(directory, 4, "sync", lookup=False) as swapped:
        swapped.assign(0)
        (drafter,), world = swapped.drafters, swapped.world
        # Each socket may greet again.
        world.advance(world.now + 1.0)
        other = make_proposer(directory / "other", HEAD, cache_tokens=4096)
        world.at(world.now + 0.2, lambda: drafter.exchange(other))
        swapped.verifier.generate(named(texts, "r"))
        assert drafter.service.proposer is other
        assert "lost" not in swapped.verifier.stats.drafters["d0"].dropped


def test_greeting_again_is_no_storm(directory: Path, texts: list[Text]) -> None:
    with fleet(directory, 2, "sync") as deaf:
        deaf.assign(0)
        (drafter,), world, began = deaf.drafters, deaf.world, deaf.world.now

        def forget() -> None:
            drafter.restart()
            if world.now < began + 5:
                world.at(world.now + 0.01, forget)

        forget()
        with mock.patch.object(drafter, "take", side_effect=drafter.take) as take:
            deaf.verifier.generate(named(texts, "r"))
        messages = [decode_to_drafter(call.args[1][0]) for call in take.call_args_list]
        for role in ("features", "drafts"):
            greetings = [each for each in messages if isinstance(each, Hello) and each.role == role]
            assert 1 <= len(greetings) <= 2 + (world.now - began) / 0.5


def test_requests_whose_opening_was_lost_are_opened_again(directory: Path, texts: list[Text]) -> None:
    with fleet(directory, 3, "sync", lookup=False) as lossy:
        lossy.assign(0)
        lossy.world.advance(lossy.world.now + 0.01)
        lossy.world.faults = Faults(drop=1.0)
        lossy.world.at(lossy.world.now + 0.05, lambda: setattr(lossy.world, "faults", Faults()))
        lossy.verifier.generate(named(texts, "r"))
        drafted = {draft.request_id for draft in lossy.drafters[0].fresh if draft.tokens}
        assert drafted == named(texts, "r").keys(), "all were drafted for once the network was well"


def test_a_prompt_without_room_in_the_cache_is_not_expected_in_the_next_step(directory: Path, texts: list[Text]) -> None:
    with fleet(directory, 6, "auto", blocks=4) as tight:
        core, long = tight.verifier.core, texts[2].prompt
        speculator = core.scheduler.speculator
        with mock.patch.object(speculator, "attach", side_effect=speculator.attach) as attach:
            core.add("first", texts[2])
            core.step_fn()
            core.add("second", texts[5])
            core.step_fn()
            core.step_fn()
            core.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
            core.step_fn()
        assert [call.args[1] for call in attach.call_args_list] == [long, long, 0, long], "at last there is room again"


def test_drafts_fit_beside_chunks_of_prompts_that_have_room_before_them(directory: Path, texts: list[Text]) -> None:
    """Else vLLM would cut the last request's draft, the more, the longer the first one's is."""
    author = make_proposer(directory / "author", HEAD, cache_tokens=8192)
    with fleet(directory, 7, "auto") as mixed:
        core = mixed.verifier.core
        scheduler, speculator = core.scheduler, core.scheduler.speculator
        with (
            mock.patch.object(scheduler.scheduler_config, "long_prefill_token_threshold", 45),
            mock.patch.object(speculator, "attach", side_effect=speculator.attach) as attach,
        ):
            core.add("first", texts[0])
            core.step_fn()
            for name in ("long", "longer"):
                core.add(name, write_text(author, len(name), prompt=200, length=210))
            core.add("last", texts[0])
            for _ in range(3):
                core.step_fn()
        assert [call.kwargs["limits"] for call in attach.call_args_list] == [None, None, None, {"first": 2, "last": 2}]
