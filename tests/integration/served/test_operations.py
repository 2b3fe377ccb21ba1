"""A served fleet is changed while it serves: heads, weights, members.  Whatever is done, greedy text stays what it was."""

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import backend.models.demo
from tests.support.fleet_process import ServedFleet, wait_for

pytestmark = pytest.mark.engine

MODELS = Path(backend.models.demo.__file__).parent
PROMPT = "def read_lines(path, encoding):\n    with open(path) as file:\n        "
TOKENS = 150


@pytest.fixture(scope="module")
def expected(fleet: ServedFleet) -> str:
    return answer(fleet)


def answer(fleet: ServedFleet) -> str:
    # Otherwise the first answer would draft for the next ones.
    apart = {"learn": False}
    text: str = fleet.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True, outrider=apart)["choices"][0]["text"]
    return text


def post(fleet: ServedFleet, name: str, **body: Any) -> tuple[int, Any]:
    response = fleet.http.post(f"/admin/{name}", json=body)
    return response.status_code, response.json()


def operation(fleet: ServedFleet, name: str, **body: Any) -> Any:
    """One that takes time, when it has ended."""
    status, answer = post(fleet, name, **body)
    assert status == 202, answer
    shown: Any = {}

    def ended() -> bool:
        nonlocal shown
        shown = fleet.http.get(f"/admin/operations/{answer['operation']}").json()
        return shown["state"] in ("done", "failed")

    wait_for(ended, 120, name)
    return shown


@contextmanager
def meanwhile(fleet: ServedFleet, pause_s: float = 0.0) -> Iterator[list[str]]:
    """The answers to requests that come one after the other, until the block ends.

    `pause_s`: between two requests, where what is done meanwhile takes long.
    """
    texts, over = list[str](), threading.Event()

    def ask() -> None:
        while not over.wait(pause_s):
            texts.append(answer(fleet))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            wait_for(lambda: bool(texts) or asking.done(), what="a first answer")
            yield texts
            count = len(texts)
            wait_for(lambda: len(texts) > count + 1 or asking.done(), what="an answer afterwards")
        finally:
            over.set()
    asking.result()


def accepted(fleet: ServedFleet) -> float:
    return fleet.metric("outrider_accepted_tokens_total", drafter="drafter-0")


def test_another_head_while_requests_run(fleet: ServedFleet, expected: str, tmp_path: Path) -> None:
    shutil.copytree(MODELS / "drafter", tmp_path / "head")
    with meanwhile(fleet) as texts:
        done = fleet.command("swap-drafter", "drafter-0", str(tmp_path / "head"))
        assert done.returncode == 0, done.stderr
        before = accepted(fleet)
        wait_for(lambda: accepted(fleet) > before + 50, what="drafts of the new head are accepted")
    assert set(texts) == {expected}


def test_a_head_that_does_not_fit_is_refused_and_the_present_one_drafts_on(
    fleet: ServedFleet, expected: str, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(MODELS / "drafter", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}))
    for path, reason in ((other, "drafter-0 keeps its head"), (tmp_path / "none", "no such directory")):
        refused = operation(fleet, "swap-drafter", drafter="drafter-0", path=str(path))
        assert refused["state"] == "failed"
        assert reason in refused["note"]
    before = accepted(fleet)
    assert answer(fleet) == expected
    wait_for(lambda: accepted(fleet) > before, what="drafts are accepted")
