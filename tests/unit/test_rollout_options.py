"""What a rollout can be told: its own options, the settings, and the names people know from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend.config import Settings, sources
from backend.config.sources import ConfigError
from backend.engine.client import free_sampling
from backend.models.demo import TARGET_DIR
from backend.rollout.options import fleet_settings, rollout_options, slices, trace_options
from backend.rollout.requests import Tokenizer
from gateway import cli

NEEDED = ("--trace", "train.3.parquet", "--out", "o")


def settings(*arguments: str) -> Settings:
    options, rest = rollout_options([*NEEDED, *arguments])
    return fleet_settings(options, sources.load(rest, "outrider rollout"))


def test_defaults() -> None:
    options, rest = rollout_options(NEEDED)
    assert (options.rounds, options.repeat, options.samples, options.sampling) == (None, 1, 1, {})
    assert (options.limit, options.temperature, options.fixed, rest) == (None, 1.0, False, [])
    made = settings()
    assert (made.mode, made.verifier.engine_args, options.seed) == ("auto", {}, None)
    assert made.gateway.balance_interval_s == 0
    assert rollout_options([*NEEDED, "--seed", "3"])[0].seed == 3
    assert settings("--gateway-balance-interval-s", "2").gateway.balance_interval_s == 2


def test_settings_and_their_other_names() -> None:
    made = settings(
        "--verifiers", "3", "--k", "7", "--draft-mode=ahead", "--target", "t", "--draft-model", "d", "--fixed-responses",
        "--verifier-engine-args", '{"block_size": 32}',
    )  # fmt: skip
    assert (made.verifiers, made.num_speculative_tokens, made.mode, made.model, made.drafter) == (3, 7, "ahead", "t", "d")
    assert made.verifier.engine_args == {"block_size": 32, "async_scheduling": False}


@pytest.mark.parametrize(
    ("arguments", "mode", "drafter"),
    [
        (["--impl", "native"], "native", "demo"),
        (["--impl", "native", "--method", "ngram"], "native", "ngram"),
        (["--impl", "disaggregated"], "auto", "demo"),
        (["--impl", "disaggregated", "--mode", "sync", "--method", "eagle3"], "sync", "demo"),
        (["--mode", "off"], "off", "demo"),
        (["--mode", "native"], "native", "demo"),
    ],
)
def test_implementation_and_method(arguments: list[str], mode: str, drafter: str) -> None:
    made = settings(*arguments)
    assert (made.mode, made.drafter) == (mode, drafter)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--impl", "native", "--mode", "sync"], "--mode sync contradicts it"),
        (["--impl", "disaggregated", "--mode", "native"], "--mode native contradicts it"),
        (["--method", "ngram", "--drafter", "demo"], "--drafter demo contradicts it"),
        (["--method", "eagle", "--drafter", "ngram"], "--drafter ngram contradicts it"),
        (["--method", "eagle", "--mode", "off"], "drafts nothing"),
        (["--impl", "remote"], "invalid choice"),
        (["--rounds", "0"], "1 is the least"),
        (["--rounds", "2"], "the same rows again: --repeat"),
        (["--fixed-responses", "--n", "2"], "--fixed-responses says what is emitted"),
        (["--sampling", "{"], "is no JSON"),
        (["--sampling", '{"stop": ["x"]}'], "an object with any of bad_words"),
        (["--join", "--weights-dir", "w"], "its gateways load weights"),
        (["--limit", "x"], "no number"),
        (["--temperature", "-1"], "between 0 and 100"),
        (["--fixed-response"], "did you mean --fixed-responses?"),
        (["--draft-mod", "sync"], "did you mean --draft-mode?"),
        (["--verifier", "2"], "did you mean --verifiers?"),
        (["--verifiers", "0"], "greater than or equal to 1"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*arguments)
    assert complaint in str(caught.value)


def test_trace_lengths_must_make_sense() -> None:
    with pytest.raises(ConfigError, match="--min-gen must not be greater"):
        trace_options(["x", "--out", "o", "--min-gen", "9", "--max-gen", "8"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["rollout"], "required: --trace, --out"),
        (["rollout", "--trace", "nowhere.parquet", "--out", "{tmp}"], "nowhere.parquet: no such file"),
        (["trace"], "outrider trace make"),
        (["trace", "make", "nowhere.txt", "--out", "{tmp}/t"], "nowhere.txt: cannot be read"),
    ],
)
def test_the_command_line_says_it_in_one_line(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([argument.replace("{tmp}", str(tmp_path)) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_help_shows_both_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "rollout" in text
    assert "trace" in text
    with pytest.raises(SystemExit):
        rollout_options(["--help"])
    assert "--fixed-responses" in capsys.readouterr().out


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


EOS, VOCABULARY = [0, 3], 512


def test_sampling_parameters_by_vllms_names() -> None:
    given = {"temperature": 0.7, "top_p": 0.9, "logit_bias": {"5": -1}, "stop_token_ids": [7], "bad_words": ["import"]}
    params = free_sampling(given, EOS, Tokenizer(str(TARGET_DIR)).hugging_face, VOCABULARY)(9, 4)
    assert (params.temperature, params.top_p, params.logit_bias) == (0.7, 0.9, {5: -1.0})
    assert (params.max_tokens, params.seed) == (9, 4)
    assert sorted(params.stop_token_ids or ()) == [0, 3, 7]
    assert params.bad_words_token_ids
    assert not free_sampling({"ignore_eos": True}, EOS, None, VOCABULARY)(9, None).stop_token_ids


@pytest.mark.parametrize(
    "given", [{"top_p": 2}, {"logit_bias": {"512": 1}}, {"logit_bias": [1]}, {"top_k": "x"}, {"stop_token_ids": [-1]}]
)
def test_a_sampling_parameter_that_is_wrong(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"top_p|vocabulary|items|not supported"):
        free_sampling(given, EOS, None, VOCABULARY)
