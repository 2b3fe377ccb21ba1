"""Plain streams say what vLLM's own classes say: every request of a matrix by both ways, every event compared."""

import asyncio
import json
from unittest.mock import Mock

import pytest
from openai.types import CompletionUsage
from openai.types.chat.chat_completion import ChoiceLogprobs
from tokenizers import Tokenizer
from vllm.v1.engine import FinishReason

from backend.engine.front.stream import PlainStream
from gateway.routes import generate
from tests.integration.test_gateway_abuse import likely
from tests.support.fake_verifier import count_up, eventually
from tests.support.running_gateway import MODEL_DIR, heard

TEXT = 'def naïve(x):\n\t"""漢字 🙂 100%s {content}""" # \\ end\n    return x'
TOKENS = Tokenizer.from_file(f"{MODEL_DIR}/tokenizer.json").encode(TEXT).ids
LENGTH, STOP, ERROR = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR
USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def steps(size: int, finish=LENGTH, stop_reason=None, tokens=TOKENS):
    """The text in steps of `size` tokens: what a verifier emits, step by step."""
    parts = [(tokens[at : at + size], None, None) for at in range(0, len(tokens), size)]
    parts[-1] = (parts[-1][0], finish, stop_reason)
    return parts


BY_ONE, BY_FOUR = steps(1), steps(4)
MATRIX = {
    "one token at a time": ({}, BY_ONE),
    "four at a time": ({}, BY_FOUR),
    "all at once": ({}, steps(len(TOKENS))),
    "one token in all": ({"max_tokens": 1}, steps(1, tokens=TOKENS[:1])),
    "ends within a character": ({}, steps(1, tokens=TOKENS[:6])),
    "usage": (USAGE, BY_FOUR),
    "a stop token": ({"stop_token_ids": [TOKENS[-1]]}, steps(1, STOP, TOKENS[-1])),
    "a stop token that is said": (
        {"stop_token_ids": [TOKENS[-1]], "include_stop_str_in_output": True},
        steps(2, STOP, TOKENS[-1]),
    ),
    "the end of the text": ({}, [*steps(4)[:-1], ([1], STOP, None)]),
    "special tokens": ({"skip_special_tokens": False}, [*steps(4)[:-1], ([1], STOP, None)]),
    "a stop string": ({"stop": ["return"]}, BY_ONE),
    "a stop string within a step": ({"stop": ["naïve"]}, steps(len(TOKENS))),
    "a stop string over steps": ({"stop": ["字 🙂", "x)!"]}, BY_ONE),
    "a stop string that is said": ({"stop": ["🙂"], "include_stop_str_in_output": True}, steps(3)),
    "a stop string that never comes": ({"stop": ["nowhere to be found"]}, BY_FOUR),
    "a stop string, usage": (USAGE | {"stop": ["return"]}, BY_FOUR),
    "a stop string after so many tokens": ({"stop": ["x"], "min_tokens": 9}, BY_FOUR),
    "a step without text": ({}, [([], None, None), *BY_FOUR]),
    "an error": ({}, [*BY_FOUR[:2], ([], ERROR, None)]),
    "an error, usage": (USAGE, [*BY_FOUR[:2], ([], ERROR, None)]),
}


NULLS = ("kv_transfer_params", "weight_versions")
"""What vLLM says from 0.33 on in every event, and plain streams do not."""


class Steps:
    """Each step comes when the one before has been dealt with."""

    def __init__(self, script, core) -> None:
        self.script = script
        self.arrived = asyncio.Event()
        take = type(core).on_outputs

        def on_outputs(link, outputs) -> None:
            take(core, link, outputs)
            self.arrived.set()

        core.on_outputs = on_outputs

    async def __call__(self, verifier, sequence) -> None:
        for tokens, finish, stop_reason in self.script:
            if sequence.aborted.is_set():
                continue
            self.arrived.clear()
            sequence.emit(list(tokens), finish, stop_reason)
            await self.arrived.wait()
            for _ in range(20):
                # All is one loop: each of the tasks that it passes gets its turn.
                await asyncio.sleep(0)


async def events(running, path: str, body: dict, script) -> list:
    """The stream's events without what differs from one request to the next."""
    running.verifier.behaviour = Steps(script, running.core)
    response = await running.http.post(path, json={**body, "stream": True})
    *whole, rest = [each.removeprefix(b"data: ") for each in response.content.split(b"\n\n")]
    found = [*(json.loads(each) if each.startswith(b"{") else each for each in whole), response.status_code, rest]
    await eventually(lambda: running.idle)
    for each in found:
        for place in (each, *each["choices"]) if isinstance(each, dict) and "choices" in each else ():
            for name in NULLS:
                assert place.pop(name, None) is None
    names = {(each.pop("id", None), type(each.pop("created", 0))) for each in found if isinstance(each, dict)}
    assert len(names - {(None, int)}) <= 1
    return found


@pytest.fixture
def plain(monkeypatch):
    """The plain streams there were."""
    started = []
    start = PlainStream.start

    async def counted(self, sink):
        started.append(self)
        await start(self, sink)

    monkeypatch.setattr(PlainStream, "start", counted)
    return started


CHAT = {"model": "demo", "max_tokens": 99, "messages": [{"role": "user", "content": "def f("}]}
COMPLETION = {"model": "demo", "max_tokens": 99, "prompt": "def f("}


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_a_stream_of_nothing_says_how_it_ended(running, path, body, plain):
    """As vLLM's do from 0.33 on."""
    found = await events(running, path, body | USAGE, [([], STOP, None)])
    *_, last = [each["choices"][0] for each in found if isinstance(each, dict) and each["choices"]]
    assert (len(plain), last["finish_reason"], last.get("delta", {}), last.get("text", "")) == (1, "stop", {}, "")


@pytest.mark.parametrize(
    ("path", "body", "matrix"), [("/v1/chat/completions", CHAT, MATRIX), ("/v1/completions", COMPLETION, MATRIX)]
)
async def test_what_vllm_would_say(running, path, body, matrix, plain, monkeypatch):
    for name, (fields, script) in matrix.items():
        plain.clear()
        with monkeypatch.context() as patch:
            ours = await events(running, path, body | fields, script)
            assert len(plain) == 1, name
            processor = running.server.gateway.client.output_processor
            assert not processor.parent_requests, name
            assert not processor.external_req_ids, name
            patch.setattr(generate, "submissions", Mock())
            theirs = await events(running, path, body | fields, script)
            assert len(plain) == 1, name
        assert ours == theirs, name
        assert name.startswith("an error") == any("internal_error" in str(each) for each in ours), name
        for each in ours:
            if isinstance(each, dict) and each.get("choices") == []:
                as_openai_has_it(each["usage"])


def as_openai_has_it(usage: dict) -> None:
    """With each detail that OpenAI has for texts, and besides at most vLLM's count of what was cached anew."""
    parsed = CompletionUsage.model_validate(usage, strict=True)
    assert not parsed.model_extra
    for details, texts in ((parsed.prompt_tokens_details, 2), (parsed.completion_tokens_details, 4)):
        assert details is not None
        assert (details.model_extra or {}).keys() <= {"created_cache_tokens"}
        assert sum(type(value) is int for name, value in details if name in type(details).model_fields) == texts


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_have_the_shape_of_openais(running, stream):
    logprobs = [("/v1/chat/completions", CHAT | {"logprobs": True}), ("/v1/completions", COMPLETION | {"logprobs": 0})]
    for path, body in [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION), *logprobs]:
        running.verifier.behaviour = likely(0) if "logprobs" in body else count_up
        request = body | {"max_tokens": 3, "stream": stream} | (USAGE if stream else {})
        answer = await running.http.post(path, json=request)
        chunks = heard(answer.text) if stream else [answer.json()]
        as_openai_has_it(chunks[-1]["usage"])
        found = [each["logprobs"] for chunk in chunks for each in chunk["choices"] if each.get("logprobs")]
        assert bool(found) == ("logprobs" in body)
        if "messages" in body:
            assert all(each["refusal"] is None and each["content"] for each in found)
            for each in found:
                ChoiceLogprobs.model_validate(each, strict=True)
    many = {"model": "demo", "max_tokens": 3, "logprobs": True, "messages": [CHAT["messages"]]}
    (choice,) = (await running.http.post("/v1/chat/completions/batch", json=many)).json()["choices"]
    assert choice["logprobs"]["refusal"] is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"logprobs": True}),
        ("/v1/chat/completions", CHAT | {"echo": True}),
        ("/v1/chat/completions", CHAT | {"return_prompt_text": True}),
        ("/v1/chat/completions", CHAT | {"return_token_ids": True}),
        ("/v1/completions", COMPLETION | CONTINUOUS),
        ("/v1/completions", COMPLETION | {"prompt": ["def f(", "class A:"]}),
        ("/v1/chat/completions", CHAT | {"n": 2}),
        ("/v1/completions", COMPLETION | {"logprobs": 0}),
        ("/v1/completions", COMPLETION | {"echo": True}),
        ("/v1/completions", COMPLETION | {"stream_interval": 3}),
    ],
)
async def test_what_is_more_than_text_is_left_to_vllm(running, path, body, plain):
    running.verifier.behaviour = Steps([([], STOP, None)], running.core)
    await running.http.post(path, json={**body, "stream": True})
    assert not plain
