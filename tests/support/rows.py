"""Steps as the feature shipper gets them from the runner, and what it sends to.  Tests only."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from backend.engine import feature_link
from backend.engine.features import FeatureShipper
from backend.engine.row_log import StepRows


def step_of(requests: Iterable[tuple[str, int, int, Sequence[int]]], rejected: int = 0) -> StepRows:
    """A step over requests, each with its name, position, number of final rows, and tokens.  `rejected` rows follow each."""
    names, starts, counts, texts = [list(each) for each in zip(*requests, strict=True)] or ([], [], [], [])
    computed = [count + rejected for count in counts]
    return StepRows(names, starts, counts, computed, [np.array(text) for text in texts])


def run_step(shipper: FeatureShipper, step: StepRows, layers: Sequence[torch.Tensor], is_early: bool = False) -> None:
    """Ships a step's rows as the runner does."""
    shipper.begin(step._replace(counts=[0] * len(step.counts)), layers, is_early)
    shipper.end(step)


@contextmanager
def connected(socket: Callable[[str], Any], **changes: Any) -> Iterator[None]:
    """Within it, shippers send to what `socket` makes of a drafter's address; constants of their link may be changed."""
    with mock.patch.multiple(feature_link, connect_dealer=lambda wire, address, *_: address, Dealer=socket, **changes):
        yield
