"""vLLM's front half for a rollout: checks sampling parameters, makes responses.  A gateway's front half is `client.py`."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.logprobs import Logprob
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor

from backend.config import Settings
from backend.engine.front.client import Core, Outputs
from backend.engine.front.config import PARAMETERS, VERIFIERS, build_vllm_config
from backend.engine.front.grammar import Check

OFFERED = PARAMETERS - {
    "detokenize",
    "flat_logprobs",
    "n",
    "prompt_logprob_start",
    "prompt_logprob_token_ids",
    "stream_interval",
}
"""Sampling parameters of a rollout: without those that shape an answer's stream, or only score a prompt."""
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have, as in vLLM's own answers."""


class OfflineProcessor:
    """Checks requests as a gateway with these settings does.  Raises `ValueError` for engine arguments that are wrong."""

    def __init__(self, settings: Settings, model_dir: str) -> None:
        config = build_vllm_config(settings, model_dir)
        self.max_model_len: int = config.model_config.max_model_len
        self._inputs = InputProcessor(config)
        # `params` checks structured outputs itself, each only once.
        self._inputs.structured_outputs_config = None
        self._check = Check(config)
        self._checked: dict[str, StructuredOutputsParams | str] = {}

    def params(self, prompt: list[int], given: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters for a prompt, from vLLM's names.  Raises `ValueError`, with the parameter in its message.

        Without `max_tokens`, or if it is None, a response may fill the context.
        """
        if unknown := sorted(given.keys() - OFFERED):
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(sorted(OFFERED))}")
        try:
            json.dumps(given, allow_nan=False)  # a sampler that is given NaN would harm the whole batch
            params = msgspec.convert({"max_tokens": None, **given}, SamplingParams, str_keys=True)
            if any(name.startswith(VERIFIERS) for name in params.extra_args or ()):
                raise ValueError(f"extra_args: names that begin with {VERIFIERS} belong to verifiers")
            params.output_kind, params.flat_logprobs = RequestOutputKind.FINAL_ONLY, True
            if params.structured_outputs is not None:
                params.structured_outputs = self._compiled(params.structured_outputs)
            made = self._inputs.process_inputs("", tokens_input(prompt), params, ("generate",)).sampling_params
        except (VLLMValidationError, TypeError, AttributeError) as error:
            raise ValueError(str(error)) from error
        assert made is not None
        return made

    def outputs(self, core: Core) -> Outputs:
        """Makes responses of this core's outputs from now on."""
        return Outputs(core, self._inputs.tokenizer, log_stats=False)

    def _compiled(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        key = repr(params)
        if key not in self._checked:
            try:
                self._checked[key] = self._check(params)
            except (VLLMValidationError, ValueError, TypeError, RuntimeError) as error:
                self._checked[key] = str(error).partition("\n")[0]
        found = self._checked[key]
        if isinstance(found, str):
            raise ValueError(f"structured_outputs: {found}")
        return found


def response_row(response: RequestOutput) -> dict[str, Any]:
    """A response's tokens, text, end and log probabilities as JSON; `logprobs` is shaped as in `/inference/v1/generate`."""
    (output,) = response.outputs
    row = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.logprobs is not None:
        places = [_candidates(place) for place in output.logprobs]
        row["logprobs"] = {"content": [{**place[0], "top_logprobs": place} for place in places]}
    if response.prompt_logprobs is not None:
        row["prompt_logprobs"] = [_candidates(place) if place else None for place in response.prompt_logprobs]
    return row


def _candidates(place: Mapping[int, Logprob]) -> list[dict[str, Any]]:
    """Log probabilities of one place: first that of its token, then the most likely tokens."""
    return [
        {"token_id": token, "logprob": max(each.logprob, LEAST_LOGPROB), "rank": each.rank} for token, each in place.items()
    ]
