"""What a draft costs on a GPU: the operators started do not grow with requests."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backend.drafter.eagle import EagleProposer, ModelProposer
from backend.drafter.head import LONG
from backend.drafter.proposer import GREEDY, Sampling
from backend.models.checkpoint import load_drafter
from tests.support.drafter_heads import TinyHead, make_one_pass, make_proposer, write_target
from tests.support.drafter_sessions import Session, begun, tokens_of
from tests.unit.backend.drafter.test_draft_model import save
from tests.unit.backend.drafter.test_graphs import SAMPLINGS

HEADS = {"head": TinyHead(draft_vocab=40), "two layers": TinyHead(layers=2)}


class Counting(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(operator)] += 1
        return operator(*args, **(kwargs or {}))


def operators(run: Callable[[Any], object], given: Any) -> Counter[str]:
    with Counting() as counting:
        run(given)
    return counting.seen


# Padding takes a few: whether there is any depends on the count.  Each request's tip is a view of one result.
VIEWS = {"aten.slice.Tensor", "aten.fill_.Tensor", "aten.copy_.default", "aten.expand.default"}


def launched(seen: Counter[str]) -> dict[str, int]:
    """Without what depends on the number of requests, and is little."""
    return {name: number for name, number in seen.items() if name not in VIEWS}


def opened(folder: Path, head: TinyHead, count: int, samplings: list[Sampling]) -> tuple[EagleProposer, list[Session]]:
    proposer = make_proposer(folder, head, cache_tokens=16384, as_on_gpu=True)
    return proposer, [begun(proposer, key, 20 + key % 7, samplings[key % len(samplings)]) for key in range(count)]


@pytest.mark.parametrize("samplings", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_operators_do_not_grow_with_requests(tmp_path: Path, head: TinyHead, samplings: list[Sampling]) -> None:
    drafting, enumerating, extending = [], [], []
    for count in (4, 64):
        proposer, requests = opened(tmp_path / str(count), head, count, samplings)
        drafting.append(operators(proposer.draft, [r.ask(4) for r in requests]))
        enumerating.append(operators(proposer.draft_outcomes, [r.premise(tokens_of(count, 3), 4) for r in requests]))
        extending.append(operators(proposer.draft, [r.commit(tokens_of(count, 2)).ask(0) for r in requests]))
    for few, many in (drafting, enumerating, extending):
        assert launched(few) == launched(many)
    assert drafting[1].total() <= drafting[0].total() + 20
    assert enumerating[1].total() <= enumerating[0].total() + 20


def test_operators_of_a_pass_with_a_prompt_do_not_grow_with_requests_that_read_two_tokens(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", TinyHead())
    weights, seen = load_drafter(save(tmp_path / "draft", "llama")[0], target), []
    for count in (4, 64):
        proposer = ModelProposer(weights, 16384)
        requests = [begun(proposer, key, 20).commit(tokens_of(key, 2)) for key in range(count)]
        requests.insert(2, Session(proposer, "prompt", tokens_of(count, 2 * LONG)))
        seen.append(operators(proposer.draft, [r.ask(0) for r in requests]))
    assert launched(seen[0]) == launched(seen[1])


@pytest.mark.parametrize("samplings", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_operators_of_a_pass_with_a_markov_head_do_not_grow_with_requests(tmp_path: Path, samplings: list[Sampling]) -> None:
    proposer, seen = make_one_pass(tmp_path, TinyHead("dspark", layers=2)), []
    for count in (4, 64):
        requests = [begun(proposer, f"{count}{key:02}", 20, samplings[key % len(samplings)]) for key in range(count)]
        seen.append(operators(proposer.draft, [r.ask(4) for r in requests]))
    assert seen[0] == seen[1]


def test_where_a_capture_fails_all_is_drafted_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU, with streams in place of torch's.  A capture fails at its end, and leaves its stream the current one."""
    current = [ours := mock.Mock()]

    @contextmanager
    def stream(other: mock.Mock) -> Iterator[None]:
        before, current[0] = current[0], other
        try:
            yield
        finally:
            current[0] = before

    @contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        current[0] = mock.Mock()
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    fakes: dict[str, Any] = dict.fromkeys(("Stream", "CUDAGraph", "graph_pool_handle"), mock.Mock)
    for name, fake in (fakes | {"stream": stream, "graph": graph, "current_stream": lambda: current[0]}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    one_pass = make_one_pass(tmp_path / "one", TinyHead("dflash", layers=2))
    proposer, (request,) = opened(tmp_path / "two", TinyHead(), 1, [GREEDY])
    both: list[tuple[Any, Session]] = [(proposer._decoder, request), (one_pass, begun(one_pass, 0, 20))]
    for capturing, session in both:
        expected = session.draft(4).tokens
        with torch.inference_mode():
            capturing._capture()
        assert current[0] is ours
        assert not capturing._captured
        assert session.draft(4).tokens == expected
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
