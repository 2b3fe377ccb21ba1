"""Decodes token by token, for many rows at once.  Drafter thread.

A row continues its sequence, or is one of several branches behind it; `attention/` says how their cache rows lie.  All that a
step needs lies in tensors which it changes in place, and nothing waits for the device.  So on a GPU a step is a CUDA graph,
captured at the start for a few numbers of rows; rows up to the next such number are padding.  More rows, or longer drafts,
are decoded without graphs, as is everything on a CPU or where a capture fails.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from backend.drafter import cache
from backend.drafter.attention import Reach
from backend.drafter.draws import CAPTURED, SAMPLING_COLUMNS, SHARED, SUPPORT, Draws, Ends, Rules, columns_of, fresh_noise
from backend.drafter.head import Head, Rows, Stretch
from backend.drafter.proposer import Drafted

logger = logging.getLogger(__name__)

SIZES = 1, 2, 4, 8, 16, 32, 64, 128, 256
"""Numbers of rows for which steps are captured."""
GRAPH_STEPS = 16
"""Longest draft for which steps are captured."""
NUMBERS = 8
"""Integers per row that decoding begins with: token, position, place, start, bound, tail, stride, seed."""


class DecodeBatch:
    """The state of `size` rows while at most `steps` tokens are decoded for each."""

    def __init__(self, head: Head, size: int, steps: int, rules: Rules) -> None:
        device = head.device
        self._head = head
        self.count = self.size = size
        self.taken = 0
        """Tokens that the latest `decode` has drawn."""
        self.rules = rules
        self._numbers = torch.empty(NUMBERS, size, dtype=torch.int64, device=device)
        self._ids, self._positions, places, starts, bounds, tails, strides, seeds = self._numbers.unbind()
        self._reach = Reach(places, starts, bounds, tails, strides)
        self._columns = torch.empty(SAMPLING_COLUMNS, size, device=device)
        self.draws = Draws(seeds, self._columns, head.draft_to_target, rules)
        self.output = torch.empty(size, head.config.hidden_size, dtype=head.dtype, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._darts = torch.empty(steps, size, dtype=torch.float64, device=device)
        self._forced = torch.empty(steps, size, dtype=torch.int64, device=device)
        self._outputs = torch.empty(steps, *self.output.shape, dtype=head.dtype, device=device)
        self._marks = torch.empty(3, steps, size, dtype=torch.int32, device=device)
        """Each token drafted, its value and its lead: their bits."""
        support = min(SUPPORT, head.lm_head.shape[1]) if rules.independent else 0
        self._proposals = torch.empty(2, steps, size, support, dtype=torch.int32, device=device)
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        spare = [0, 0, head.capacity, head.capacity, 0, 0, 1, 0]
        self._padding = torch.tensor(spare, device=device).unsqueeze(1)

    def load(self, numbers: Tensor, columns: Tensor | float, output: Tensor | float, fresh: torch.Generator) -> None:
        """Begins anew for `count` rows: `[NUMBERS, count]`, `[SAMPLING_COLUMNS, count]`, `[count, hidden]` to start from."""
        self.count = count = numbers.shape[1]
        self._numbers[:, :count] = numbers
        self._columns[:, :count] = columns
        self.output[:count] = output
        if count < self.size:
            self._numbers[:, count:] = self._padding
            self._columns[:, count:] = 1.0
            self.output[count:] = 0.0
        self._step.zero_()
        if self.rules.independent:
            self._darts.uniform_(generator=fresh)

    def pick(self) -> None:
        """Draws each row's next token."""
        head, darts = self._head, self._darts.index_select(0, self._step).squeeze(0)
        picked = self.draws.pick(head.read(self.output), self._positions + head.token_offset, darts)
        signs = torch.stack((picked.values, picked.leads)).view(torch.int32)
        marks = torch.cat((picked.tokens.to(torch.int32).unsqueeze(0), signs))
        self._marks.index_copy_(1, self._step, marks.unsqueeze(1))
        if picked.ids is not None and picked.chances is not None:
            proposals = torch.stack((picked.ids.to(torch.int32), picked.chances.view(torch.int32)))
            self._proposals.index_copy_(1, self._step, proposals.unsqueeze(1))
        self._ids.copy_(picked.tokens)
        self._step += 1

    def advance(self) -> None:
        """Computes each row's token, at the next place."""
        rows = Rows(self._ids, self._positions, self._reach)
        self.output.copy_(self._head.forward(rows, self._head.feature(self.output), None))
        self._positions += 1
        self._reach.places.add_(self._reach.strides)

    def extend(self) -> None:
        """Computes each row's token on a true feature, in place of the output loaded."""
        self.output.copy_(self._head.forward(Rows(self._ids, self._positions, self._reach), self.output, None))

    def advance_and_pick(self) -> None:
        """Computes each row's token, keeps the output, and draws the next token."""
        self.advance()
        self._outputs.index_copy_(0, (self._step - 1).clamp(min=0), self.output.unsqueeze(0))
        self.pick()

    def advance_forced(self) -> None:
        """Computes the next of the tokens that are given, and keeps its output."""
        self._ids.copy_(self._forced.index_select(0, self._step).squeeze(0))
        self.advance()
        self._outputs.index_copy_(0, self._step, self.output.unsqueeze(0))
        self._step += 1

    def run(self, step: Callable[[], None]) -> None:
        """Runs one of the methods above, as a graph if it was captured."""
        graph = self.graphs.get(step.__name__)
        if graph is None:
            step()
        else:
            graph.replay()

    def capture(self, pool: Any, steps: list[Callable[[], None]]) -> bool:
        """Captures methods as graphs; the rows are padding meanwhile.  Returns whether all could be captured."""
        self._numbers[:] = self._padding
        self._columns[:] = 1.0
        self.output.zero_()
        self._forced.zero_()
        self._darts.zero_()
        for step in steps:
            self._step.zero_()
            graph = captured(pool, step)
            if graph is None:
                return False
            self.graphs[step.__name__] = graph
        return True

    def outputs_of(self, steps: int) -> Tensor:
        """The head's outputs after each of the first `steps` tokens: `[count, steps, hidden]`."""
        return self._outputs[:steps, : self.count].transpose(0, 1).clone()

    def forced(self, tokens: Tensor) -> Tensor:
        """The head's outputs after each of `tokens` `[count, steps]`: `[count, steps, hidden]`."""
        steps = tokens.shape[1]
        self._forced[:steps, : self.count] = tokens.t()
        if self.count < self.size:
            self._forced[:steps, self.count :] = 0
        for _ in range(steps):
            self.run(self.advance_forced)
        return self.outputs_of(steps)

    def decode(self, steps: int, ends: Callable[[], Ends], picks_first: bool) -> list[Drafted]:
        """Drafts at most `steps` tokens per row.  With `picks_first`, the first tokens follow from the outputs loaded.

        A CPU looks after every step whether a draft goes on.  A GPU would have to be waited for, so it makes all steps.
        """
        found = None if self._head.is_asynchronous else ends()
        signs = self._marks[1:, :, : self.count].view(torch.float32)
        taken = 0
        while taken < steps:
            self.run(self.pick if picks_first and not taken else self.advance_and_pick)
            taken += 1
            if found is not None and not found.take(signs[:, taken - 1 : taken].numpy()):
                break
        self.taken = taken
        marks = self._marks[:, :taken, : self.count].cpu()
        proposals = (
            self._proposals[:, :taken, : self.count].permute(2, 0, 1, 3).cpu().numpy() if self.rules.independent else None
        )
        both = marks[1:].view(torch.float32)
        if found is None:
            found = ends()
            found.take(both.numpy())
        return found.cut(marks[0].t().tolist(), both.permute(2, 1, 0).flatten(1).tolist(), proposals)


class Decoder:
    """Gives out decode batches for any number of rows.  With `graphs`, captures their steps on a GPU."""

    def __init__(self, head: Head, graphs: bool) -> None:
        self._head = head
        self._fresh = fresh_noise(head.device)
        self._captured: dict[tuple[int, Rules], DecodeBatch] = {}
        if graphs and head.is_asynchronous:
            self._capture()

    def batch(self, steps: int, rules: Rules, numbers: Tensor, columns: Tensor, output: Tensor) -> DecodeBatch:
        """A decode batch with these rows; it serves until the next call."""
        count = numbers.shape[1]
        found = self._fitting(count, rules) if steps <= GRAPH_STEPS else None
        batch = DecodeBatch(self._head, count, steps, rules) if found is None else found
        batch.load(numbers, columns, output, self._fresh)
        return batch

    def extend(
        self, numbers: Tensor, features: Tensor | None, last: Tensor | None, stretches: Sequence[Stretch] = ()
    ) -> Tensor:
        """Computes rows on given features, as a graph if there is one for so many.  Outputs of the rows `last`; None: of all.

        With `stretches`, long texts among the rows, no graph is used.  The outputs serve until the next call.
        """
        batch = None if stretches else self._fitting(numbers.shape[1], SHARED)
        if batch is None:
            rows = Rows(numbers[0], numbers[1], Reach(*numbers[2:7]), stretches)
            return self._head.forward(rows, features, last)
        batch.load(numbers, 1.0, 0.0 if features is None else features, self._fresh)
        batch.run(batch.extend)
        return batch.output[: batch.count] if last is None else batch.output.index_select(0, last)

    def _fitting(self, count: int, rules: Rules) -> DecodeBatch | None:
        size = next((size for size in SIZES if size >= count), 0)
        return self._captured.get((size, rules.captured()))

    def _capture(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        # The largest first: the others then fit into its memory.
        for size, rules in product(reversed(SIZES), CAPTURED):
            batch = DecodeBatch(self._head, size, GRAPH_STEPS, rules)
            undrawn = [batch.advance_forced, batch.extend] if rules == SHARED else []
            if not batch.capture(pool, [batch.pick, batch.advance_and_pick, *undrawn]):
                self._captured.clear()
                return
            self._captured[size, rules] = batch


def captured(pool: Any, step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
    """A step as a graph, whose memory is the pool's; None, and a line in the log, where it cannot be captured."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # A capture that fails leaves its stream the current one: leaving the outer block puts ours back.
    here = torch.cuda.stream(torch.cuda.current_stream())
    try:
        # Another thread may be drafting: a head is put in place while the one before it still serves.
        with here, torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            step()
    except Exception as error:  # Mostly for want of memory, whatever it is called; the step itself has just run.
        logger.warning("drafts are made without CUDA graphs, for one could not be captured: %r", error)
        return None
    return graph


def rows_behind(sequences: Sequence[cache.Sequence], head: Head) -> Tensor:
    """The numbers of rows that continue each sequence, `[NUMBERS, sequences]`; the tokens are 0."""
    ends = [s.tip[0] - head.token_offset if s.tip else 0 for s in sequences]
    numbers = [[0, end, s.start + s.length, s.start, 0, 0, 1, s.sampling.seed] for s, end in zip(sequences, ends, strict=True)]
    return torch.tensor(numbers, device=head.device).t()


def columns_behind(sequences: Sequence[cache.Sequence], device: torch.device) -> Tensor:
    """How tokens are drawn for each sequence, `[SAMPLING_COLUMNS, sequences]`."""
    return torch.tensor(columns_of([s.sampling for s in sequences]), dtype=torch.float32, device=device)


def tips(sequences: Sequence[cache.Sequence]) -> Tensor:
    """The sequences' tips, the outputs that drafting starts from: `[sequences, hidden]`."""
    outputs = [sequence.tip[1] for sequence in sequences if sequence.tip is not None]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
