"""Log probabilities of prompts where the model has LoRA adapters.  Worker process, on the thread that runs the model."""

from typing import Any


class AdapterPromptLogprobs:
    """Mixin over vLLM's V1 model runner: scores one prompt at a time, with its own adapter.

    vLLM's mapping of rows to adapters has a row for each token that is sampled, but a prompt has many rows: the CPU's kernels
    fail, which ends the engine.  (vLLM 0.32, `lora/punica_wrapper/punica_cpu.py`, `add_lora_logits`.)
    """

    def _get_prompt_logprobs_dict(self, hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        """vLLM's method of the same name, called after sampling: the next step maps its rows anew."""
        runner: Any = self
        wanted: dict[str, int] = runner.num_prompt_logprobs
        if not wanted or runner.lora_config is None:
            return super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)  # type: ignore[misc, no-any-return]
        found: dict[str, Any] = {}
        adapters = set(runner.input_batch.lora_id_to_lora_request.values())
        for name in [name for name in wanted if name in num_scheduled_tokens]:
            request = runner.requests[name]
            rows = min(num_scheduled_tokens[name], len(request.prompt_token_ids or ()) - 1 - request.num_computed_tokens)
            if rows > 0:
                mapping = (request.lora_request.lora_int_id if request.lora_request is not None else 0,) * rows
                runner._set_active_loras(mapping, mapping, adapters)
            runner.num_prompt_logprobs = {name: wanted[name]}
            found |= super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)  # type: ignore[misc]
            if not runner.num_prompt_logprobs:
                del wanted[name]
        runner.num_prompt_logprobs = wanted
        return found
