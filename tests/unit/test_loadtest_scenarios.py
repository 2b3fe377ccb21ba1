"""The scenarios: what they ask, when, and what the command line makes of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from loadtest.__main__ import main, without_key
from loadtest.options import OptionsError, parse
from loadtest.scenarios import SCENARIOS, burst, constant, ramp, users_at
from loadtest.slo import DEFAULT
from loadtest.timing import Answer
from loadtest.workloads import Ask, Knobs, log_uniform

KNOBS = Knobs(model="m", duration_s=30.0)


def asked(name: str, count: int, seed: str = "s", elapsed: float = 0.0) -> list[Ask]:
    """The first questions of one user."""
    workload = SCENARIOS[name].make(KNOBS, random.Random(seed), lambda: elapsed)
    answer = Answer("", 0, 0, 0.0, "ok", text="answer")
    return [next(workload), *(workload.send(answer) for _ in range(count - 1))]


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_the_same_seed_asks_the_same_and_streams_want_their_usage(name: str) -> None:
    asks = asked(name, 12)
    assert asks == asked(name, 12)
    assert asks != asked(name, 12, seed="other")
    for ask in asks:
        assert ask.path.startswith("/v1/")
        if ask.expect_status == 200:
            assert ask.body["stream"] is True
            assert ask.body["stream_options"] == {"include_usage": True}
            json.dumps(ask.body)


def test_a_conversation_grows_and_keeps_its_prefix() -> None:
    asks = asked("multiturn", 5)
    lengths = [len(ask.body["messages"]) for ask in asks]
    assert lengths == [2, 4, 6, 8, 2]
    assert asks[1].body["messages"][:2] == asks[0].body["messages"]
    assert asks[1].body["messages"][2] == {"role": "assistant", "content": "answer"}
    assert len({ask.body["messages"][0]["content"] for ask in asks + asked("multiturn", 1, "other user")}) == 1


def test_the_domain_shifts_at_half_time() -> None:
    assert {ask.label for ask in asked("domain-shift", 5, elapsed=14.9)} == {"code"}
    assert {ask.label for ask in asked("domain-shift", 5, elapsed=15.1)} == {"prose"}


def test_aborts_and_wrong_requests_come_among_right_ones() -> None:
    assert {ask.abort_after is None for ask in asked("aborts", 20)} == {True, False}
    statuses = {ask.expect_status for ask in asked("bad-input", 60)}
    assert {200, 400, 404, 415} == statuses


def test_lengths_are_spread_evenly_over_their_logarithm() -> None:
    chance = random.Random(0)
    drawn = [log_uniform(8, 512, chance) for _ in range(2000)]
    assert min(drawn) >= 8
    assert max(drawn) <= 512
    assert sum(each <= 64 for each in drawn) == pytest.approx(1000, abs=120)


def test_stages() -> None:
    assert users_at(constant(4, 10), 9.9) == 4
    assert users_at(constant(4, 10), 10.0) is None
    assert [users_at(burst(16, 60), at) for at in (5, 15, 25, 35, 45, 55)] == [1, 16, 1, 16, 1, 16]
    steps = ramp(16, 80)
    assert [stage.users for stage in steps] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert steps[-1].until_s == 80
    assert [stage.users for stage in ramp(3, 30)] == [1, 2, 3]


def test_options_have_the_scenarios_defaults_and_pass_settings_on() -> None:
    options = parse(["--scenario", "burst", "--slo", "tgs_p50=9", "--", "--mode", "sync"], "key", "now")
    assert (options.users, options.knobs.duration_s) == (16, 30.0)
    assert options.serve == ("--mode", "sync")
    assert options.api_key == "key"
    assert options.slo == {**DEFAULT, "tgs_p50": 9}
    assert options.results == Path("loadtest/results/burst-now")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scenario", "nope"], "invalid choice"),
        (["--users", "0"], "invalid int value|not above 0"),
        (["--scenario", "fault", "--host", "http://h"], "starts itself"),
        (["--host", "http://h", "--", "--mode", "off"], "behind --"),
        (["--host", "127.0.0.1:80"], "expected a URL"),
        (["--slo", "ttft=1"], "no figure"),
        (["--slo", "missing.yaml"], "No such file"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OptionsError, match=message):
        parse(arguments, None, "now")
    assert main(arguments) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_objectives_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "slo.yaml"
    file.write_text("ttft_p95_ms: 300\nfailures: 1\n")
    options = parse(["--slo", str(file), "--no-default-slo"], None, "now")
    assert options.slo == {"ttft_p95_ms": 300, "failures": 1}


def test_keys_are_not_written_down() -> None:
    assert without_key(["--api-key", "s3", "--x", "--", "--gateway-api-key=s4"]) == [
        "--api-key",
        "***",
        "--x",
        "--",
        "--gateway-api-key=***",
    ]
