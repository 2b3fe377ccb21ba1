import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import gateway.page
from backend.fleet import IDLE_CAUSES, Learning, VerifierStats
from gateway.fleet_history import WINDOW_S, FleetHistory, Observation
from gateway.fleet_log import KEPT, SHOWN, FleetLog
from gateway.fleet_view import FleetView
from tests.support.fleet_story import Story, member


class Watched:
    """A story under a clock, and the history that watches it."""

    def __init__(self, verifiers: int = 2, drafters: int = 3) -> None:
        self.story = Story(verifiers, drafters)
        self.history = FleetHistory()
        self.now = 100.0
        self.story.tell()
        self.look()

    def look(self, **changes) -> FleetView:
        story = self.story
        seen = Observation(
            self.now,
            1e9 + self.now,
            story.snapshot,
            own={stats.verifier_id: stats for stats in story.stats()},
            connected=frozenset(link.member.id for link in story.ready_links),
            in_flight=7,
            moves=dict(story.metrics.moves),
        )
        self.history.observe(replace(seen, **changes))
        return self.history.view()

    def run(self, seconds: int) -> FleetView:
        for _ in range(seconds):
            self.now += 1
            self.story.advance(1.0)
            self.look()
        return self.history.view()


@pytest.fixture
def watched() -> Watched:
    return Watched()


def verifier(view: FleetView, name: str = "verifier-0"):
    return next(row for row in view.verifiers if row.id == name)


def test_one_look_says_nothing_about_rates(watched):
    view = watched.look()
    assert verifier(view).tokens_per_s == 0
    assert (verifier(view).tgs, verifier(view).acceptance_length, verifier(view).busy) == (None, None, None)
    assert view.totals.acceptance_length is None
    assert view.drafters[0].busy is None


def test_rates_are_differences_of_counters(watched):
    view = watched.run(3)
    # 3 sequences, 50 steps a second; two drafters, one with 2 and one with 1 accepted token per draft, 75 drafts a second each.
    row = verifier(view)
    assert row.running == 3
    assert row.tokens_per_s == pytest.approx(50 * 3 + 75 * 3, abs=0.1)
    assert row.acceptance_length == 2.5
    assert row.busy == pytest.approx(0.7)
    assert row.idle["awaiting_draft"] == pytest.approx(0.2)
    assert row.busy + sum(row.idle.values()) == pytest.approx(1)
    assert view.drafters[0].busy == pytest.approx(0.4)
    pair = next(each for each in view.pairs if each.drafter == "drafter-0")
    assert (pair.verifier, pair.bound, pair.down) == ("verifier-0", True, False)
    assert pair.drafts_per_s == pytest.approx(75, abs=0.1)
    assert pair.round_trip_ms == pytest.approx(8)


def test_tgs_is_tokens_over_sequence_seconds(watched):
    view = watched.run(5)
    # The very first look saw nothing running.
    assert verifier(view).tgs == pytest.approx((225 + 150) / 3 * 5 / 4.5, rel=0.01)
    assert verifier(watched.run(15)).tgs == pytest.approx((225 + 150) / 3, rel=0.01)


def test_the_window_forgets(watched):
    watched.run(5)
    watched.story.load["verifier-0"] = 0
    watched.story.load["verifier-1"] = 0
    view = watched.run(int(WINDOW_S) + 1)
    assert verifier(view).tokens_per_s == 0
    assert (verifier(view).tgs, view.totals.tgs, view.totals.acceptance_length) == (None, None, None)
    assert verifier(view).idle["no_work"] == pytest.approx(1)
    assert max(len(each._reports) for each in watched.history._verifiers.values()) <= WINDOW_S + 2


def test_totals_are_ratios_of_sums():
    watched = Watched(verifiers=2, drafters=1)
    view = watched.run(4)
    # verifier-1 has no drafter: it counts in no acceptance length, and its time as much as the other's.
    assert view.totals.acceptance_length == 3.0
    assert view.totals.running == sum(watched.story.load.values())
    assert view.totals.in_flight == 7
    assert view.totals.tokens_per_s == pytest.approx(sum(row.tokens_per_s or 0.0 for row in view.verifiers), abs=0.1)
    # Of the sequence-seconds of the window, the first half second with none of them running.
    busy_s = 3.5 * view.totals.running
    assert view.totals.tgs == pytest.approx(4 * view.totals.tokens_per_s / busy_s, abs=0.1)
    assert view.totals.busy is not None
    assert view.totals.busy + sum(view.totals.idle.values()) == pytest.approx(1)
    assert view.totals.members == {"verifier": {"ready": 2}, "drafter": {"ready": 1}}


def test_a_restarted_verifier_begins_anew(watched):
    watched.run(15)
    watched.story.verifiers["verifier-0"] = VerifierStats("verifier-0", 2000.0, "auto", 4)
    watched.story.tell()
    watched.now += 1
    assert verifier(watched.look()).tokens_per_s == 0
    assert verifier(watched.run(2)).tokens_per_s == pytest.approx(225 + 150, abs=0.1)


def test_counters_that_step_back_never_show_negative_rates(watched):
    watched.run(3)
    older = watched.story.snapshot
    watched.run(1)
    watched.now += 1
    # The link went, and the directory's counters are a little older than the link's were.
    view = watched.look(own={}, snapshot=older)
    assert verifier(view).tokens_per_s >= 0
    assert all(pair.drafts_per_s >= 0 for pair in view.pairs)


def test_a_lost_verifier_keeps_its_row_and_nothing_else(watched):
    watched.run(3)
    watched.story.members["verifier-0"] = member("verifier-0", "verifier", "lost")
    watched.story.tell()
    view = watched.look()
    row = verifier(view)
    assert (row.state, row.connected, row.running, row.tokens_per_s) == ("lost", False, 0, None)
    assert view.totals.running == watched.story.load["verifier-1"]


def test_a_drafter_that_is_not_waited_for(watched):
    watched.run(2)
    watched.story.verifiers["verifier-0"].drafters_down = ["drafter-0"]
    down = [pair.drafter for pair in watched.run(1).pairs if pair.down]
    assert down == ["drafter-0"]


def test_a_former_pair_shows_while_its_drafts_are_in_the_window(watched):
    watched.run(3)
    watched.story.bound["drafter-0"] = "verifier-1"
    view = watched.run(1)
    bound = {(pair.verifier, pair.drafter): pair.bound for pair in view.pairs}
    assert bound["verifier-0", "drafter-0"] is False
    assert bound["verifier-1", "drafter-0"] is True
    view = watched.run(int(WINDOW_S) + 1)
    assert ("verifier-0", "drafter-0") not in {(pair.verifier, pair.drafter) for pair in view.pairs}


def test_a_gateway_that_has_heard_of_no_fleet():
    history = FleetHistory()
    history.observe(Observation(1.0, 1e9, None))
    view = history.view()
    assert (view.verifiers, view.drafters, view.pairs, view.snapshot_age_s) == ([], [], [], None)
    assert msgspec.json.decode(msgspec.json.encode(view), type=FleetView) == view


def told(watched: Watched) -> list[tuple[str, str]]:
    watched.story.tell()
    return [(entry.kind, entry.text) for entry in watched.look().log]


def test_the_log_tells_what_changed_and_nothing_at_the_start(watched):
    assert told(watched) == []
    watched.story.bound["drafter-1"] = "verifier-0"
    assert told(watched) == [("moved", "drafter-1 moved from verifier-1 to verifier-0")]
    watched.story.members["verifier-1"] = member("verifier-1", "verifier", "draining")
    assert told(watched)[0] == ("draining", "verifier-1 takes no new work")
    watched.story.members["drafter-2"] = member("drafter-2", "drafter", "lost")
    del watched.story.bound["drafter-2"]
    assert told(watched)[:2] == [
        ("released", "drafter-2 no longer serves verifier-0"),
        ("lost", "drafter-2 has not reported in time"),
    ]
    watched.story.members["drafter-2"] = member("drafter-2", "drafter", "ready", incarnation="second")
    watched.story.bound["drafter-2"] = "verifier-0"
    assert told(watched)[:2] == [
        ("assigned", "drafter-2 serves verifier-0"),
        ("restarted", "drafter-2 is another process now, ready"),
    ]
    watched.story.members["verifier-9"] = member("verifier-9", "verifier", "starting")
    assert told(watched)[0] == ("joined", "verifier-9 joined, starting")
    watched.story.members["verifier-9"] = member("verifier-9", "verifier", "ready")
    assert told(watched)[0] == ("ready", "verifier-9 is ready")
    del watched.story.members["verifier-9"]
    assert told(watched)[0] == ("left", "verifier-9 left the fleet")


def test_a_learned_head_shows_how_right_it_is_and_the_log_how_right_the_one_before_was(watched):
    def learned(**fields) -> None:
        watched.story.drafters["drafter-0"] = msgspec.structs.replace(
            watched.story.drafters["drafter-0"], learning=Learning(**fields)
        )

    learned(version=1, live_acceptance=0.5)
    assert told(watched) == []
    learned(version=2, live_acceptance=None, previous_version=1, previous_acceptance=0.48)
    assert told(watched) == [("head", "drafter-0 drafts with version 2; of version 1, 50% of drafts began right")]
    row = watched.look().drafters[0]
    assert (row.version, row.live_acceptance, row.previous_version, row.previous_acceptance) == (2, None, 1, 0.48)
    learned(version=1)
    assert told(watched)[0] == ("head", "drafter-0 drafts with version 1")


def test_the_log_tells_plans_apart_from_the_rest(watched):
    stats = watched.story.verifiers["verifier-0"]
    watched.story.verifiers["verifier-0"] = msgspec.structs.replace(stats, plan_k=0, plan_outcomes=0, plan_changes=2)
    view = watched.run(1)
    assert [entry.text for entry in view.plans] == ["verifier-0: K 4, 8 outcomes ahead → drafters not asked (2 changes)"]
    stats = watched.story.verifiers["verifier-0"]
    watched.story.verifiers["verifier-0"] = msgspec.structs.replace(stats, plan_k=2, plan_outcomes=8, plan_changes=3)
    assert watched.run(1).plans[0].text == "verifier-0: drafters not asked → K 2, 8 outcomes ahead"
    stats = watched.story.verifiers["verifier-0"]
    watched.story.verifiers["verifier-0"] = msgspec.structs.replace(stats, plan_changes=5)
    assert watched.run(1).plans[0].text == "verifier-0: K 2, 8 outcomes ahead again, after 2 changes"
    assert watched.run(1).log == []


def test_the_log_tells_where_sequences_went(watched):
    moves = watched.story.metrics.moves
    moves["failover", "disconnected", "verifier-1"] += 3
    moves["migration", "load", "verifier-0"] += 1
    assert told(watched) == [
        ("migration", "1 sequence moved to verifier-0 on purpose (load)"),
        ("failover", "3 sequences moved to verifier-1 after a loss (disconnected)"),
    ]
    moves["failover", "disconnected", "verifier-1"] += 1
    assert told(watched)[0] == ("failover", "1 sequence moved to verifier-1 after a loss (disconnected)")
    assert watched.look().moved == {"failover": 4, "migration": 1}
    assert len(watched.look().log) == 3


def test_the_log_is_bounded():
    log, story = FleetLog(), Story(1, 1)
    for number in range(3 * KEPT):
        story.members["drafter-0"] = member("drafter-0", "drafter", incarnation=str(number))
        story.tell()
        log.observe(float(number), story.snapshot, {}, {})
    assert len(log._entries) == KEPT
    assert len(log.latest()) == SHOWN
    assert log.latest()[0].at == 3 * KEPT - 1


def test_the_page_draws_every_part_of_a_verifiers_time_and_no_other():
    script = (Path(gateway.page.__file__).parent / "dom.js").read_text()
    times = script.partition("export const TIMES = [")[2].partition("];")[0]
    assert set(re.findall(r'\["(\w+)"', times)) == {"busy", *IDLE_CAUSES}
