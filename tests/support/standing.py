"""Requests that stand still until the engine is paused, so that a test's call meets them in the middle.  Tests only.

A verifier whose `logits_processors` name `Standing` makes no step while a request with `stand_at` in its `extra_args` has so
many tokens and all others have one.  Any pause, also that of an update, lets the requests that are present go on.
"""

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from backend.engine.loop import TICK_S, EngineLoop

STAND_AT = "stand_at"


class Standing(AdapterLogitsProcessor):
    """Changes no logits: vLLM makes it where the engine runs, and that puts the gate into the engine's loop."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        EngineLoop._wait = _wait_at_the_gate  # type: ignore[method-assign]
        Scheduler.set_pause_state = _release

    def is_argmax_invariant(self) -> bool:
        return True

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Accepts any parameters."""

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        return None


_wait, _set_pause_state = EngineLoop._wait, Scheduler.set_pause_state
_released: set[str] = set()


def _stands(request_id: str, request: Any) -> bool:
    length = (getattr(request.sampling_params, "extra_args", None) or {}).get(STAND_AT)
    return length is not None and request_id not in _released and request.num_output_tokens >= length


def _wait_at_the_gate(self: EngineLoop) -> tuple[str, float] | None:
    requests = self._scheduler.requests
    if any(_stands(*each) for each in requests.items()) and all(each.num_output_tokens for each in requests.values()):
        return "no_work", TICK_S
    return _wait(self)


def _release(self: Scheduler, state: PauseState) -> None:
    if state != PauseState.UNPAUSED:
        _released.update(self.requests)
    _set_pause_state(self, state)
