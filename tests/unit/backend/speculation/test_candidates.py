"""Which drafts are learned from, in batches of any size."""

import pytest

from backend.speculation.calibration import Calibration
from backend.speculation.candidates import SAMPLED, Candidates
from backend.speculation.chances import Rule
from backend.wire.drafting import Draft
from backend.wire.engine import RequestOptions

STEPS = 100


@pytest.mark.parametrize("lookups", [False, True], ids=["drafter", "drafter-and-lookups"])
@pytest.mark.parametrize("requests", [1, 9, 31, 64])
def test_in_a_batch_of_any_size_all_requests_are_learned_from(
    requests: int, lookups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Candidates(1, 1, lookups, 50)
    expected, observed = list[int](), list[int]()
    monkeypatch.setattr(made.drafted, "note", lambda survivals, step: expected.append(step))
    monkeypatch.setattr(Calibration, "observe", lambda self, own, signs, matched, seen: observed.append(seen))
    texts = {made.begin(f"r{i}", RequestOptions(), Rule.GREEDY, 2): [1, 2, 3] for i in range(requests)}
    for made.steps in range(STEPS):
        for request, text in texts.items():
            made.grown(request, text, len(text) - 1)
            made.take_fresh("d0", [Draft(request.id, len(text), [7], [0.5, 0.5])], 0.0, 0.0)
            text.append(7)
            made.learn(request)
    most = min(requests, SAMPLED) * STEPS
    assert 0.8 * most <= sum(observed) <= 1.2 * most
    assert 0.8 * most <= len(expected) <= 1.2 * most
