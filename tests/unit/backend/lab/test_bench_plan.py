"""The benchmark's options, cores, configurations, order and prompts."""

import os
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.config.settings import Mode
from backend.lab.bench import options as options_module
from backend.lab.bench.options import MODES, PROBABILISTIC
from backend.lab.bench.plan import cells, configurations, points, split_cores
from backend.lab.bench.prompts import Prompts
from backend.lab.demo.tokenizer import save_tokenizer, train_tokenizer


def parsed(*arguments: str) -> Namespace:
    return options_module.parse(arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modes", "syncc"], "syncc: there are off, native, native-probabilistic, sync"),
        (["--k", "0"], "1 is the least"),
        (["--concurrency", "x"], "no list of numbers"),
        (["--drafter", "ngram"], "--drafter goes with --model"),
        (["--model", "a/b"], "--model needs --drafter"),
        (["--model", "a/b", "--drafter", "ngram", "--targets", "S"], "measured alone"),
    ],
)
def test_nonsense_is_refused_by_name(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parsed(*arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_quick_asks_less_and_what_is_given_wins() -> None:
    assert parsed("--model", "a/b", "--drafter", "ngram").targets == (options_module.OWN,)
    assert parsed("--modes", "native,off").modes == ("off", "native")
    quick = parsed("--quick", "--tokens", "77")
    assert (len(quick.targets), quick.tokens) == (1, 77)
    assert len(points(quick)) < len(points(parsed()))


@given(st.sets(st.integers(0, 255), min_size=1, max_size=64))
def test_cores_are_split_without_overlap(available: set[int]) -> None:
    with mock.patch.object(os, "sched_getaffinity", return_value=available):
        split = split_cores()
    assert split.verifier
    assert split.drafter
    assert len(available) == 1 or Counter((*split.verifier, *split.drafter)) == Counter(split.all) == Counter(available)


def test_every_mode_runs_with_every_k() -> None:
    found = configurations(parsed("--k", "2,4"), "eagle")
    assert [(c.mode, c.k) for c in found] == [("off", 0), *((mode, k) for mode in MODES if mode != "off" for k in (2, 4))]
    assert len({c.label for c in found}) == len(found)
    assert {c.served for c in found} == set(get_args(Mode))
    assert {c.mode for c in configurations(parsed(), "ngram")} == {*MODES} - {PROBABILISTIC}


def test_rounds_alternate_and_everyone_is_first_in_turn() -> None:
    configured, asked = configurations(parsed(), "eagle"), points(parsed())
    order = list(cells(configured, asked, rounds=len(configured)))
    assert set(Counter((c.point, c.configuration) for c in order).values()) == {len(configured)}
    turns = [order[at : at + len(configured)] for at in range(0, len(order), len(configured))]
    assert {turn[0].configuration for turn in turns} == set(configured)
    for turn in turns:
        assert {c.configuration for c in turn} == set(configured)
        assert len({(c.round, c.point) for c in turn}) == 1


def test_prompts_are_reproducible_and_differ(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(["def f(x):\n    return x + 1\n"] * 50, 300, 512), tmp_path)
    prompts = Prompts(str(tmp_path), 64)
    one, other = prompts.make("0/1"), prompts.make("0/2")
    assert one == prompts.make("0/1") != other
    assert len(one) == 64
    assert all(0 <= token < 300 for token in one)
