"""vLLM's CUDA worker with our runner mixins; `cpu_worker.py` has the CPU's.  Worker process; `build.py` names the classes by
dotted path.

vLLM's CPU worker builds its runner inline, its GPU worker through a factory.  Swapping the runner's class between `init_device`
and `load_model` works for both.
"""

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from backend.engine.features import FeatureShipper
from backend.engine.row_log import Projection
from backend.engine.worker import tensor_transfer
from backend.engine.worker.fixed import FixedResponses, takes_fixed
from backend.engine.worker.prompt_logprobs import AdapterPromptLogprobs
from backend.engine.worker.runner import RemoteDrafting, ResumedOutputs
from backend.engine.worker.sampling import SharedNoise, all_logits_processors
from backend.fleet import DraftCounters, DrafterRef
from backend.noise import warm_up
from backend.transport import ServerKeys, Wire
from backend.wire.drafting import Part, TargetTensor

KEPT_PROJECTIONS = 8
"""Heads whose `fc` stays loaded; drafters may have different ones."""
HANDOVER_BYTES = 256 << 20
"""Host memory for the features of running requests, which drafters that take over need."""


class Mixed:
    """Common to both workers; `vllm_config.additional_config["outrider"]` decides which mixins apply."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    weight_transfer_engine: Any
    wire: Wire | None = None
    platform_mixins: tuple[type, ...] = ()

    def init_device(self) -> None:
        """Builds vLLM's runner, then swaps its class for one with our mixins."""
        options = self.vllm_config.additional_config["outrider"]
        with all_logits_processors() if options["shared_noise"] else nullcontext():
            super().init_device()  # type: ignore[misc]
        runner_type = type(self.model_runner)
        mixins = (
            *self.platform_mixins,
            *([ResumedOutputs, AdapterPromptLogprobs] if issubclass(runner_type, GPUModelRunner) else []),
        )
        if options["shared_noise"]:
            warm_up(self.model_runner.device)
            mixins = (SharedNoise, *mixins)
        if takes_fixed(self.vllm_config):
            mixins = (FixedResponses, *mixins)
        if options["remote"]:
            mixins = (RemoteDrafting, *mixins)
        if mixins:
            self.model_runner.__class__ = type(f"Outrider{runner_type.__name__}", (*mixins, runner_type), {})
        if options["remote"]:
            has_head = options["head_dir"] is not None
            self.model_runner.set_up_drafting(self._make_shipper(options), tuple(options["aux_layers"]), has_head)

    def _make_shipper(self, options: dict[str, Any]) -> FeatureShipper | None:
        if get_tensor_model_parallel_rank() != 0:
            return None

        if options["raw_features"] or not (options["head_dir"] and options["aux_layers"]):
            return FeatureShipper(lambda head: None, options["ring_bytes"], HANDOVER_BYTES)
        from backend.models.checkpoint import load_fc
        from backend.models.tensor_files import written

        @lru_cache(maxsize=KEPT_PROJECTIONS)
        def load_projection(directory: str, files: object) -> Projection:
            # `fc` runs in the target's dtype: a bfloat16 model's features gain nothing from more.
            return load_fc(directory).to(self.model_runner.device, self.model_runner.dtype)

        def projection(head: str) -> Projection:
            directory = head or options["head_dir"]
            return load_projection(directory, written(directory))

        return FeatureShipper(projection, options["ring_bytes"], HANDOVER_BYTES)

    def set_drafters(
        self, verifier_id: str, epochs: dict[DrafterRef, int], fleet_keys: ServerKeys | None, weights: int = 0
    ) -> None:
        """Applies a new assignment; called between two steps, on every rank."""
        shipper = self.model_runner.shipper
        if shipper is None:
            return
        if self.wire is None:
            self.wire = Wire(fleet_keys)
        shipper.set_drafters(self.wire, verifier_id, epochs, weights)

    def abandon_weight_update(self) -> None:
        """Ends whatever vLLM is loading, and its update session; layers that were loaded wholly keep the new weights."""
        with set_current_vllm_config(self.vllm_config):
            if self.weight_transfer_engine is not None:
                self.weight_transfer_engine.drain_pending()
                self.weight_transfer_engine.reset_weight_update_target()
            self._weight_update_active = False
            tensor_transfer.forget(self.model_runner.get_model(), self.model_config)

    def take_drafting_counters(self) -> dict[str, DraftCounters]:
        """`FeatureShipper.take_counters` on the rank that sends; nothing on the others."""
        shipper = self.model_runner.shipper
        return shipper.take_counters() if shipper is not None else {}

    def target_rows(self, name: TargetTensor, first: int) -> tuple[Part, bytes] | None:
        """The rows that `read_rows` returns for this rank."""
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        return tensor_transfer.read_rows(self.model_runner.get_model(), name, first, rank, ranks)


class OutriderGpuWorker(Mixed, Worker):
    """vLLM's CUDA worker with our mixins."""
