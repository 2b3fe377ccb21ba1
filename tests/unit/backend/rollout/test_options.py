"""What a rollout can be told: its own options, the settings, and the names people know from elsewhere."""

from pathlib import Path
from unittest.mock import Mock, call

import pytest

from backend.config import Settings, sources
from backend.config.sources import ConfigError
from backend.launch.fleet import LaunchedFleet
from backend.rollout.options import fleet_settings, rollout_options, slices
from gateway.rollout import main

NEEDED = ("--trace", "train.3.parquet", "--out", "o")


def settings(*arguments: str) -> Settings:
    options, rest = rollout_options([*NEEDED, *arguments])
    return fleet_settings(options, sources.load(rest, "outrider rollout").settings)


def test_defaults() -> None:
    options, rest = rollout_options(NEEDED)
    assert (options.rounds, options.repeat, options.samples) == (None, 1, 1)
    assert (options.sampling, options.fixed, rest) == ({"temperature": 1.0, "max_tokens": 1024}, False, [])
    made = settings()
    assert (made.mode, made.verifier.engine_args, options.seed) == ("auto", {}, None)
    assert rollout_options([*NEEDED, "--seed", "3"])[0].seed == 3


def test_settings_are_flags_too() -> None:
    made = settings("--verifiers", "3", "--mode=native", "--fixed-responses", "--verifier-engine-args", '{"block_size": 32}')
    assert (made.verifiers, made.mode) == (3, "native")
    assert made.verifier.engine_args == {"block_size": 32, "async_scheduling": False}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rounds", "0"], "1 is the least"),
        (["--rounds", "2"], "the same rows again: --repeat"),
        (["--fixed-responses", "--n", "2"], "--fixed-responses says what is emitted"),
        (["--fixed-responses", "--sampling", '{"stop": ["x"]}'], "--fixed-responses says what is emitted"),
        (["--sampling", "{"], "{: no JSON: Expecting property name"),
        (["--sampling", "[]"], "no JSON object"),
        (["--sampling", "@nowhere.json"], "@nowhere.json: No such file"),
        (["--batch", "x"], "no number"),
        (["--fixed-response"], "did you mean --fixed-responses?"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*arguments)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], [range(10)]),
        (["--offset", "4"], [range(4, 10)]),
        (["--batch", "4"], [range(4), range(4, 8), range(8, 10)]),
        (["--batch", "3", "--offset", "2", "--rounds", "2"], [range(2, 5), range(5, 8)]),
    ],
)
def test_each_round_takes_the_next_rows(arguments: list[str], parts: list[range]) -> None:
    options, _ = rollout_options([*NEEDED, *arguments])
    assert slices(options, 10) == parts


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["--offset", "10"], "there are 10 rows"), (["--batch", "4", "--rounds", "4"], "are 3 parts of 4")],
)
def test_more_rows_than_there_are(arguments: list[str], complaint: str) -> None:
    options, _ = rollout_options([*NEEDED, *arguments])
    with pytest.raises(ConfigError, match=complaint):
        slices(options, 10)


def test_sampling_parameters_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "sampling.json"
    file.write_text('{"stop": ["\\n\\n"], "max_tokens": 9}')
    options, _ = rollout_options([*NEEDED, "--sampling", f"@{file}", "--temperature", "0.5", "--max-tokens", "30"])
    assert options.sampling == {"temperature": 0.5, "max_tokens": 9, "stop": ["\n\n"]}
    assert options.max_tokens == 30


@pytest.mark.parametrize("trusted", [False, True])
def test_a_tokenizers_own_code_runs_only_if_the_fleet_trusts_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trusted: bool
) -> None:
    load = Mock(side_effect=ConfigError("enough"))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    for name in ("read_trace", "_front"):
        monkeypatch.setattr(main, name, Mock(return_value=[None]))
    monkeypatch.setattr("backend.launch.fleet.prepare_process", Mock())
    (tmp_path / "train.3.parquet").touch()
    options, _ = rollout_options(["--trace", str(tmp_path / "train.3.parquet"), "--out", str(tmp_path)])
    given = Settings.model_validate({"verifier": {"engine_args": {"trust_remote_code": trusted}}})
    with pytest.raises(ConfigError, match="enough"):
        main._prepare(options, given, Mock(), print)
    assert load.call_args.kwargs == {"trust_remote_code": trusted}


def test_a_fleet_of_its_own_carries_out_administrators_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, say, operator = Mock(), Mock(), Mock()
    monkeypatch.setattr("backend.launch.operator.Operator", operator)
    monkeypatch.setattr(LaunchedFleet, "launch", lambda *given: fleet)
    with main._own_fleet(Settings(), Mock(), say):
        assert fleet.method_calls == [call.wait_ready(say)]
        assert operator.mock_calls == [call(fleet, say), call().start()]
    assert fleet.method_calls[-1] == call.stop()
