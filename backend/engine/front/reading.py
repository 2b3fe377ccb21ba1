"""How vLLM's parsers of tool calls and reasoning read an answer.  Gateway's event loop.

Many of vLLM's parsers lose text when one delta has several tokens, as with speculation or a slow client.  Here each gets one
token at a time, also where an output has more.  What neighbouring tokens add to one text is one event again.
"""

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.outputs import CompletionOutput
from vllm.parser.abstract_parser import Parser
from vllm.tool_parsers.streaming import _scan_required_tool_calls
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

PRIMING = 8
"""Tokens of the prompt after which a text is cut into tokens as after the whole prompt: vLLM's own detokenizers take 5 to 7."""


class Reading(Parser):
    """A parser of vLLM that reads token by token, and keeps the whole calls of a `required` answer that was cut."""

    _detokenizer: IncrementalDetokenizer | None = None
    _handed: tuple[DeltaMessage | None] | None = None

    def adjust_request(self, request: Any) -> Any:
        """vLLM's method of the same name, which joins the schemas of all tools if a call is `required`."""
        tools = request.tools
        if not tools or request.tool_choice != "required":
            return super().adjust_request(request)
        request.tools = [_rooted(tool) for tool in tools]
        try:
            adjusted = super().adjust_request(request)
        finally:
            request.tools = tools
        adjusted.tools = tools
        return adjusted

    def read(self, output: CompletionOutput, prompt: list[int] | None, request: Any, params: Any) -> Iterator[CompletionOutput]:
        """The output in parts; `parse_delta` then returns a part's message.  `params` has the request's stop strings."""
        if self._detokenizer is None:
            if not output.token_ids and not output.text:
                yield output  # Only a part of a long prompt was computed.
                return
            settings = SimpleNamespace(
                sampling_params=params, prompt_token_ids=(prompt or [])[-PRIMING:], prompt_embeds=None, request_id=""
            )
            self._detokenizer = IncrementalDetokenizer.from_new_request(self.model_tokenizer, settings)
        tokens, begin, message = list(output.token_ids), 0, None
        texts = self._texts(tokens, output.text)
        last = len(texts) - 1
        for at, text in enumerate(texts):
            finished = output.finish_reason is not None and at == last
            more = super().parse_delta(text, tokens[at : at + 1], request, prompt, finished=finished)
            if _join(message, more):
                message = message if _parts(message) else more or message
                continue
            self._handed = (message,)
            yield _part(output, begin, at, texts)
            begin, message = at, more
        self._handed = (message,)
        yield _part(output, begin, len(tokens), texts) if begin else output

    def _texts(self, tokens: list[int], text: str) -> list[str]:
        """The text that each token adds, as if the tokens came one by one; what is left belongs to the last."""
        assert self._detokenizer is not None
        ends = [0]
        for token in tokens:
            self._detokenizer.update([token], False)
            ends.append(ends[-1] + len(self._detokenizer.get_next_output_text(False, True)))
        ends[max(1, len(tokens)) :] = [len(text)]
        return [text[begin:end] for begin, end in pairwise(ends)]

    @property
    def is_silent(self) -> bool:
        """Whether the part that `read` has yielded last adds to no text."""
        return self._handed is not None and not _parts(self._handed[0])

    def parse_delta(self, *args: Any, **kwargs: Any) -> DeltaMessage | None:
        """The message of the part that `read` has yielded last."""
        if self._handed is None:
            return super().parse_delta(*args, **kwargs)
        (message,), self._handed = self._handed, None
        for call in message.tool_calls if message else ():
            if call.function is not None and call.function.name is None:
                # vLLM would write `null`, which clients may add to the name.
                call.function.model_fields_set.discard("name")
        return message

    def _extract_tool_calls(self, content: str | None, request: Any, *args: Any, **kwargs: Any) -> Any:
        if content and request.tool_choice == "required" and self._tool_parser.supports_required_and_named:
            content = _whole_calls(content)
        return super()._extract_tool_calls(content, request, *args, **kwargs)


def _whole_calls(content: str) -> str:
    """The calls of a JSON list that may have been cut, without the last one if it is not whole."""
    try:
        json.loads(content)
    except ValueError:
        spans = [each for each in _scan_required_tool_calls(content) if each.args_end is not None and each.name is not None]
        calls = [{"name": each.name, "parameters": json.loads(content[each.args_start : each.args_end])} for each in spans]
        return json.dumps(calls, ensure_ascii=False)
    return content


def _part(output: CompletionOutput, begin: int, end: int, texts: list[str]) -> CompletionOutput:
    """Some tokens of an output; only its last part has ended."""
    is_last = end == len(output.token_ids)
    return replace(
        output,
        text="".join(texts[begin:end]),
        token_ids=output.token_ids[begin:end],
        logprobs=None if output.logprobs is None else output.logprobs[begin:end],
        finish_reason=output.finish_reason if is_last else None,
        stop_reason=output.stop_reason if is_last else None,
    )


def _parts(message: DeltaMessage | None) -> list[Any]:
    """The texts that a message adds to: fields, and numbers of tool calls."""
    if message is None:
        return []
    return [name for name in ("reasoning", "content") if getattr(message, name)] + [each.index for each in message.tool_calls]


def _join(first: DeltaMessage | None, then: DeltaMessage | None) -> bool:
    """Adds a message to the first, if both add to the same text; says whether they are one message, or one is empty."""
    into, added = _parts(first), _parts(then)
    if not into or not added:
        return True
    assert first is not None
    assert then is not None
    if len(into) > 1 or into != added:
        return False
    if not then.tool_calls:
        setattr(first, added[0], getattr(first, added[0]) + getattr(then, added[0]))
        return True
    function, more = first.tool_calls[0].function, then.tool_calls[0].function
    if function is None or more is None or more.name or then.tool_calls[0].id:
        return False
    function.arguments = (function.arguments or "") + (more.arguments or "")
    return True


def _rooted(tool: Any) -> Any:
    """The tool with a schema whose references hold within any other: all of it is one definition, named as the tool."""
    holder = getattr(tool, "function", tool)
    schema = getattr(holder, "parameters", None)
    if not isinstance(schema, dict) or (within := _moved(schema, f"#/$defs/{holder.name}")) == schema:
        return tool
    moved = holder.model_copy(update={"parameters": {"$ref": f"#/$defs/{holder.name}", "$defs": {holder.name: within}}})
    return moved if holder is tool else tool.model_copy(update={"function": moved})


def _moved(schema: Any, root: str) -> Any:
    """The schema with references that begin at `root`."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, root) for name, value in schema.items()}
    ref = schema.get("$ref")
    return moved | {"$ref": root + ref[1:]} if isinstance(ref, str) and ref.startswith("#") else moved


def reading(parser: type[Parser] | None) -> type[Parser] | None:
    """The class of parsers that read so."""
    return None if parser is None else type(f"Reading{parser.__name__}", (Reading, parser), {})


class ReadsChats:
    """Serving classes of chats whose parsers read token by token."""

    parser_cls: type[Parser] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser_cls = reading(self.parser_cls)

    def chat_completion_stream_generator(self, request: Any, result_generator: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's stream."""
        one, parsers = copy(self), list[Reading]()

        def make_parser(*given: Any) -> Reading:
            parsers.append(self._make_parser(*given))  # type: ignore[attr-defined]
            return parsers[-1]

        one._make_parser = make_parser  # type: ignore[attr-defined]
        results = result_generator if self.parser_cls is None else _read_all(result_generator, parsers, request)
        return super(ReadsChats, one).chat_completion_stream_generator(request, results, *args, **kwargs)  # type: ignore[misc]


async def _read_all(results: AsyncGenerator[Any, None], parsers: list[Reading], request: Any) -> AsyncGenerator[Any, None]:
    """The results, each output in the parts that its choice's parser reads."""
    async with aclosing(results):
        async for result in results:
            for output in result.outputs:
                for part in parsers[output.index].read(output, result.prompt_token_ids, request, request):
                    one = copy(result)
                    one.outputs = [part]
                    yield one


async def read_contexts(contexts: AsyncGenerator[Any, None], request: Any, params: Any) -> AsyncGenerator[Any, None]:
    """A response's contexts, each once for every part of its last output.

    Log probabilities of tokens without text, which vLLM drops, come with the next text.
    """
    tokens: list[int] = []
    logprobs: list[Any] = []
    async with aclosing(contexts):
        async for context in contexts:
            result, parser = context.last_output, context.response_parser
            if result is None or not result.outputs:
                yield context
                continue
            output = result.outputs[0]
            parts = [output] if parser is None else parser.read(output, result.prompt_token_ids, request, params)
            for part in parts:
                if part.logprobs is not None:
                    tokens += part.token_ids
                    logprobs += part.logprobs
                    if part.text if parser is None else not parser.is_silent:
                        part = copy(part)
                        part.token_ids, part.logprobs, tokens, logprobs = tokens, logprobs, [], []
                context.last_output = copy(result)
                context.last_output.outputs = [part]
                yield context
