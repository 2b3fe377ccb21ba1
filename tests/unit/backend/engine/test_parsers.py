"""Which parser a model's family gets."""

import json

import pytest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

import backend.engine.front.any_model  # noqa: F401  (registers its parser)
from backend.engine.parsers import ANY_MODEL, REASONING, TOOLS, reasoning_parser, tool_parser

HERMES = "{% if tools %}<tool_call>{% endif %}"


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
        ("qwen2", HERMES, "hermes", None),
        ("qwen3_moe", HERMES + "enable_thinking", "hermes", "qwen3"),
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
        ("brand_new", HERMES, "hermes", None),
    ],
)
def test_by_family(model, model_type, template, tools, reasoning):
    folder = model(model_type, template)
    assert tool_parser("auto", folder) == tools
    assert reasoning_parser("auto", folder) == reasoning


def test_what_is_asked_for_wins(model):
    folder = model("qwen2", HERMES)
    assert tool_parser("xlam", folder) == "xlam"
    assert tool_parser("none", folder) is None
    assert reasoning_parser("qwen3", folder) == "qwen3"


def test_a_template_that_is_given_stands_for_the_models_own(model, tmp_path):
    other = tmp_path / "other.jinja2"
    other.write_text(HERMES)
    folder = model("llama", "plain")
    assert tool_parser("auto", folder, HERMES) == "hermes"
    assert tool_parser("auto", folder, str(other)) == "hermes"


def test_templates_in_files_and_lists_count(model, tmp_path):
    folder = model("llama", [{"name": "tool_use", "template": HERMES}])
    assert tool_parser("auto", folder) == "hermes"
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("<|python_tag|>")
    assert tool_parser("auto", folder) == "llama3_json"


def test_vllm_has_every_parser_of_the_tables():
    assert {name for _, _, name in TOOLS} <= ToolParserManager.lazy_parsers.keys()
    assert {name for _, _, name in REASONING} <= ReasoningParserManager.lazy_parsers.keys()
    assert ANY_MODEL in ToolParserManager.tool_parsers
