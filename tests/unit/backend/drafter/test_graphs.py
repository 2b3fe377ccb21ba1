"""Steps as a CUDA graph replays them: recorded over padding, then run again and again on tensors changed in place.

What is replayed has no Python: numbers, shapes and addresses are those of the recording, which may read no result.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backend.drafter import decoding, dflash, draws
from backend.drafter.attention import cpu as attention
from backend.drafter.eagle import EagleProposer
from backend.drafter.proposer import GREEDY, Drafted, Sampling
from backend.noise import cpu as noise
from tests.support.drafter_heads import TinyHead, make_one_pass, make_proposer
from tests.support.drafter_sessions import begun, tokens_of
from tests.support.reads import nothing_read

KERNELS = (attention, "attend"), (attention, "rms_norm"), (noise, "rank"), (noise, "gumbel"), (noise, "lay_out")
SAMPLINGS = {
    "greedy": [GREEDY],
    "independent": [Sampling.of(1, 1.0, True)],
    "restricted": [Sampling.of(1, 1.0, True, 5)],
    "mixed": [GREEDY, Sampling.of(1, 0.8), Sampling.of(2, 0.7, True, 5)],
}
REPLAYED = Counter[str]()


class Recording(TorchDispatchMode):
    """In place of a graph: the operators and kernels of a step, and the tensors that they read and made."""

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__()
        self._name = step.__name__
        self._calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        with ExitStack() as stack:
            for place, name in KERNELS:
                stack.enter_context(mock.patch.object(place, name, partial(self._note, getattr(place, name))))
            stack.enter_context(self)
            stack.enter_context(nothing_read())
            step()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._note(operator, *args, **(kwargs or {}))

    def _note(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = run(*args, **kwargs)
        self._calls.append((run, args, kwargs, made))
        return made

    def replay(self) -> None:
        REPLAYED[self._name] += 1
        for run, args, kwargs, made in self._calls:
            for place, new in zip(tree_leaves(made), tree_leaves(run(*args, **kwargs)), strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != new.data_ptr():
                    place.copy_(new)


def spread(darts: Tensor, generator: Any) -> Tensor:
    """Numbers that depend on place alone: batches of other sizes draw the same."""
    rows, columns = (torch.arange(size) for size in darts.shape)
    return darts.copy_((0.37 * rows.unsqueeze(1) + 0.61 * columns) % 1)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    REPLAYED.clear()
    for place in (decoding, dflash):
        monkeypatch.setattr(place, "captured", lambda pool, step: Recording(step))
        monkeypatch.setattr(place, "SIZES", (1, 4, 16, 64))
    monkeypatch.setattr(dflash, "DEPTHS", (8,))
    monkeypatch.setattr(draws, "_likeliest", lambda logits, count: logits.topk(count, dim=1))
    monkeypatch.setattr(torch.Tensor, "uniform_", spread)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    with torch.inference_mode():
        yield


def assert_same(one: Drafted, other: Drafted) -> None:
    assert one.tokens == other.tokens
    assert one.signs == pytest.approx(other.signs, rel=1e-3, abs=1e-3)


def assert_replayed_is_eager(proposers: list[EagleProposer], samplings: list[Sampling]) -> None:
    """Drafts and outcomes of the first proposer, which replays, are those of the second, while requests come and go.

    Longer drafts, and more rows, than were captured are among them.
    """
    sides = [[begun(p, key, 20 + key, samplings[key % len(samplings)]) for key in range(6)] for p in proposers]
    for turn, (count, k, likely) in enumerate(((6, 6, 4), (1, 20, 4), (3, 6, 24), (6, 6, 4))):
        drafts, ahead = [], []
        for proposer, requests in zip(proposers, sides, strict=True):
            asked = requests[:count]
            drafts.append(proposer.draft([request.ask(k) for request in asked]))
            verifying = [[*drafted.tokens[:2], *tokens_of(turn, 2)] for drafted in drafts[0]]
            outcomes = proposer.draft_outcomes([r.premise(own, likely) for r, own in zip(asked, verifying, strict=True)])
            ahead.append([(o.accepted, o.token, list(o.tokens)) for of_one in outcomes for o in of_one])
            for key, request in enumerate(asked):
                request.commit(tokens_of(10 * turn + key, 1 + (key + turn) % 3))
        for one, other in zip(*drafts, strict=True):
            assert_same(one, other)
        assert ahead[0] == ahead[1]


@pytest.mark.parametrize("samplings", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_replayed_steps_draft_what_eager_ones_do(tmp_path: Path, samplings: list[Sampling]) -> None:
    head = TinyHead(layers=2, draft_vocab=40)
    replaying, eager = (make_proposer(tmp_path / name, head, 16384, as_on_gpu=True) for name in "ab")
    replaying._decoder._capture()
    eager._decoder._captured.clear()
    assert_replayed_is_eager([replaying, eager], samplings)
    assert min(REPLAYED[name] for name in ("pick", "advance_and_pick", "advance_forced", "extend")) > 2


@pytest.mark.parametrize("samplings", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_replayed_passes_draft_what_eager_ones_do(tmp_path: Path, kind: str, samplings: list[Sampling]) -> None:
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    head = TinyHead(kind, layers=2, draft_vocab=40, dflash=windows)
    replaying, eager = (make_one_pass(tmp_path / name, head) for name in "ab")
    replaying._capture()
    assert_replayed_is_eager([replaying, eager], samplings)
    assert REPLAYED["compute"] == 4
