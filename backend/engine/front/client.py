"""vLLM's `AsyncLLM` without an engine: its renderer, input and output processors in front of a `Core`.

Everything above (OpenAI serving, n > 1, logprobs, stop strings, structured outputs, aborts) is vLLM's own, unchanged.  This
depends on internals of vLLM 0.32, listed in `tests/unit/backend/engine/test_gateway_contract.py`.  Runs in the gateway's event
loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.renderers import renderer_from_config
from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
from vllm.utils.async_utils import cancel_task_threadsafe
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestOutputCollector

from backend.engine.arguments import adapter_number
from backend.engine.front.grammar import GrammarChecks
from backend.wire.engine import EngineWelcome

MAX_PROMPT_LOGPROBS = 20_000
"""Most log probabilities of a prompt: tokens times 1 + `prompt_logprobs`.  Each holds up other requests for 10 us."""


class Link(Protocol):
    """A connection to one verifier."""

    @property
    def welcome(self) -> EngineWelcome | None:
        """None until the verifier has answered."""
        ...


class Core(Protocol):
    """Takes the place of vLLM's engine; also an `EngineCoreClient`, for vLLM's own calls."""

    on_failed: Callable[[list[str], Exception], None]
    """Called with the ids of requests that cannot go on, and the reason."""
    on_welcome: Callable[[Any], None]
    """Called when a verifier has answered."""

    @property
    def ready_links(self) -> Sequence[Link]: ...

    def routable_links(self) -> Sequence[Link]: ...

    async def admit(self) -> None:
        """Waits until the request of this task may be submitted."""
        ...

    def free_reserved(self) -> None:
        """This task's request will not be submitted completely."""
        ...

    def start(self) -> None: ...

    async def abort_requests_async(self, request_ids: list[str]) -> None: ...

    def on_emitted(self, request_id: str, tokens: int, last: bool) -> None:
        """So many more tokens are in an answer; `last`: there will be no more."""
        ...

    def shutdown(self, timeout: float | None = None) -> None: ...


SHORT = 2_000
"""Characters; a tokenizer takes less than a millisecond for so many."""
SCALARS = (str, bool, int, float, type(None))
CoreT = TypeVar("CoreT", bound=Core)

Submit = Callable[[], Awaitable[RequestOutputCollector]]
"""Submits one prompt; the collector it returns has the request's id."""

submissions: ContextVar[list[Submit] | None] = ContextVar("submissions", default=None)
"""Those of this task's request, one per prompt.  A list here allows vLLM's serving classes to answer with a `PlainStream`."""


class Outputs(OutputProcessor):
    """vLLM's, which tells the core what it puts into answers: not what came after a stop string."""

    def __init__(self, core: Core, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.core = core

    def process_outputs(self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any) -> OutputProcessorOutput:
        known = [output for output in engine_core_outputs if output.request_id in self.request_states]
        processed = super().process_outputs(engine_core_outputs, *args, **kwargs)
        for output in known:
            # It has cut off surplus tokens.
            self.core.on_emitted(output.request_id, len(output.new_token_ids), output.request_id not in self.request_states)
        return processed


class FleetClient(AsyncLLM, Generic[CoreT]):
    """The engine client that vLLM's OpenAI layer talks to.  `start` needs the running event loop."""

    def __init__(self, vllm_config: VllmConfig, core: CoreT) -> None:
        # Deliberately no super().__init__(): it would start an engine process.
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.scheduler_config = vllm_config.scheduler_config
        self.observability_config = vllm_config.observability_config
        self.log_requests = False
        self.log_stats = False
        self.renderer = renderer_from_config(vllm_config)
        short_prompts_at_once(self.renderer)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self.grammars = GrammarChecks(vllm_config)
        # `add_request` has already checked structured outputs.
        self.input_processor.structured_outputs_config = None
        self.admission_stats = None
        self.output_processor = Outputs(
            core,
            self.renderer.tokenizer,
            log_stats=False,
            stream_interval=vllm_config.scheduler_config.stream_interval,
            tracing_enabled=False,
            admission_stats=None,
        )
        self.engine_core = core
        self.core: CoreT = core
        """The fleet behind this client."""
        self.logger_manager = None
        self.output_handler: asyncio.Task[None] | None = None
        self.profiler = None
        self._client_count = 1
        self._adding = asyncio.Lock()
        core.on_failed = self._on_failed
        core.on_welcome = self._on_welcome

    def start(self) -> None:
        """Starts the core and the task that processes outputs."""
        self.core.start()
        self._run_output_handler()

    def shutdown(self, timeout: float | None = None) -> None:
        """Drops the links; requests in flight fail.  `AsyncLLM.shutdown` would also unregister metrics that are not ours."""
        self.grammars.close()
        self.core.shutdown(timeout)
        self.renderer.shutdown()
        if self.output_handler is not None:
            cancel_task_threadsafe(self.output_handler)

    def __del__(self) -> None:
        """Does nothing: `AsyncLLM` would call `shutdown`, even if `__init__` has failed."""

    @property
    def ready(self) -> bool:
        """Whether a request could be served now."""
        return bool(self.core.routable_links()) and not self.errored

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """vLLM's method of the same name.  Verifiers identify adapters by number, so all gateways must use the same."""
        lora_request.lora_int_id = adapter_number(lora_request.lora_name, lora_request.lora_path)
        added = bool(await super().add_lora(lora_request))
        # This goes with every request of the adapter; with the flag, verifiers would reload it in every step.
        lora_request.load_inplace = False
        return added

    async def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's method of the same name, after checks and admission."""
        wanted = getattr(params, "prompt_logprobs", None)
        if wanted == -1:
            wanted = self.model_config.get_vocab_size()
        if wanted and isinstance(prompt, dict) and len(prompt.get("prompt_token_ids", ())) * (1 + wanted) > MAX_PROMPT_LOGPROBS:
            raise VLLMValidationError(
                f"The prompt's tokens have more than {MAX_PROMPT_LOGPROBS} log probabilities together.",
                parameter="prompt_logprobs",
            )
        if getattr(params, "structured_outputs", None) is not None:
            params = params.clone()
            params.structured_outputs = await self.grammars.checked(params.structured_outputs)
        try:
            await self.core.admit()
            # A request with many prompts submits all at once; other tasks get turns in between.
            async with self._adding:
                await asyncio.sleep(0)
                return await super().add_request(request_id, prompt, params, *args, **kwargs)
        except BaseException:
            self.core.free_reserved()
            raise

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """vLLM's method of the same name.  It submits when an output is first asked for; a plain stream submits by itself."""
        if (waiting := submissions.get()) is not None:
            waiting.append(partial(self.add_request, request_id, prompt, sampling_params, **options))
        outputs: AsyncGenerator[Any, None] = super().generate(prompt, sampling_params, request_id, **options)
        return outputs

    async def _add_request(self, request: Any, prompt: Any, parent_req: Any, index: int, queue: Any) -> None:
        """vLLM's method of the same name, which registers a request before submitting it: one not submitted must not stay."""
        try:
            await super()._add_request(request, prompt, parent_req, index, queue)
        except BaseException:
            self.output_processor.abort_requests([request.request_id], internal=True)
            raise

    def _on_failed(self, request_ids: list[str], error: Exception) -> None:
        """Ends requests with `error`, together with all sequences of the same n > 1 request."""
        doomed: set[str] = set()
        for request_id in request_ids:
            state = self.output_processor.request_states.get(request_id)
            if state is None:
                continue
            if state.queue is not None:
                state.queue.put(error)
            doomed.add(request_id)
            if state.parent_req is not None:
                doomed.update(state.parent_req.child_requests)
        aborted = self.output_processor.abort_requests(sorted(doomed), internal=True)
        siblings = [request_id for request_id in aborted if request_id not in set(request_ids)]
        if siblings:
            # It never suspends, but this function cannot await it.
            task = asyncio.ensure_future(self.core.abort_requests_async(siblings))
            task.add_done_callback(lambda done: done.exception())

    def _on_welcome(self, link: Link) -> None:
        """Applies a verifier's limits: clients may use the smallest context length of all verifiers."""
        lengths = [each.welcome.max_model_len for each in self.core.ready_links if each.welcome is not None]
        self.model_config.max_model_len = min(lengths)
        self.scheduler_config.max_model_len = min(lengths)
        if link.welcome is not None:
            self.vllm_config.cache_config.num_gpu_blocks = link.welcome.num_kv_blocks


def short_prompts_at_once(renderer: Any) -> None:
    """Makes a vLLM renderer for Hugging Face tokenizers render short prompts in the event loop; others stay unchanged.

    Handing them to a thread and back costs more than the work.
    """
    if not isinstance(renderer, HfRenderer):
        return
    tokenize, template = renderer._tokenize_prompt_async, renderer._apply_chat_template_async
    renderer._tokenize_prompt_async = _unless_long(
        renderer._tokenize_prompt, tokenize, lambda prompt, params: len(prompt["prompt"]) <= SHORT
    )
    renderer._apply_chat_template_async = _unless_long(safe_apply_chat_template, template, _short_chat)


def _unless_long(
    here: Callable[..., Any], elsewhere: Callable[..., Awaitable[Any]], is_short: Callable[..., bool]
) -> Callable[..., Awaitable[Any]]:
    def made(*args: Any, **arguments: Any) -> Awaitable[Any]:
        if not is_short(*args, **arguments):
            return elsewhere(*args, **arguments)
        future = asyncio.get_running_loop().create_future()
        try:
            future.set_result(here(*args, **arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    return made


def _short_chat(model_config: Any, tokenizer: Any, conversation: list[Any], **arguments: Any) -> bool:
    """Whether a chat has few characters and only scalar values.  A template loops over lists and tools: unbounded work."""
    given = [value for name, value in arguments.items() if name != "chat_template"]
    given += [value for message in conversation for value in message.values()]
    return all(isinstance(value, SCALARS) for value in given) and sum(len(str(value)) for value in given) <= SHORT
