"""Answers with log probabilities, written in pieces, say what they say in one."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionLogProb,
    ChatCompletionLogProbs,
    ChatCompletionLogProbsContent,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs, CompletionResponse, CompletionResponseChoice
from vllm.entrypoints.serve.engine.protocol import UsageInfo

from gateway import answers

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


@pytest.mark.parametrize("answer", [of_chat(), of_text()], ids=["chat", "text"])
def test_in_pieces_it_says_the_same(answer: Any) -> None:
    whole = answers.body(copy.deepcopy(answer))
    pieces = answers.InPieces(answer, answers.body)
    response = pieces.response({**pieces.body, "outrider": {"choices": []}})
    assert response.media_type == "application/json"
    assert json.loads(bytes(response.body)) == {**whole, "outrider": {"choices": []}}
