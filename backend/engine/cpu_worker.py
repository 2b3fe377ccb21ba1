"""vLLM's CPU worker with our runner mixins.  Worker process.

Never to be imported where there is a GPU: vLLM's module replaces torch's streams, events and memory functions.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from backend.engine.cpu_kernels import repack_output_matrix, repair_cpu_kernels
from backend.engine.runner import SeededPrefill, UndraftedSteps
from backend.engine.worker import Mixed


class OutriderCpuWorker(Mixed, CPUWorker):
    """vLLM's CPU worker with our mixins."""

    platform_mixins = (SeededPrefill, UndraftedSteps)

    def init_device(self) -> None:
        """vLLM's method of the same name; see `cpu_kernels.py`."""
        super().init_device()
        repair_cpu_kernels()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's method of the same name; see `cpu_kernels.py`."""
        super().reload_weights(*args, **kwargs)
        repack_output_matrix(self.model_runner.get_model())

    def finish_weight_update(self) -> None:
        """vLLM's method of the same name; see `cpu_kernels.py`."""
        super().finish_weight_update()
        repack_output_matrix(self.model_runner.get_model())
