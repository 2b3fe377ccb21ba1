# ruff: noqa: RUF001  (models write such characters)
"""An answer with text and two tool calls as each of vLLM's tool parsers expects it.  Tests only."""

import re

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import WordLevel, WordPiece
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.tool_parsers import ToolParserManager

SAY = "Sure. "


def _json(key: str = "arguments", between: str = ", ") -> str:
    return f'{{"name": "paint", "{key}": {{"x": 1}}}}{between}{{"name": "stop", "{key}": {_WHY}}}'


def _each(form: str, parameter: str, between: str = "") -> str:
    """`form` and `parameter` with NAME, KEY, VALUE and PARAMETERS."""
    calls = []
    for name, given in (("paint", {"x": "1"}), ("stop", {"why": "ärger 🎨", "when": '{"a": [2]}'})):
        parameters = "".join(parameter.replace("KEY", key).replace("VALUE", value) for key, value in given.items())
        calls.append(form.replace("NAME", name).replace("PARAMETERS", parameters))
    return between.join(calls)


def _dsml(block: str, space: str = "") -> str:
    typed = _each(
        f'<｜DSML｜{space}invoke name="NAME">\nPARAMETERS</｜DSML｜{space}invoke>\n',
        f'<｜DSML｜{space}parameter name="KEY" string="TYPE">VALUE</｜DSML｜{space}parameter>\n',
    )
    typed = re.sub(r'"(\w+)" string="TYPE"', lambda m: f'"{m[1]}" string="{str(m[1] == "why").lower()}"', typed)
    return f"<｜DSML｜{space}{block}>\n{typed}</｜DSML｜{space}{block}>"


_WHY = '{"why": "ärger 🎨", "when": {"a": [2]}}'
_QWEN = _each(
    "<tool_call>\n<function=NAME>\nPARAMETERS</function>\n</tool_call>", "<parameter=KEY>\nVALUE\n</parameter>\n", "\n"
)
_GLM = _each("<tool_call>NAMEPARAMETERS</tool_call>", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")
_HERMES = f"<tool_call>\n{_json(between=chr(10) + '</tool_call>' + chr(10) + '<tool_call>' + chr(10))}\n</tool_call>"
_PYTHON = '[paint(x=1), stop(why="ärger 🎨", when={"a": [2]})]'
_HY3 = _each("<tool_call>NAME<tool_sep>PARAMETERS</tool_call>", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")

ANSWERS: dict[str, str] = {
    "apertus": f'{SAY}<|tools_prefix|>[{{"paint": {{"x": 1}}}}, {{"stop": {_WHY}}}]<|tools_suffix|>',
    "deepseek_v3": SAY
    + '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>paint\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>\n'
    + f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{_WHY}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": SAY
    + '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>paint<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>'
    + f"<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{_WHY}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": SAY + _dsml("function_calls"),
    "deepseek_v4": SAY + _dsml("tool_calls"),
    "deepseek_v41": SAY + _dsml("calls", " "),
    "dots": SAY
    + "<dots_function_call>\n"
    + _each('<invoke name="NAME">\nPARAMETERS</invoke>\n', '<parameter name="KEY">VALUE</parameter>\n')
    + "</dots_function_call>",
    "ernie45": SAY + _HERMES,
    "functiongemma": SAY
    + "<start_function_call>call:paint{x:<escape>1<escape>}<end_function_call>"
    + "<start_function_call>call:stop{why:<escape>ärger<escape>}<end_function_call>",
    "gemma4": SAY
    + '<|tool_call>call:paint{x:1}<tool_call|><|tool_call>call:stop{why:<|"|>ärger 🎨<|"|>,when:{a:[2]}}<tool_call|>',
    "gigachat3": f'{SAY}<|function_call|>{{"name": "stop", "arguments": {_WHY}}}',
    "glm45": SAY + _GLM,
    "glm47": SAY + _GLM,
    "granite": f"<|tool_call|>[{_json()}]",
    "granite-20b-fc": f"<function_call> {_json(between=' <function_call> ')}",
    "granite4": SAY + _HERMES,
    "hermes": SAY + _HERMES,
    "hf": SAY
    + '<tool_call>{"function": {"name": "paint", "arguments": {"x": 1}}}</tool_call>'
    + f'<tool_call>{{"function": {{"name": "stop", "arguments": {_WHY}}}}}</tool_call>',
    "hunyuan_a13b": f"{SAY}<tool_calls>[{_json()}]</tool_calls>",
    "hy_v3": f"{SAY}<tool_calls>{_HY3}</tool_calls>",
    "hy_v4": f"{SAY}<tool_calls>{_GLM}</tool_calls>",
    "inkling": f"<|message_model|><|content_text|>{SAY}<|end_message|>"
    + '<|message_model|><|content_invoke_tool_json|>{"name":"paint","args":{"x":1}}<|end_message|>'
    + f'<|message_model|><|content_invoke_tool_json|>{{"name":"stop","args":{_WHY}}}<|end_message|>',
    "internlm": f'{SAY}<|action_start|><|plugin|>{{"name": "stop", "parameters": {_WHY}}}<|action_end|>',
    "jamba": f"{SAY}<tool_calls>[{_json()}]</tool_calls>",
    "k2_horizon": SAY
    + "<ifm|tool_calls>"
    + _each(
        "<ifm|tool_call>NAMEPARAMETERS</ifm|tool_call>", "<ifm|arg_key>KEY</ifm|arg_key><ifm|arg_value>VALUE</ifm|arg_value>"
    )
    + "</ifm|tool_calls>",
    "kimi_k2": SAY
    + '<|tool_calls_section_begin|><|tool_call_begin|>functions.paint:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>'
    + f"<|tool_call_begin|>functions.stop:1<|tool_call_argument_begin|>{_WHY}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": SAY
    + "<|open|>tools<|sep|>"
    + '<|open|>call tool="paint" index="1"<|sep|><|open|>argument key="x" type="number"<|sep|>1<|close|>argument<|sep|>'
    + '<|close|>call<|sep|><|open|>call tool="stop" index="2"<|sep|>'
    + '<|open|>argument key="why" type="string"<|sep|>ärger 🎨<|close|>argument<|sep|>'
    + "<|close|>call<|sep|><|close|>tools<|sep|>",
    "lfm2": f"{SAY}<|tool_call_start|>{_PYTHON}<|tool_call_end|>",
    "ling3": SAY + _GLM,
    "llama3_json": _json("parameters", "; "),
    "llama4_json": _json("parameters", "; "),
    "llama4_pythonic": _PYTHON,
    "longcat": SAY + _HERMES.replace("tool_call", "longcat_tool_call"),
    "mimo": SAY + _QWEN.replace("\nVALUE\n", "VALUE"),
    "minicpm5": SAY + _each('<function name="NAME">PARAMETERS</function>', '<param name="KEY">VALUE</param>'),
    "minimax_m2": SAY
    + "<minimax:tool_call>\n"
    + _each('<invoke name="NAME">\nPARAMETERS</invoke>\n', '<parameter name="KEY">VALUE</parameter>\n')
    + "</minimax:tool_call>",
    "minimax_m3": SAY
    + "]<]minimax[>[<tool_call>\n"
    + ']<]minimax[>[<invoke name="paint">\n]<]minimax[>[<x>1]<]minimax[>[</x>\n]<]minimax[>[</invoke>\n'
    + ']<]minimax[>[<invoke name="stop">\n]<]minimax[>[<why>ärger 🎨]<]minimax[>[</why>\n]<]minimax[>[</invoke>\n'
    + "]<]minimax[>[</tool_call>",
    "mistral": f'{SAY}[TOOL_CALLS]paint[ARGS]{{"x": 1}}[TOOL_CALLS]stop[ARGS]{_WHY}',
    "muse_glimmer": "<|start|>assistant to=paint<|message|><atem:function_calls>\n"
    + '<atem:invoke name="paint">\n<atem:parameter name="x">1</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>',
    "olmo3": '<function_calls>paint(x=1)\nstop(why="ärger 🎨", when={"a": [2]})</function_calls>',
    "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    + '<|channel|>commentary to=functions.paint <|constrain|>json<|message|>{"x": 1}<|call|>',
    "phi4_mini_json": f"functools[{_json()}]",
    "plamo3": SAY
    + "<|plamo:begin_tool_requests:plamo|>"
    + "".join(
        f"<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
        "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
        f"{given}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
        for name, given in (("paint", '{"x": 1}'), ("stop", _WHY))
    )
    + "<|plamo:end_tool_requests:plamo|>",
    "poolside_v1": SAY
    + _each("<tool_call>NAME\nPARAMETERS</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"),
    "pythonic": _PYTHON,
    "qwen3_coder": SAY + _QWEN,
    "qwen3_json": SAY + _HERMES,
    "qwen3_xml": SAY + _QWEN,
    "seed_oss": SAY + _QWEN.replace("tool_call>", "seed:tool_call>"),
    "step3": SAY
    + "<｜tool_calls_begin｜>"
    + _each(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">PARAMETERS</steptml:invoke><｜tool_call_end｜>',
        '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
    )
    + "<｜tool_calls_end｜>",
    "step3p5": SAY + _QWEN,
    "xlam": f"[{_json()}]",
}
"""By the parser's name.  `openai` reads Harmony's own tokens (`harmony`).  Cohere's parsers need a package that vLLM lacks."""
for _name, _like in (("beam", "hf"), ("muse", "muse_glimmer"), ("musespark1x", "muse_glimmer"), ("step5", "step3p5")):
    if _name in ToolParserManager.list_registered():  # from vLLM 0.33 on
        ANSWERS[_name] = ANSWERS[_like]
RESPONSE_TEMPLATE = {
    "fields": {
        "content": {},
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
    },
    "start_anchor": "<assistant>",
}
"""What the parser `hf` reads an answer by."""

_NOT_TOKENS = ("<parameter", "<function", "<invoke", "<x>", "</x>", "<why>", "</why>", "<atem", "</atem", "<param", "</param")

_MARK = re.compile(r"<[^<>\s=\"]+>|\[TOOL_CALLS\]|\[ARGS\]|\]<\]minimax\[>\[")
_PAIRED = ("think", "response", "seed:think", "ifm|think", "ifm|think_fast", "ifm|arg_type", "mm:think")
_BARRED = (
    *("START_THINKING", "END_THINKING", "START_RESPONSE", "END_RESPONSE", "START_TEXT", "END_TEXT", "start", "message", "eom"),
    *("eot", "python_tag", "python_start", "python_end", "message_sep", "role_sep", "open", "close", "sep", "content_thinking"),
    *("content_tool_error", "content_invoke_tool_text", "content_model_end_sampling"),
    *("plamo:begin_think:plamo", "plamo:end_think:plamo", "plamo:tag"),
)
_MORE = [
    *(f"<{end}{mark}>" for mark in _PAIRED for end in ("", "/")),
    *(f"<|{mark}|>" for mark in _BARRED),
    *("[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<think_end>", "<｜DSML｜>", "<eos>", "<assistant>"),
]
"""Marks that parsers need besides."""


def tokenizer(*more: str) -> PreTrainedTokenizerFast:
    """A token for every byte, for some short texts, and for the marks of all answers; the longest that fits is taken."""
    short = ["Ġ{", '"}', '":', 'Ġ"', "na", "me", "ar", "}}", '"name', "```", "json", '":Ġ{"', "Ġ1}", "Ġ</", "Ġ<"]
    vocabulary = {each: at for at, each in enumerate([*sorted(ByteLevel.alphabet()), *short])}
    inner = Tokenizer(WordPiece(vocabulary, unk_token="?", continuing_subword_prefix="", max_input_chars_per_word=10_000))
    inner.pre_tokenizer, inner.decoder = ByteLevel(add_prefix_space=False, use_regex=False), Decoder()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    found = {mark for answer in (*ANSWERS.values(), *more) for mark in _MARK.findall(answer)} | set(_MORE)
    made.add_tokens(sorted(mark for mark in found if not mark.startswith(_NOT_TOKENS)))
    made.response_template = RESPONSE_TEMPLATE
    return made


def harmony(text: str) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """Harmony's tokens of a text, and a tokenizer that has these alone."""
    tokens = get_encoding().encode(text, allowed_special="all")
    inner = Tokenizer(
        WordLevel({"?": 0} | {get_encoding().decode([each]).replace(" ", "Ġ"): each for each in tokens}, unk_token="?")
    )
    inner.decoder = Decoder()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="?"), tokens
