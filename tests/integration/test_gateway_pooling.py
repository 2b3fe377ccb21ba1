"""Embeddings and scores from a real engine: the demo target, turned into a model that embeds."""

import asyncio
import math

import pytest

from tests.support.engine_gateway import engine_fleet
from tests.support.fake_verifier import eventually
from tests.support.running_gateway import CHAT

pytestmark = pytest.mark.engine
EMBEDS = {"engine_args": {"runner": "pooling", "convert": "embed"}}


async def test_texts_are_embedded_scored_and_ranked():
    async with engine_fleet(verifiers=1, mode="off", verifier=EMBEDS) as fleet:
        made = await fleet.client.embeddings.create(model="demo", input=["def f(x):", "def f(x):", "import os"])
        first, again, other = (each.embedding for each in made.data)
        assert len(first) == 256
        assert math.isclose(math.hypot(*first), 1, rel_tol=1e-3)
        assert first == pytest.approx(again, abs=1e-5)
        assert first != pytest.approx(other, abs=1e-2)
        assert made.usage.prompt_tokens > 0
        body = {"model": "demo", "query": "import os", "documents": ["def f(x):", "import os", "return 1"]}
        ranked = (await fleet.http.post("/v1/rerank", json=body)).json()["results"]
        assert ranked[0]["index"] == 1
        pair = {"model": "demo", "text_1": "import os", "text_2": "import os"}
        assert (await fleet.http.post("/v1/score", json=pair)).json()["data"][0]["score"] == pytest.approx(1, abs=1e-3)
        refused = await fleet.http.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        wrong = await fleet.http.post("/v1/embeddings", json={"model": "nope", "input": "x"})
        assert wrong.status_code == 404
        for path in ("/abort_requests", "/pause"):
            await fleet.http.post("/pause?mode=keep")
            embedding = asyncio.create_task(fleet.http.post("/v1/embeddings", json={"model": "demo", "input": ["a", "b"]}))
            await eventually(lambda: len(fleet.core.sequences) == 2)
            await fleet.http.post(path, json={})
            assert ((await embedding).status_code, (await embedding).json()["error"]["code"]) == (503, "aborted")
            await fleet.http.post("/resume")
            assert len((await fleet.client.embeddings.create(model="demo", input="def f(x):")).data[0].embedding) == 256
        await fleet.quiet()


async def test_a_model_that_writes_has_no_embeddings(running):
    for path, body in (("/v1/embeddings", {"input": "x"}), ("/v1/rerank", {"query": "x", "documents": ["y"]})):
        answer = await running.http.post(path, json={"model": "demo", **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model"), answer.text
