"""A grammar's answer does not depend on the requests before it: the table in docs/reference/api.md, in three orders."""

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.engine_gateway import engine_fleet
from tests.unit.backend.engine.test_grammar_schemas import BACKENDS, rows

pytestmark = [pytest.mark.engine, pytest.mark.campaign]

TABLE: list[tuple[str, dict[str, Any], str]] = [row.values for row in rows()]
OTHERS = [{"choice": ["aa", "bb"]}, {"regex": "[ab]{3}"}, {"grammar": 'root ::= "a" | "b"'}]
BODY = {"model": "demo", "prompt": "x = ", "seed": 7, "max_tokens": 40}


async def answers(backend: str, order: list[dict[str, Any]]) -> dict[str, tuple[int, str]]:
    """Status and text, or the error's message, of a request for each, one after the other, by a fleet that is new."""
    args = {"engine_args": {"structured_outputs_config": {"backend": backend}}}
    found = {}
    async with engine_fleet(verifiers=1, verifier=args) as fleet:
        for each in order:
            answer = await fleet.http.post("/v1/completions", json=BODY | {"structured_outputs": each})
            body = answer.json()
            text = body["choices"][0]["text"] if answer.is_success else str(body["error"])
            found[json.dumps(each)] = answer.status_code, text
    return found


@pytest.mark.parametrize("backend", BACKENDS)
async def test_who_came_first_does_not_matter(backend: str) -> None:
    verdicts = {json.dumps({"json": schema}): verdict for name, schema, verdict in TABLE if name == backend}
    first = [*map(json.loads, verdicts), *OTHERS]
    orders = first, first[::-1], random.Random(1).sample(first, len(first))
    as_listed, *others = [await answers(backend, order) for order in orders]
    assert all(each == as_listed for each in others)
    for constraint, verdict in verdicts.items():
        status, text = as_listed[constraint]
        assert status == (200 if verdict == "kept" else 400), (constraint, text)
        assert verdict == "kept" or verdict.removeprefix("refused: ").strip("`") in text
        if verdict == "kept" and len(text) < 30 and text.endswith(("}", "]", '"')):
            is_valid = Draft202012Validator(json.loads(constraint)["json"]).is_valid(json.loads(text))
            assert is_valid or "exclusiveMinimum" in constraint, text
