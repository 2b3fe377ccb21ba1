"""What a rollout can be told: its own options, the settings, and the names people know from elsewhere."""

import json
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from transformers import AutoTokenizer

from backend.config import sources
from backend.config.sources import CommandError, ConfigError
from backend.launch.fleet import LaunchedFleet
from backend.models.demo import TARGET_DIR
from backend.rollout.options import fleet_settings, rollout_options, slices
from backend.rollout.trace import Case, write_cases
from gateway.rollout.main import rollout

NEEDED = ("--trace", "train.3.parquet", "--out", "o")


def parts_of(*arguments: str) -> list[range]:
    """The rounds of a trace of ten rows."""
    options, rest = rollout_options([*NEEDED, *arguments])
    sources.load(rest, "outrider rollout")
    return slices(options, 10)


@pytest.mark.parametrize(("flags", "needed"), [([], {}), (["--fixed-responses"], {"async_scheduling": False})])
def test_settings_are_flags_too(flags: list[str], needed: dict[str, bool]) -> None:
    given = ["--verifiers", "3", "--mode=native", "--verifier-engine-args", '{"block_size": 32}']
    options, rest = rollout_options([*NEEDED, *given, *flags])
    made = fleet_settings(options, sources.load(rest, "outrider rollout").settings)
    assert (made.verifiers, made.mode, made.verifier.engine_args) == (3, "native", {"block_size": 32} | needed)


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
        (["--offset", "10"], "there are 10 rows"),
        (["--batch", "4", "--rounds", "4"], "are 3 parts of 4"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parts_of(*arguments)
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
    assert parts_of(*arguments) == parts


def test_sampling_parameters_of_the_command(tmp_path: Path) -> None:
    assert rollout_options(NEEDED)[0].sampling == {"temperature": 1.0, "max_tokens": 1024}
    file = tmp_path / "sampling.json"
    file.write_text('{"stop": ["\\n\\n"], "max_tokens": 9}')
    given = ["--sampling", f"@{file}", "--temperature", "0.5", "--max-tokens", "30", "--seed", "3"]
    options, _ = rollout_options([*NEEDED, *given])
    assert options.sampling == {"temperature": 0.5, "max_tokens": 9, "stop": ["\n\n"]}
    assert (options.max_tokens, options.seed) == (30, 3)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_fleet_of_its_own_has_an_operator_and_runs_a_tokenizers_code_only_if_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trusted: bool
) -> None:
    fleet, operator, load = Mock(), Mock(), Mock(wraps=AutoTokenizer.from_pretrained)
    fleet.coordinator.info.side_effect = CommandError("enough")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    monkeypatch.setattr("backend.launch.fleet.prepare_process", Mock())
    monkeypatch.setattr("backend.launch.operator.Operator", operator)
    monkeypatch.setattr(LaunchedFleet, "launch", lambda *given: fleet)
    write_cases(tmp_path / "train.3.parquet", [Case(0, "x", "y")])
    arguments = ["--trace", str(tmp_path / "train.3.parquet"), "--out", str(tmp_path)]
    with pytest.raises(CommandError, match="enough"):
        rollout([*arguments, "--verifier-engine-args", json.dumps({"trust_remote_code": trusted})], print)
    assert call(str(TARGET_DIR), trust_remote_code=trusted) in load.call_args_list
    assert operator.mock_calls == [call(fleet, print), call().start()]
    assert fleet.method_calls == [call.wait_ready(print), call.coordinator.info(), call.stop()]
