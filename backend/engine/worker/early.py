"""Goes over between steps that begin early and others (`backend/engine/early.py`).  Worker process, on the model's thread.

In an early step the runner does not know the tokens before it: it leaves them on the device, and notes -1 in their place.
"""

from typing import Any

from backend.engine.counting import StepOrders


class EarlyRunner:
    """Mixin over vLLM's V1 model runner."""

    use_async_scheduling: bool

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """vLLM's method of the same name."""
        orders: StepOrders = scheduler_output.outrider
        if orders.is_early != self.use_async_scheduling:
            self._go_over(orders)
        return super().execute_model(scheduler_output, intermediate_tensors)  # type: ignore[misc]

    def _go_over(self, orders: StepOrders) -> None:
        """No step is under way: forgets what vLLM keeps for the next early step, and fills in the tokens."""
        runner: Any = self
        batch = runner.input_batch
        self.use_async_scheduling = orders.is_early
        batch.prev_sampled_token_ids = batch.prev_req_id_to_index = None
        batch.sampled_token_ids_cpu = batch.async_copy_ready_event = None
        for request_id, state in runner.requests.items():
            # vLLM would expect drafts of the last step to be judged on the device.
            state.prev_num_draft_len = 0
            length, last = orders.settled.get(request_id, (0, []))
            if last:
                state.output_token_ids[length - len(last) :] = last
                if (row := batch.req_id_to_index.get(request_id)) is not None:
                    end = int(batch.num_prompt_tokens[row]) + length
                    batch.token_ids_cpu[row, end - len(last) : end] = last
