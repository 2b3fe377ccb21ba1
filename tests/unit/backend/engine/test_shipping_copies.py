"""What shipping a step copies, and that it waits for nothing else."""

import tracemalloc

import numpy as np
import pytest
import torch

from backend.engine.features import FeatureShipper
from backend.fleet import DrafterRef
from backend.transport import Wire
from tests.support.reads import nothing_read
from tests.support.rows import connected, run_step, step_of

HANDED_ON = {
    "RowLogs._append": "the rows of all requests, projected: one copy, in host memory",
}


@pytest.mark.parametrize("rejected", [0, 1])
def test_a_step_is_shipped_with_one_copy_from_the_device_and_two_in_host_memory(rejected: int) -> None:
    """A row's bytes go into its request's log, and from there into the message."""
    project, frames = torch.nn.Linear(12, 4096, bias=False).requires_grad_(False), list[bytes]()

    class Socket:
        def send(self, header: bytes, frame: bytes = b"") -> bool:
            frames.append(frame)
            return True

        def receive(self) -> None: ...

    shipper = FeatureShipper(lambda head: project, handover_bytes=1 << 30)
    with connected(lambda address: Socket()):
        shipper.set_drafters(Wire(), "v", {DrafterRef("d0", "i", "d0", "", 1): 0})
    counts = [1 + i % 9 for i in range(64)]
    rows = sum(counts) + rejected * len(counts)
    for n in range(2):
        step = step_of([(f"r{i}", count * n, count, range(40)) for i, count in enumerate(counts)], rejected)
        layers = [torch.randn(rows, 4) for _ in range(3)]
        tracemalloc.start()
        with nothing_read(HANDED_ON) as reads:
            run_step(shipper, step, layers)
        copied = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert reads == {"RowLogs._append": 1}
        assert 2 * len(frames[-1]) < copied < 2.2 * len(frames[-1])
        final = torch.arange(rows).tensor_split(np.cumsum(step.computed)[:-1].tolist())
        at = torch.cat([own[:count] for own, count in zip(final, counts, strict=True)])
        assert frames[-1] == project(torch.cat(layers, dim=1)[at]).numpy().tobytes()
