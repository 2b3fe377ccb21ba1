"""A served fleet is changed while it serves: heads, weights, members.  Whatever is done, greedy text stays what it was."""

from __future__ import annotations

import json
import shutil
import threading
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


class Meanwhile:
    """Requests one after the other, until the block ends; `texts` are their answers."""

    def __init__(self, fleet: ServedFleet, pause_s: float = 0.0) -> None:
        """`pause_s`: between two requests, where what is done meanwhile takes long."""
        self.texts: list[str] = []
        self._pause_s = pause_s
        self._fleet = fleet
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Meanwhile:
        self._thread.start()
        wait_for(lambda: len(self.texts) > 0 or not self._thread.is_alive(), what="a first answer")
        return self

    def __exit__(self, *_: object) -> None:
        count = len(self.texts)
        wait_for(lambda: len(self.texts) > count + 1 or not self._thread.is_alive(), what="an answer afterwards")
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._pause_s):
            self.texts.append(answer(self._fleet))


def accepted(fleet: ServedFleet) -> float:
    return fleet.metric("outrider_accepted_tokens_total", drafter="drafter-0")


def test_another_head_while_requests_run(fleet: ServedFleet, expected: str, tmp_path: Path) -> None:
    shutil.copytree(MODELS / "drafter", tmp_path / "head")
    with Meanwhile(fleet) as meanwhile:
        done = fleet.command("swap-drafter", "drafter-0", str(tmp_path / "head"))
        assert done.returncode == 0, done.stderr
        before = accepted(fleet)
        wait_for(lambda: accepted(fleet) > before + 50, what="drafts of the new head are accepted")
    assert set(meanwhile.texts) == {expected}


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
