"""Which keywords of a schema a grammar keeps: the table in docs/reference/api.md, with both backends' own compilers."""

import json
import random
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import llguidance
import llguidance.torch
import numpy as np
import pytest
import xgrammar
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from vllm.sampling_params import StructuredOutputsParams

from backend.config import Settings
from backend.engine.front.config import build_vllm_config
from backend.engine.front.grammar import Check
from backend.engine.front.schemas import check_schema
from backend.engine.grammar_repairs import WholeGrammar
from backend.models.demo import TARGET_DIR
from tests.support.processes import ROOT
from tests.support.properties import examples

BACKENDS = ("xgrammar", "guidance")
ROW = re.compile(r"^\| `(\{.*\})`[^|]*\| (.*?) \| (.*?) \|$", re.MULTILINE)
TEXTS = 25
LONG = 40
BYTES = llguidance.LLTokenizer("byte")
END = BYTES.eos_token
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo([chr(each) if 31 < each < 127 else f"<{each}>" for each in range(END + 1)], stop_token_ids=[END]),
    max_threads=1,
)
ENDS, USUAL = frozenset('"]},:'), frozenset("abxyz0123")


def rows() -> Iterator[Any]:
    section = (ROOT / "docs/reference/api.md").read_text().split("\n## Structured outputs\n")[1].split("\n## ")[0]
    for schema, *found in ROW.findall(section):
        for backend, verdict in zip(BACKENDS, found, strict=True):
            yield pytest.param(backend, json.loads(schema), verdict, id=f"{backend} {schema}")


@cache
def check(backend: str) -> Check:
    engine_args = {"structured_outputs_config": {"backend": backend, "disable_any_whitespace": True}}
    return Check(build_vllm_config(Settings.model_validate({"verifier": {"engine_args": engine_args}}), str(TARGET_DIR)))


def refusal(backend: str, **asked: Any) -> str | None:
    try:
        found = check(backend)(StructuredOutputsParams(**asked))
    except Exception as error:
        return str(error)
    return found if isinstance(found, str) else None


@pytest.mark.parametrize(("backend", "schema", "verdict"), rows())
def test_a_keyword_is_kept_or_named(backend: str, schema: dict[str, Any], verdict: str) -> None:
    refused = refusal(backend, json=schema)
    if verdict == "kept":
        assert refused is None
        written = list(texts(backend, schema))
        assert written
        for text in written:
            assert Draft202012Validator(schema).is_valid(json.loads(text)) or "exclusiveMinimum" in schema, text
    else:
        assert verdict.removeprefix("refused: ").strip("`") in (refused or "kept")


@pytest.mark.parametrize(
    ("schema", "is_kept"),
    [
        ({"minProperties": 1}, True),
        ({"required": ["a", "b"], "minProperties": 2}, True),
        ({"properties": {"required": {"type": "null"}, "minProperties": {"type": "null"}}}, True),
        ({"minProperties": 2}, False),
        ({"items": {"required": ["a"], "minProperties": 2}}, False),
        ({"additionalProperties": False, "patternProperties": {"^x": {}}, "minProperties": 2}, False),
    ],
)
def test_guidance_counts_a_name_that_comes_twice_twice(schema: dict[str, Any], is_kept: bool) -> None:
    assert ("minProperties" not in (refusal("guidance", json={"type": ["object", "array"], **schema}) or "")) == is_kept


STEPS = st.lists(st.tuples(st.lists(st.sampled_from([97, 98, 99, END]), min_size=1, max_size=5), st.booleans()), max_size=6)


@given(STEPS)
@example([([97, END], False)])
@example([([97, END, 98], True), ([END, 98], False), ([99], True)])
@examples(40)
def test_a_draft_that_is_taken_back_leaves_no_trace_in_guidance(steps: list[tuple[list[int], bool]]) -> None:
    """Even if the end-of-text token is in the middle of the grammar, or behind its end."""
    grammar = f'start: "a" (<[{END}]> "b")* "c"'

    def made() -> WholeGrammar:
        return WholeGrammar(llguidance.LLMatcher(BYTES, grammar), BYTES, BYTES.vocab_size)

    drafted, plain = made(), made()
    for draft, kept in steps:
        taken = 0
        while taken < len(draft) and drafted.accept_tokens("", draft[taken : taken + 1]):
            taken += 1
        if kept:
            assert plain.accept_tokens("", draft[:taken])
        else:
            drafted.rollback(taken)
        if taken < len(draft):
            drafted, plain = made(), made()  # a rejected token ends a request
        for each in (drafted, plain):
            assert each.ll_matcher.get_error() == ""
        masks = [llguidance.torch.allocate_token_bitmask(1, BYTES.vocab_size) for _ in range(2)]
        for each, mask in zip((drafted, plain), masks, strict=True):
            each.fill_bitmask(mask, 0)
        assert set_bits(masks[0]) == set_bits(masks[1])
        assert drafted.is_terminated() == plain.is_terminated()


def test_the_end_of_text_token_inside_a_grammar_does_not_end_it() -> None:
    matcher = llguidance.LLMatcher(BYTES, f'start: "a" <[{END}]> "b"')
    grammar = WholeGrammar(matcher, BYTES, BYTES.vocab_size)
    assert grammar.accept_tokens("", [97, END])
    assert not grammar.is_terminated()
    assert not grammar.accept_tokens("", [99])


A_CASE = {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]}
OTHER_CASE = {"type": "object", "properties": {"kind": {"enum": ["b", "c"]}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"oneOf": [{"$ref": "#/$defs/a"}, OTHER_CASE, {"type": "null"}], "$defs": {"a": A_CASE}}, None),
        ({"oneOf": [A_CASE, OTHER_CASE | {"required": []}]}, "oneOf"),
        ({"oneOf": [{"const": 1}, {"type": "string"}]}, None),
        ({"type": "object", "anyOf": [A_CASE, {"$ref": "#/$defs/a"}], "$defs": {"a": OTHER_CASE}}, None),
        ({"type": "number", "anyOf": [{"type": "integer"}, {"enum": [0.5]}]}, None),
        ({"type": "number", "anyOf": [{"type": "integer"}, {"enum": ["0.5"]}]}, "type"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"type": "string", "x-order": 1, "default": ""}}}, None),
        ({"type": "object", "properties": {"a": {"$ref": "#/definitions/n"}}, "definitions": {"n": {"not": {}}}}, "not"),
        ({"anyOf": [{"$ref": "#"}]}, None),
        ({"type": "object", "anyOf": [{"$ref": "#"}]}, "circles"),
        ({"type": "object", "properties": {"a": {"type": "object", "minProperties": True}}}, "minProperties"),
        ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, "items"),
        ({"type": "object", "propertyNames": {"pattern": "^a$", "maxLength": 3}}, "maxLength"),
        ({"type": []}, "type"),
        (True, None),
    ],
)
def test_what_xgrammar_makes_of_schemas_within_schemas(schema: Any, keyword: str | None) -> None:
    if keyword is None:
        check_schema(schema)
    else:
        with pytest.raises(ValueError, match=keyword):
            check_schema(schema)


@pytest.mark.parametrize("backend", BACKENDS)
def test_schemas_in_structural_tags_are_checked_too(backend: str) -> None:
    def tag(schema: dict[str, Any]) -> str:
        return json.dumps({"structures": [{"begin": "f(", "schema": schema, "end": ")"}], "triggers": ["f("]})

    assert refusal(backend, structural_tag=tag({"type": "string"})) is None
    assert "uniqueItems" in (refusal(backend, structural_tag=tag({"type": "array", "uniqueItems": True})) or "")


def test_a_grammar_that_guidance_cannot_compile_is_refused() -> None:
    """It takes such a tag for a special token, and says so only in vLLM's log."""
    tag = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}
    assert "special token" in (refusal("guidance", structural_tag=json.dumps(tag)) or "")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", ["(?=a)b", "a(?!b)", "(?<=a)b", "a^b", "a$b"])
def test_what_a_regex_would_lose_is_refused(backend: str, pattern: str) -> None:
    assert refusal(backend, regex=pattern) is not None
    assert refusal(backend, regex='^[a-z]{2}"\\n$') is None


def texts(backend: str, schema: dict[str, Any]) -> Iterator[str]:
    """What a model could write that draws any allowed character."""
    drawn, mask = random.Random(1), llguidance.torch.allocate_token_bitmask(1, END + 1)
    for _ in range(TEXTS):
        text, (allow, take) = "", matcher(backend, json.dumps(schema))
        while len(text) <= 3 * LONG:
            allow(mask, 0)
            choices = ["" if token == END else chr(token) for token in set_bits(mask) if token == END or 31 < token < 127]
            if "" in choices and (len(choices) == 1 or drawn.random() < 0.5):
                yield text
                break
            ends = [each for each in choices if each in ENDS] if len(text) > LONG or drawn.random() < 0.5 else []
            usual = [each for each in choices if each in USUAL]
            text += drawn.choice(ends or usual or [each for each in choices if each])
            take(ord(text[-1]))


def matcher(backend: str, schema: str) -> tuple[Callable[[Any, int], Any], Callable[[int], Any]]:
    """What marks the bytes that may come next, and what takes one of them."""
    if backend == "guidance":
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
        made = llguidance.LLMatcher(BYTES, grammar)
        return partial(llguidance.torch.fill_next_token_bitmask, made), made.consume_token
    compiled = COMPILER.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))
    by_xgrammar = xgrammar.GrammarMatcher(compiled)
    return by_xgrammar.fill_next_token_bitmask, by_xgrammar.accept_token


def set_bits(mask: Any) -> list[int]:
    found: list[int] = np.nonzero(np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little"))[0].tolist()
    return found
