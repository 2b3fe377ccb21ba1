"""A verifier's worker whose steps last as long as a stated accelerator's.  Child processes of `outrider bench --pace`.

Outcomes and features are sent only when the stated device would be done.  On a CPU, vLLM schedules a step after the previous
one has ended, in every mode.  On a GPU, in modes `off` and `native`, it would schedule during the previous step.
"""

from typing import Any, ClassVar

from backend.engine.worker.cpu_worker import OutriderCpuWorker
from backend.engine.worker.runner import RemoteDrafting
from backend.lab.bench.pace import Pace
from backend.lab.bench.pacing import Pacer


class _PacedRunner:
    """Mixed into a runner as the first base class."""

    pace: Pace
    pacer: Pacer
    draft_passes: int
    """Passes of vLLM's own drafter per step, if it drafts token by token."""
    block: int
    """Tokens of each request in vLLM's own drafter's pass, if it drafts in one."""

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """vLLM's method of the same name; starts the step's time."""
        self._tokens = scheduler_output.total_num_scheduled_tokens
        if self._tokens:
            self.pacer.launch(self.pace.target.seconds(self._tokens))
        return super().execute_model(scheduler_output, intermediate_tensors)  # type: ignore[misc]

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        if isinstance(self, RemoteDrafting):
            # Features are sent right after this; they must not be sent before the stated device would know the outcome.
            self.pacer.finish()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's method of the same name, which includes vLLM's own drafting; ends the step's time."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if isinstance(self, RemoteDrafting):
            return output
        requests, head = len(self.input_batch.req_ids), self.pace.native  # type: ignore[attr-defined]
        if self.block:
            self.pacer.extend(head.store.seconds(self._tokens) + head.block.seconds(requests * self.block))
        elif self.draft_passes:
            self.pacer.extend(head.token.seconds(self._tokens) + (self.draft_passes - 1) * head.token.seconds(requests))
        self.pacer.finish()
        return output


class PacedCpuWorker(OutriderCpuWorker):
    """The verifier's worker, in the engine's own process; `pace_verifier` must be called first."""

    pace: ClassVar[Pace]
    pacer: ClassVar[Pacer]

    def init_device(self) -> None:
        """Builds the runner, then makes it a paced one."""
        super().init_device()
        runner, drafting = self.model_runner, self.vllm_config.speculative_config
        runner.__class__ = type(f"Paced{type(runner).__name__}", (_PacedRunner, type(runner)), {})
        runner.pace, runner.pacer = self.pace, self.pacer
        drafts = drafting.num_speculative_tokens if drafting is not None and drafting.use_eagle() else 0
        in_one = drafts > 0 and drafting.parallel_drafting
        runner.draft_passes, runner.block = (0, 1 + drafts) if in_one else (drafts, 0)


def pace_verifier(pace: Pace) -> Pacer:
    """Paces the verifier of this process; call before it is built.  Its worker must be a `PacedCpuWorker`."""
    PacedCpuWorker.pace, PacedCpuWorker.pacer = pace, Pacer()
    return PacedCpuWorker.pacer
