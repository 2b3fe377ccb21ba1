"""Which of vLLM's parsers a model's family gets; and that they say of pieces of any size what they say token by token."""

import json
from types import SimpleNamespace

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.outputs import CompletionOutput
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

import backend.engine.front.any_model  # noqa: F401  (registers its parser)
from backend.engine.front import reading as front
from backend.engine.front.schemas import check_schema
from backend.engine.parsers import ANY_MODEL, REASONING, TOOLS, parser_of
from tests.support.properties import examples
from tests.unit.backend.engine.tool_answers import ANSWERS, harmony, tokenizer

STREAMED_OTHERWISE = {"hunyuan_a13b", "jamba", "minicpm5"}
"""Their streams differ from their whole answers with any cuts, also in vLLM: docs/reference/api.md names them."""
NOT_TRIED = {"cohere_command3", "cohere_command4", ANY_MODEL}
"""Cohere's need a package; ours finds no calls in free text."""
THOUGHTS = (
    "<think>Hm: 🎨.</think>Sure. 🎨",
    "[THINK]Hm: 🎨.[/THINK]Sure.",
    "<|channel>thought\nHm.<channel|>Sure.",
    "Sure. 🎨",
)
REASONERS_NOT_TRIED = {"openai_gptoss", "olmo3", "cohere_command3", "cohere_command4"}
TOKENIZER = tokenizer(*THOUGHTS)
HARMONYS = harmony(ANSWERS["openai"])


def spelled(text):
    """The tokenizer that a text is for, and its tokens."""
    return HARMONYS if text == ANSWERS["openai"] else (TOKENIZER, TOKENIZER.encode(text))


def _tool(name, **properties):
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


OFFERED = [_tool("paint", x={"type": "integer"}), _tool("stop", why={"type": "string"}, when={"type": "object"})]


def asked(**fields):
    messages = [{"role": "user", "content": "?"}]
    return ChatCompletionRequest(
        model="m", messages=messages, **({"tools": OFFERED, "stream": True, "skip_special_tokens": False} | fields)
    )


def read_class(cls):
    made = front.reading(cls)
    assert made is not None
    return made


def texts_of(by, tokens, request):
    params = SimpleNamespace(sampling_params=request, prompt_token_ids=[1], prompt_embeds=None, request_id="")
    detokenizer = IncrementalDetokenizer.from_new_request(by, params)
    texts: list[str] = []
    for token in tokens:
        detokenizer.update([token], False)
        texts.append(detokenizer.get_next_output_text(len(texts) == len(tokens) - 1, True))
    return texts


def added_up(messages):
    """Reasoning, content and calls, as a client adds them up."""
    content = reasoning = ""
    calls: dict[int, tuple[str, str]] = {}
    for message in messages:
        content += (message and message.content) or ""
        reasoning += (message and message.reasoning) or ""
        for call in message.tool_calls if message else ():
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
    return reasoning, content, list(calls.values())


def meant(reasoning, content, calls):
    """Without white space around a text, and with arguments as values."""
    return (reasoning or "").strip(), (content or "").strip(), [(name, json.loads(given)) for name, given in calls]


def token_by_token(cls, text, **fields):
    """What vLLM's class says without speculation."""
    by, tokens = spelled(text)
    parser, request = cls(by, asked().tools), asked(**fields)
    texts = texts_of(by, tokens, request)
    last = len(tokens) - 1
    return [parser.parse_delta(texts[at], [token], request, [1], finished=at == last) for at, token in enumerate(tokens)]


def in_pieces(cls, text, sizes, **fields):
    """What a stream with pieces of such sizes says, and its parts."""
    by, tokens = spelled(text)
    parser, request = read_class(cls)(by, asked().tools), asked(**fields)
    texts = texts_of(by, tokens, request)
    messages, at = [], 0
    parts: list[CompletionOutput] = []
    while at < len(tokens):
        end = min(len(tokens), at + sizes[len(parts) % len(sizes)])
        reason = "stop" if end == len(tokens) else None
        output = CompletionOutput(0, "".join(texts[at:end]), tokens[at:end], None, None, finish_reason=reason)
        for part in parser.read(output, [1], request, request):
            parts.append(part)
            finished = part.finish_reason is not None
            messages.append(parser.parse_delta(part.text, part.token_ids, request, [1], finished=finished))
        at = end
    assert "".join(part.text for part in parts) == "".join(texts)
    assert [token for part in parts for token in part.token_ids] == tokens
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    return messages, parts


def test_every_parser_is_tried():
    assert set(ToolParserManager.list_registered()) == set(ANSWERS) | NOT_TRIED


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@pytest.mark.parametrize("name", sorted(ANSWERS))
@examples(3, deadline=None)
@given(sizes=SIZES)
def test_tool_calls_in_pieces_of_any_size(name, sizes):
    by, tokens = spelled(ANSWERS[name])
    cls = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True, tokenizer=by, is_harmony=name == "openai")
    alone = added_up(token_by_token(cls, ANSWERS[name]))
    assert added_up(in_pieces(cls, ANSWERS[name], sizes)[0]) == alone
    whole = cls(by, asked().tools)
    reasoning, content, calls = whole.parse(ANSWERS[name], asked(), True, tokens)
    if name not in STREAMED_OTHERWISE:
        assert meant(*alone) == meant(reasoning, content, [(call.name, call.arguments) for call in calls or ()])


@pytest.mark.parametrize("name", sorted(set(ReasoningParserManager.list_registered()) - REASONERS_NOT_TRIED))
@examples(3, deadline=None)
@given(sizes=SIZES, thought=st.sampled_from(THOUGHTS))
def test_reasoning_in_pieces_of_any_size(name, sizes, thought):
    cls = ParserManager.get_parser(reasoning_parser_name=name, tokenizer=TOKENIZER)
    assert added_up(in_pieces(cls, thought, sizes)[0]) == added_up(token_by_token(cls, thought))


HERMES = ParserManager.get_parser(tool_parser_name="hermes", enable_auto_tools=True)


def test_stop_strings_are_held_back_as_token_by_token():
    text = "Sure. 🎨 " + ANSWERS["hermes"]
    alone = token_by_token(HERMES, text, stop=["nothing like it"])
    assert added_up(in_pieces(HERMES, text, [7, 1, 30], stop=["nothing like it"])[0]) == added_up(alone)


def test_one_event_holds_what_adds_to_one_text():
    messages, parts = in_pieces(HERMES, "All of it is text.", [100])
    assert ([message.content for message in messages], len(parts)) == (["All of it is text."], 1)
    messages, _ = in_pieces(HERMES, ANSWERS["hermes"], [1000])
    assert [(bool(each.content), [call.index for call in each.tool_calls]) for each in messages] == [
        (True, []),
        (False, [0]),
        (False, [1]),
    ]


ANY = ParserManager.get_parser(tool_parser_name=ANY_MODEL, enable_auto_tools=True)
WANTED = '[{"name": "paint", "parameters": {"x": 1}}, {"name": "stop", "parameters": {"why": "no, [}"}}]'


def test_later_pieces_of_a_required_call_have_no_name():
    messages, _ = in_pieces(ANY, WANTED, [2], tool_choice="required")
    written = [each.model_dump(exclude_unset=True) for each in messages if each is not None]
    functions = [call["function"] for each in written for call in each["tool_calls"]]
    assert [each["name"] for each in functions if "name" in each] == ["paint", "stop"]
    assert len(functions) > 4


@given(st.integers(0, len(WANTED)))
@examples(50)
def test_whole_calls_of_a_cut_answer_stay(length):
    _, _, calls = read_class(ANY)(TOKENIZER, asked().tools).parse(WANTED[:length], asked(tool_choice="required"), True)
    ends = [WANTED.index("1}") + 2, WANTED.index('[}"}') + 4]
    whole = [call for call, end in zip([("paint", {"x": 1}), ("stop", {"why": "no, [}"})], ends, strict=True) if length >= end]
    assert [(call.name, json.loads(call.arguments)) for call in calls or ()] == whole


NUMBER, WORD = {"type": "integer"}, {"enum": ["a", "b"]}


@pytest.mark.parametrize("place", ["$defs", "definitions"])
def test_tools_with_definitions_of_one_name_keep_their_own(place):
    def tool(name, kind):
        whole = {"a": {"$ref": f"#/{place}/Kind"}, "again": {"$ref": "#"}}
        schema = {"type": "object", "properties": whole, "required": ["a"], place: {"Kind": kind}}
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    request = asked(tools=[tool("count", NUMBER), tool("say", WORD), _tool("stop")], tool_choice="required")
    before = [each.model_dump() for each in request.tools]
    adjusted = read_class(ANY)(TOKENIZER, request.tools).adjust_request(request)
    assert [each.model_dump() for each in adjusted.tools] == before
    schema = adjusted.structured_outputs.json
    check_schema(schema)
    xgrammar.Grammar.from_json_schema(json.dumps(schema))
    is_valid = Draft202012Validator(schema).is_valid
    for name, right, wrong in (("count", 3, "a"), ("say", "a", 3)):
        assert is_valid([{"name": name, "parameters": {"a": right, "again": {"a": right}}}])
        assert not is_valid([{"name": name, "parameters": {"a": wrong}}])
        assert not is_valid([{"name": name, "parameters": {"a": right, "again": {"a": wrong}}}])


TEMPLATE = "{% if tools %}<tool_call>{% endif %}"


@pytest.fixture
def model(tmp_path):
    def make(model_type, template=""):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        return str(tmp_path)

    return make


@pytest.mark.parametrize(
    ("model_type", "template", "tools", "reasoning"),
    [
        ("qwen2", TEMPLATE, "hermes", None),
        ("qwen3_moe", TEMPLATE + "enable_thinking", "hermes", "qwen3"),
        ("qwen3_next", "<tool_call><function=", "qwen3_coder", None),
        ("llama", "<|python_tag|>", "llama3_json", None),
        ("llama", "plain", ANY_MODEL, None),
        ("mistral", "[TOOL_CALLS]", "mistral", None),
        ("deepseek_v3", "<｜tool▁sep｜>```json", "deepseek_v3", None),  # noqa: RUF001
        ("deepseek_v3", "<｜tool▁sep｜> thinking", "deepseek_v31", "deepseek_v3"),  # noqa: RUF001
        ("qwen2", "<｜tool▁calls▁begin｜> <think>\\n", "deepseek_v3", "deepseek_r1"),  # noqa: RUF001
        ("gpt_oss", "", "openai", "openai_gptoss"),
        ("glm4_moe", "<tool_call>", "glm45", "glm45"),
        ("brand_new", "", ANY_MODEL, None),
        ("brand_new", TEMPLATE, "hermes", None),
    ],
)
def test_by_family(model, model_type, template, tools, reasoning):
    folder = model(model_type, template)
    assert parser_of(TOOLS, "auto", folder) == tools
    assert parser_of(REASONING, "auto", folder) == reasoning


def test_what_is_asked_for_wins(model):
    folder = model("qwen2", TEMPLATE)
    assert parser_of(TOOLS, "xlam", folder) == "xlam"
    assert parser_of(TOOLS, "none", folder) is None
    assert parser_of(REASONING, "qwen3", folder) == "qwen3"


def test_templates_in_lists_and_files_count_and_one_that_is_given_stands_for_them(model, tmp_path):
    folder = model("llama", [{"name": "tool_use", "template": TEMPLATE}])
    assert parser_of(TOOLS, "auto", folder) == "hermes"
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("<|python_tag|>")
    assert parser_of(TOOLS, "auto", folder) == "llama3_json"
    (tmp_path / "other.jinja2").write_text(TEMPLATE)
    for template in (TEMPLATE, str(tmp_path / "other.jinja2")):
        assert parser_of(TOOLS, "auto", folder, template) == "hermes"


def test_vllm_has_every_parser_of_the_tables():
    assert {name for _, _, name in TOOLS} - {ANY_MODEL} <= ToolParserManager.lazy_parsers.keys()
    assert {name for _, _, name in REASONING} <= ReasoningParserManager.lazy_parsers.keys()
    assert ANY_MODEL in ToolParserManager.tool_parsers
