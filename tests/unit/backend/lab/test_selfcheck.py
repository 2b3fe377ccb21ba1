"""The self-check: on a CPU it finds what it compares the same."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backend.lab import selfcheck
from backend.lab.random_heads import SMALL
from outrider import OutriderError


def test_the_quick_check_runs_on_a_cpu_and_writes_what_it_says(tmp_path: Path) -> None:
    lines: list[str] = []
    selfcheck.main(["--quick", "--output", str(tmp_path / "found.json")], lines.append)
    found = json.loads((tmp_path / "found.json").read_text())
    (noise,), drafts, times = found["Noise"], found["Drafts"], found["Time of drafts"]
    assert noise["same choice"] == noise["same five best"] == 1.0
    assert [row["weights"] for row in drafts if row["type"] == "float32" and row["rule"] == "greedy"] == list(SMALL)
    assert {row["same"] for row in drafts} == {1.0}
    assert {row["same outcomes"] for row in drafts} == {1.0, None}, "none of one pass, nor of samples"
    assert {row["tokens"] for row in drafts if row["rule"] == "independent"} == {selfcheck.K}
    assert 1 < min(row["tokens"] for row in drafts) < selfcheck.K, "drafts end at the floor"
    names = ["confirm 3, ms", "draft 8, ms", "enumerate 4, ms", "enumerate 64, ms"]
    assert all(row[name] > 0 for row in times for name in names)
    assert len([line for line in lines if line.startswith("| draft model |")]) == 8, "six of drafts, two of times"


@pytest.mark.parametrize("fault", [False, True])
def test_texts_are_compared_with_those_of_plain_decoding(monkeypatch: pytest.MonkeyPatch, fault: bool) -> None:
    class Fleet:
        def __init__(self, model: str, mode: str, **settings: Any) -> None:
            self.mode = mode

        def __enter__(self) -> Any:
            if fault and self.mode == "auto":
                raise OutriderError(0, "fleet_not_started", "no room")
            return self

        def __exit__(self, *_: object) -> None: ...

        def generate(self, prompts: list[str], fields: dict[str, Any], n: int) -> Iterator[Any]:
            """All but one sampled text are the same; they come in another order."""
            for index in range(len(prompts))[:: 1 if self.mode == "off" else -1]:
                for sample in range(n):
                    wrong = self.mode == "auto" and fields["temperature"] and index == sample == 1
                    tokens = [index, sample, int(wrong)]
                    account = {"tokens_per_verification": 2.5}
                    yield SimpleNamespace(index=index, sample=sample, token_ids=tokens, account=account)

    monkeypatch.setattr(selfcheck, "Fleet", Fleet)
    rows = list(selfcheck.check_texts())
    if fault:
        assert rows == [{"failed": "no room"}]
    else:
        assert [row["same"] for row in rows] == [1.0, 15 / 16]
        assert [row["texts"] for row in rows] == ["greedy", "seeded"]
        assert rows[0]["tokens per verification"] == 2.5
