"""The page's figures and logs (`history.js`), computed by Node from a story's answers of `/fleet`."""

import json
import shutil
import subprocess
from typing import Any, cast

import msgspec
import pytest

from backend.fleet import IDLE_CAUSES, Learning, VerifierStats
from gateway.fleet.core import FleetCore
from gateway.metrics.fleet import fleet_document
from gateway.routes.page import FOLDER
from tests.support.fleet_story import Story, member

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no Node on this machine")
SCRIPT = """
import { readFileSync } from "node:fs";
import { History } from "./history.mjs";
const history = new History();
const views = JSON.parse(readFileSync(0, "utf8")).map((each) => history.add(each));
console.log(JSON.stringify(views));
"""


class Watched:
    """A story under a clock, and the answers that a page has got.  `view()` is what the page shows of the last one."""

    def __init__(self, folder, verifiers: int = 2, drafters: int = 3) -> None:
        self.story = Story(verifiers, drafters)
        self.now = 100.0
        self.answers: list[dict[str, Any]] = []
        self.gateway = "gateway-0"
        self._folder = folder
        self.look()

    def look(self) -> None:
        self.story.tell()
        moves = self.story.metrics.moves.items()
        moved = [{"kind": kind, "cause": cause, "verifier": to, "sequences": count} for (kind, cause, to), count in moves]
        head = {"at": self.now, "gateway": self.gateway, "answered_s": 0.1, "moved": moved}
        self.answers.append(head | fleet_document(cast(FleetCore, self.story)))

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.story.advance(1.0)
            self.look()

    def view(self) -> dict[str, Any]:
        assert NODE is not None
        (self._folder / "history.mjs").write_text((FOLDER / "history.js").read_text())
        (self._folder / "views.mjs").write_text(SCRIPT)
        command = [NODE, str(self._folder / "views.mjs")]
        done = subprocess.run(command, input=json.dumps(self.answers), capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout)[-1])

    def log_lines(self) -> list[tuple[str, str]]:
        return [(entry["kind"], entry["text"]) for entry in self.view()["log"]]


@pytest.fixture
def watched(tmp_path) -> Watched:
    return Watched(tmp_path)


def verifier(view: dict[str, Any]) -> dict[str, Any]:
    """The row of the first one."""
    return next(row for row in view["verifiers"] if row["id"] == "verifier-0")


def by_pair(view: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["verifier"], each["drafter"]): each for each in view["pairs"]}


def test_rates_are_differences_of_counters_which_one_answer_does_not_tell(watched):
    view = watched.view()
    row = verifier(view)
    assert (row["tokens_per_s"], row["tgs"], row["acceptance_length"], row["busy"]) == (0, None, None, None)
    assert view["totals"]["acceptance_length"] is view["drafters"][0]["busy"] is None
    watched.run(3)
    view = watched.view()
    # 3 sequences, 50 steps a second; two drafters, one with 2 and one with 1 accepted token per draft, 75 drafts a second each.
    row = verifier(view)
    assert (row["running"], row["acceptance_length"]) == (3, 2.5)
    assert row["tokens_per_s"] == pytest.approx(50 * 3 + 75 * 3, abs=0.1)
    # The very first answer said that nothing was running.
    assert row["tgs"] == pytest.approx((225 + 150) / 3 * 3 / 2.5)
    assert (row["busy"], row["idle"]["awaiting_draft"]) == pytest.approx((0.7, 0.2))
    assert row["busy"] + sum(row["idle"].values()) == pytest.approx(1)
    assert view["drafters"][0]["busy"] == pytest.approx(0.4)
    pair = by_pair(view)["verifier-0", "drafter-0"]
    assert (pair["drafts_per_s"], pair["round_trip_ms"]) == pytest.approx((75, 8), abs=0.1)


def test_totals_are_ratios_of_sums_and_a_lost_verifier_keeps_its_row_and_nothing_else(tmp_path):
    watched = Watched(tmp_path, verifiers=2, drafters=1)
    watched.run(4)
    view = watched.view()
    totals = view["totals"]
    # verifier-1 has no drafter: it counts in no acceptance length, and its time as much as the other's.
    assert (totals["acceptance_length"], totals["running"]) == (3.0, sum(watched.story.load.values()))
    assert totals["tokens_per_s"] == pytest.approx(sum(row["tokens_per_s"] for row in view["verifiers"]))
    assert totals["tgs"] == pytest.approx(4 * totals["tokens_per_s"] / (3.5 * totals["running"]))
    assert totals["busy"] + sum(totals["idle"].values()) == pytest.approx(1)
    watched.story.members["verifier-0"] = member("verifier-0", "verifier", "lost")
    watched.look()
    view = watched.view()
    row = verifier(view)
    assert (row["state"], row["connected"], row["running"], row["tokens_per_s"]) == ("lost", False, 0, None)
    assert view["totals"]["running"] == watched.story.load["verifier-1"]


def test_a_drafters_round_trip_is_the_mean_over_its_rounds_and_a_verifiers_time_is_drawn_whole(tmp_path):
    assert NODE is not None
    for name in ("dom.js", "tables.js"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "means.js").write_text(
        """import { TIMES } from "./dom.js";
        import { overPairs } from "./tables.js";
        const pair = { acceptance_length: null, drafts_per_s: 0, round_trip_ms: null, rounds_per_s: 0, dropped_per_s: 0 };
        const busy = { ...pair, round_trip_ms: 4, rounds_per_s: 3 };
        const dropping = { ...pair, round_trip_ms: 8, rounds_per_s: 1 };
        const lookups = { ...pair, acceptance_length: 2, drafts_per_s: 9 };
        const means = [[busy, dropping, lookups], [lookups]].map((each) => overPairs(each).round_trip);
        console.log(JSON.stringify([means, TIMES.map((each) => each[0])]));"""
    )
    done = subprocess.run([NODE, str(tmp_path / "means.js")], capture_output=True, text=True, check=True)
    means, times = json.loads(done.stdout)
    assert (means, set(times)) == ([5, None], {"busy", *IDLE_CAUSES})


def test_a_restarted_verifier_begins_anew_and_no_rate_is_negative(watched):
    watched.run(5)
    older = watched.answers[-2]
    watched.story.members["verifier-0"] = member("verifier-0", "verifier", incarnation="second")
    watched.story.verifiers["verifier-0"] = VerifierStats("verifier-0", 2000.0, "auto", 4)
    watched.look()
    assert verifier(watched.view())["tokens_per_s"] == 0
    watched.run(2)
    assert verifier(watched.view())["tokens_per_s"] == pytest.approx(225 + 150, abs=0.1)
    # The gateway lost a verifier's connection, and the coordinator's counters are a little older.
    watched.answers = [*watched.answers[:5], older | {"at": watched.now}]
    view = watched.view()
    assert verifier(view)["tokens_per_s"] >= 0
    assert all(pair["drafts_per_s"] >= 0 for pair in view["pairs"])


def test_pairs_show_drafters_not_waited_for_and_former_ones_while_their_drafts_are_in_the_window(watched):
    watched.run(3)
    watched.story.verifiers["verifier-0"].drafters_down = ["drafter-2"]
    watched.story.bound["drafter-0"] = "verifier-1"
    watched.run(1)
    shown = {pair: (each["bound"], each["down"]) for pair, each in by_pair(watched.view()).items()}
    assert shown["verifier-0", "drafter-2"] == (True, True)
    assert shown["verifier-0", "drafter-0"] == (False, False)
    assert shown["verifier-1", "drafter-0"] == (True, False)
    watched.run(11)
    assert ("verifier-0", "drafter-0") not in by_pair(watched.view())


def test_the_log_tells_what_changed_and_nothing_at_the_start_or_where_nothing_was_heard_of_a_fleet(watched):
    nothing = {"at": 99.0, "gateway": "gateway-0", "answered_s": None, "moved": []}
    watched.story.snapshot = None
    watched.answers = [nothing | fleet_document(cast(FleetCore, watched.story))]
    view = watched.view()
    assert (view["verifiers"], view["drafters"], view["pairs"], view["answered_s"]) == ([], [], [], None)
    watched.look()
    assert watched.log_lines() == []
    members, bound, drafters = watched.story.members, watched.story.bound, watched.story.drafters
    told: list[tuple[str, str]] = []

    def tells(*lines: tuple[str, str]) -> None:
        watched.look()
        told.extend(lines)

    bound["drafter-1"] = "verifier-0"
    members["verifier-1"] = member("verifier-1", "verifier", "draining")
    tells(("draining", "verifier-1 takes no new work"), ("moved", "drafter-1 moved from verifier-1 to verifier-0"))
    members["drafter-2"] = member("drafter-2", "drafter", "lost")
    del bound["drafter-2"]
    tells(("lost", "drafter-2 has not reported in time"), ("released", "drafter-2 no longer serves verifier-0"))
    members["drafter-2"] = member("drafter-2", "drafter", "ready", incarnation="second")
    bound["drafter-2"] = "verifier-0"
    tells(("restarted", "drafter-2 is another process now, ready"), ("assigned", "drafter-2 serves verifier-0"))
    members["verifier-9"] = member("verifier-9", "verifier", "starting")
    tells(("joined", "verifier-9 joined, starting"))
    members["verifier-9"] = member("verifier-9", "verifier", "ready")
    tells(("ready", "verifier-9 is ready"))
    del members["verifier-9"]
    tells(("left", "verifier-9 left the fleet"))
    for learning, *lines in (
        (Learning(version=1, live_acceptance=0.5),),
        (Learning(version=2, live_acceptance=None, previous_version=1, previous_acceptance=0.48),
         ("head", "drafter-0 drafts with version 2; of version 1, 50% of drafts began right")),
        (Learning(version=1), ("head", "drafter-0 drafts with version 1")),
    ):  # fmt: skip
        drafters["drafter-0"] = msgspec.structs.replace(drafters["drafter-0"], learning=learning)
        tells(*lines)
    assert watched.log_lines()[::-1] == told


def test_the_log_tells_plans_apart_from_the_rest(watched):
    verifiers = watched.story.verifiers
    for k, outcomes, count in ((0, 0, 2), (2, 8, 3), (2, 8, 5)):
        plan = {"plan_k": k, "plan_outcomes": outcomes, "plan_changes": count}
        verifiers["verifier-0"] = msgspec.structs.replace(verifiers["verifier-0"], **plan)
        watched.run(1)
    view = watched.view()
    assert [entry["text"] for entry in view["plans"]] == [
        "verifier-0: K 2, 8 outcomes ahead again, after 2 changes",
        "verifier-0: drafters not asked → K 2, 8 outcomes ahead",
        "verifier-0: K 4, 8 outcomes ahead → drafters not asked (2 changes)",
    ]
    assert view["log"] == []


def test_the_log_tells_where_sequences_went_by_one_gateways_count(watched):
    moves = watched.story.metrics.moves
    moves["failover", "disconnected", "verifier-1"] += 3
    moves["migration", "load_gap", "verifier-0"] += 1
    watched.look()
    assert watched.log_lines()[::-1] == [
        ("failover", "3 sequences moved to verifier-1 after a loss (disconnected)"),
        ("migration", "1 sequence moved to verifier-0 on purpose (load gap)"),
    ]
    for watched.gateway in ("gateway-0", "gateway-1"):
        moves["failover", "disconnected", "verifier-1"] += 1
        watched.look()
        first, *others = watched.log_lines()
        assert first == ("failover", "1 sequence moved to verifier-1 after a loss (disconnected)")
        assert len(others) == 2
