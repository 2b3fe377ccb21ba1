"""What the fleet benchmark is told and what it makes of its rounds; no process is started."""

from __future__ import annotations

import pytest

from backend.fleet import VerifierStats
from backend.lab.bench.assign import WAYS, parse_load, pins_of
from backend.lab.bench.assign_fleet import cores_of, plan_name
from backend.lab.bench.assign_report import markdown, summary


def test_loads_are_read() -> None:
    moving = parse_load("8,0>0,8")
    assert moving.phases == ((8, 0), (0, 8))
    assert moving.temperatures == (0.0, 0.0)
    assert parse_load("8@1,4").temperatures == (1.0, 0.0)


@pytest.mark.parametrize("text", ["8,1>8", "", "8,-1", "x,1"])
def test_what_is_no_load_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_load(text)


def test_fixed_ways_bind_every_drafter() -> None:
    load = parse_load("8,1>0,3")
    assert pins_of("rule", load, ["d0", "d1"]) is None
    assert pins_of("static", load, ["d0", "d1"]) == {"d0": ["v0"], "d1": ["v1"]}
    assert pins_of("static", load, ["d0", "d1", "d2"]) == {"d0": ["v0"], "d1": ["v1"], "d2": ["v0"]}
    assert pins_of("static", load, ["d0"]) == {"d0": ["v0", "v1"]}
    assert pins_of("gathered", load, ["d0", "d1"]) == {"d0": ["v0"], "d1": ["v0"]}


def test_cores_by_layout() -> None:
    assert cores_of("as-served", 2, 2, [0, 1]) == [[0], [1], [0], [1]]
    assert cores_of("as-served", 2, 2, [0, 1, 2, 3]) == [[0], [1], [2], [3]]
    assert cores_of("apart", 2, 2, [0, 1, 2]) == [[0], [0], [1, 2], [1, 2]]
    assert cores_of("floating", 1, 1, [0, 1]) == [[0, 1], [0, 1]]
    assert cores_of("apart", 1, 1, [0]) == [[0], [0]]


def test_rounds_side_by_side_are_compared_and_shown() -> None:
    made = {"rule": (110.0, 90.0, 120.0), "static": (100.0, 100.0, 100.0)}
    rounds = [
        {
            "load": "8,1",
            "way": way,
            "tokens_per_s": each,
            "changes": 1,
            "changes_measured": i,
            "drafters": {"v0": ["d0"], "v1": []},
        }
        for way, totals in made.items()
        for i, each in enumerate(totals)
    ]
    found = summary(rounds, [way for way in WAYS if way in made])
    assert found["rule/static"] == pytest.approx({"median": 1.1, "least": 0.9, "greatest": 1.2})
    assert found["tokens_per_s"]["rule"] == {"median": 110.0, "least": 90.0, "greatest": 120.0}
    assert found["changes"] == {"rule": [1, 2, 3], "static": [1, 2, 3]}
    hardware = {"cpu": "a processor", "machine_cores": 2, "load_average_before": 0.1}
    result = {
        "about": {"commit": "abc", "hardware": hardware, "command": "make", "date": "today"},
        "layout": "floating",
        "cores": {"v0": [0, 1]},
        "loads": {"8,1": found},
        "counters": {"reassignments": 4},
        "steady": {"load": "8,1", "seconds": 60.0, "changes_measured": 0},
        "rounds": rounds,
    }
    page = markdown(result)
    assert "| 8,1 | 110 (90-120) | 100 (100-100) | 1.10 (0.90-1.20) | 1, 2, 3 | v0: d0; v1: none |" in page
    assert "for 60 s: 0 changes" in page


def test_plans_have_names() -> None:
    stats = VerifierStats("v0", 0.0, "auto", 4)
    assert plan_name(stats) == "plain"
    stats.plan_k = 4
    assert plan_name(stats) == "sync K=4"
    stats.plan_outcomes = 8
    assert plan_name(stats) == "ahead K=4"
