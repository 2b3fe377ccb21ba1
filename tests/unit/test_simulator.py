"""The simulated fleet: nothing is lost or made up, failures are survived, and the command writes what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from backend.coordinator.policy import Coordinator
from backend.lab.simulator.arrivals import Arrival, TraceError, Trouble, poisson, read, trouble
from backend.lab.simulator.members import Hardware
from backend.lab.simulator.simulation import FleetSimulation, Outcome, Scenario
from gateway.cli import main

SLOW_DRAFTS = Hardware(draft_s=0.01, draft_request_s=0.002)


def simulate(scenario: Scenario) -> tuple[FleetSimulation, Outcome]:
    simulation = FleetSimulation(scenario, Coordinator(2.0))
    return simulation, simulation.run()


def scenario(**fields: object) -> Scenario:
    arrivals = poisson(4.0, 20.0, 100, 100, seed=1)
    return replace(Scenario(3, 4, 60.0, arrivals, hardware=SLOW_DRAFTS), **fields)  # type: ignore[arg-type]


def test_every_request_ends_and_every_token_is_counted() -> None:
    asked = scenario()
    simulation, outcome = simulate(asked)
    assert len(outcome.tgs) == len(asked.arrivals)
    emitted = sum(each.progress for each in simulation.verifiers.values())
    wanted = sum(each.response for each in asked.arrivals)
    assert 0.95 * wanted <= outcome.tokens <= 1.1 * wanted, "the last step of a request may emit more than it takes"
    assert emitted > 0
    assert all(not each.requests for each in simulation.verifiers.values())
    assert all((each.tokens, each.requests) == (0, 0) for each in simulation._places.values())
    assert sum(each.routed for each in simulation._places.values()) == len(asked.arrivals)


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(scenario())[1] == simulate(scenario())[1]
    assert simulate(scenario())[1] != simulate(scenario(seed=5))[1]


def test_drafting_pays_and_a_slow_drafter_is_not_used() -> None:
    fast, slow = Hardware(draft_s=0.001, draft_request_s=0), Hardware(draft_s=5.0)
    with_drafts = simulate(scenario(hardware=fast))[1]
    without = simulate(scenario(hardware=slow))[1]
    assert sorted(with_drafts.tgs)[len(with_drafts.tgs) // 2] > 1.5 * sorted(without.tgs)[len(without.tgs) // 2]
    assert len(without.tgs) == len(with_drafts.tgs), "who waits in vain stops drafting"


def test_a_dead_drafter_is_replaced_and_taken_back() -> None:
    simulation, outcome = simulate(scenario(troubles=[Trouble("d0", 5.0, 10.0)]))
    assert outcome.counters["leases_expired"] == 1
    assert len(outcome.tgs) == len(scenario().arrivals)
    assert any("d0" in each.drafters for each in simulation.verifiers.values())
    assert simulation.drafters["d0"].incarnation == 1


def test_requests_of_a_dead_verifier_go_on_elsewhere() -> None:
    _, outcome = simulate(scenario(troubles=[Trouble("v0", 5.0, 10.0)]))
    assert outcome.failed_over > 0
    assert len(outcome.tgs) == len(scenario().arrivals)


def test_skewed_load_is_served_better_than_by_equal_numbers() -> None:
    arrivals = [Arrival(0.0, 50, 2000)] * 24
    asked = Scenario(10, 12, 20.0, arrivals, hardware=SLOW_DRAFTS, skew=1.0)
    held = Coordinator(2.0)
    for i in range(12):
        held.pin(f"d{i}", [f"v{i % 10}"], 0.0)
    assert simulate(asked)[1].tokens > 1.05 * FleetSimulation(asked, held).run().tokens


def test_traces_and_events_are_checked() -> None:
    assert abs(len(poisson(10, 100, 50, 50, 0)) - 1000) < 120
    lines = ["response_tokens,arrival_s,prompt_tokens", "7,2.5,3", "4,1,9"]
    assert read(lines) == [Arrival(1.0, 9, 4), Arrival(2.5, 3, 7)]
    for bad in (["a,b"], lines[:1], [lines[0], "0,1,1"], [lines[0], "x,1,1"], [lines[0], "1,-1,1"], [lines[0], "1"]):
        with pytest.raises(TraceError):
            read(bad)
    assert trouble("d3@10+5", False) == Trouble("d3", 10, 5)
    assert trouble("v0@1+2x4", True) == Trouble("v0", 1, 2, 4)
    for text, is_slow in (("d3", False), ("d3@x", False), ("d3@1", True), ("d3@1x2", False), ("d3@1..2", False)):
        with pytest.raises(TraceError):
            trouble(text, is_slow)


def test_the_command_writes_figures_and_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,response_tokens\n" + "".join(f"{0.2 * i},50,60\n" for i in range(60)))
    options = ["--verifiers", "3", "--drafters", "4", "--trace", str(trace), "--fail", "d1@3+4", "--slow", "v0@5+5x3"]
    assert main(["simulate", *options, "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "tokens/s" in said
    found = json.loads((tmp_path / "out" / "simulation.json").read_text())
    assert found["requests_finished"] == 60
    assert found["decision_ms"]["steady"]["p99"] > 0
    assert len(found["samples"]) == 41


@pytest.mark.parametrize(
    "arguments",
    [["--trace", "/nowhere.csv"], ["--fail", "nonsense"], ["--fail", "d9999@1"], ["--verifiers", "0"], ["--min-gain", "7"]],
)
def test_what_makes_no_sense_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["simulate", "--verifiers", "1", "--drafters", "1", *arguments])
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 2
    assert "Traceback" not in capsys.readouterr().err
