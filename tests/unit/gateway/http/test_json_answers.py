"""Answers with log probabilities, written in pieces, say what they say in one."""

import asyncio
import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi.responses import JSONResponse
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionLogProb,
    ChatCompletionLogProbs,
    ChatCompletionLogProbsContent,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs, CompletionResponse, CompletionResponseChoice
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.pooling.embed.serving import ServingEmbedding
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.logprobs import Logprob

from backend.engine.front import deferred
from backend.engine.front.pooling import Embedding
from gateway.http.json_answers import Whole, body
from tests.support.watchers import attempts

USAGE = UsageInfo(prompt_tokens=1, completion_tokens=2, total_tokens=3)


def of_chat() -> ChatCompletionResponse:
    tops = [ChatCompletionLogProb(token='"\n', logprob=-0.5, bytes=[34, 10]), ChatCompletionLogProb(token="é", logprob=-9999.0)]
    content = [
        ChatCompletionLogProbsContent(token='"\n', logprob=-0.5, bytes=[34, 10], top_logprobs=tops),
        ChatCompletionLogProbsContent(token="b", logprob=-1e-9, top_logprobs=[]),
    ]
    logprobs = [ChatCompletionLogProbs(content=content), None, ChatCompletionLogProbs(content=None)]
    choices = [
        ChatCompletionResponseChoice(index=i, message=ChatMessage(role="assistant", content="é"), logprobs=each)
        for i, each in enumerate(logprobs)
    ]
    return ChatCompletionResponse(model="demo", choices=choices, usage=USAGE)


def of_text() -> CompletionResponse:
    logprobs = CompletionLogProbs(
        text_offset=[0, 1], token_logprobs=[None, -2.0], tokens=["a", '"'], top_logprobs=[None, {'"': -2.0, "é": -3.0}]
    )
    choice = CompletionResponseChoice(index=0, text='a"', logprobs=logprobs)
    return CompletionResponse(model="demo", choices=[choice], usage=USAGE)


def of_prompts() -> CompletionResponse:
    logprobs = [None, *({5: Logprob(-0.5, 1, '"'), at: Logprob(-1.0, 2, "é")} for at in range(300))]
    choices = [CompletionResponseChoice(index=i, text="a", prompt_logprobs=logprobs) for i in range(2)]
    return CompletionResponse(model="demo", choices=choices, usage=USAGE)


def of_response() -> ResponsesResponse:
    token = {"token": "é", "logprob": -0.5, "bytes": [1], "top_logprobs": [{"token": '"', "logprob": -1.0, "bytes": [2]}]}
    text = {"type": "output_text", "text": "é", "annotations": [], "logprobs": [token] * 300}
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
    thought = {"id": "r", "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]}
    fields = {"parallel_tool_calls": True, "temperature": 1, "tool_choice": "auto", "tools": [], "top_p": 1}
    more = {"background": False, "max_output_tokens": 5, "service_tier": "auto", "status": "completed", "truncation": "auto"}
    return ResponsesResponse.model_validate({"model": "demo", "output": [thought, message], **fields, **more})


def dumped(answer: Any) -> dict[str, Any]:
    made: dict[str, Any] = answer.model_dump(mode="json", by_alias=True)
    return made


@pytest.mark.parametrize(
    ("answer", "shown"),
    [(of_chat(), body), (of_text(), body), (of_prompts(), body), (of_response(), dumped)],
    ids=["chat", "text", "prompts", "response"],
)
async def test_in_pieces_it_says_the_same(answer: Any, shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "WHOLE_BYTES", 100)
    whole = shown(copy.deepcopy(answer))
    made = Whole(answer, shown)
    assert '"logprob":' not in json.dumps(made.body)
    response: Any = made.response({**made.body, "outrider": {"choices": []}})
    written = b"".join([piece async for piece in response.body_iterator])
    assert (response.headers["content-type"], response.headers["content-length"]) == ("application/json", str(len(written)))
    assert json.loads(written) == {**whole, "outrider": {"choices": []}}


def embedded(count: int, size: int) -> list[Any]:
    vectors = torch.rand(count, size)
    return [SimpleNamespace(outputs=SimpleNamespace(data=each), prompt_token_ids=[1, 2]) for each in vectors]


@pytest.mark.parametrize("form", ["float", "base64"])
async def test_vectors_one_by_one_say_the_same_and_many_hold_nobody_up(
    form: Any, timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = Embedding.__new__(Embedding), ServingEmbedding.__new__(ServingEmbedding)
    theirs.json_response_cls = JSONResponse
    arguments = (embedded(3, 4), "id", 1, "demo", form, "float32", "native")
    whole = json.loads(bytes(theirs._openai_json_response(*arguments).body))
    with monkeypatch.context() as patch:
        patch.setattr(deferred, "WHOLE_BYTES", 100)
        written = json.loads(b"".join([piece async for piece in ours._openai_json_response(*arguments).body_iterator]))
    for each in (*whole["data"], *written["data"]) if form == "float" else ():
        # vLLM 0.33 writes as few digits as tell float32 numbers apart.
        each["embedding"] = torch.tensor(each["embedding"]).tolist()
    assert written == whole
    results = embedded(2048, 1024)
    for stalls in attempts(timed):
        with stalls.watched():
            made = await asyncio.to_thread(ours._openai_json_response, results, "id", 1, "demo", form, "float32", "native")
        async for piece in made.body_iterator:
            assert len(piece) <= deferred.WHOLE_BYTES
