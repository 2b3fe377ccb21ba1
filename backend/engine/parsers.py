# ruff: noqa: RUF001  (models write such characters)
"""Chooses vLLM's parsers for a model's tool calls and reasoning.  Reads files; needs no vLLM engine.

The model's family decides: `model_type` in config.json, and strings in the chat template.  The tables follow vLLM 0.32's pages
"Tool Calling" and "Reasoning Outputs" (docs.vllm.ai), which name a parser for each model.
"""

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from backend.models.head_config import read_config, text_config

ANY_MODEL = "outrider_json"
"""Our parser for models of unknown family (`backend.engine.front.any_model`): a grammar produces required or named calls."""

NO_PARSER = "none"
AUTO = "auto"

Row = tuple[str, str, str]
"""Model types (`*` at the end: any ending), a string in the chat template, and the parser.  The first match wins."""

BOTH: tuple[Row, ...] = (
    ("deepseek_v4*", "", "deepseek_v4"),
    ("glm4_moe_lite|glm5*|glm_moe_dsa", "", "glm47"),
    ("glm4_moe*", "", "glm45"),
    ("kimi_k3*", "", "kimi_k3"),
    ("minimax_m3*", "", "minimax_m3"),
    ("minimax_m2*", "", "minimax_m2"),
    ("seed_oss", "", "seed_oss"),
    ("step3p5*", "", "step3p5"),
    ("gemma4*", "", "gemma4"),
)
"""Families whose two parsers have the same name."""

TOOLS: tuple[Row, ...] = (
    *BOTH,
    ("gpt_oss", "", "openai"),
    ("deepseek_v32", "", "deepseek_v32"),
    ("deepseek_v3", "```json", "deepseek_v3"),
    ("deepseek_v3", "<｜tool▁sep｜>", "deepseek_v31"),
    ("*", "<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("qwen3*", "<function=", "qwen3_coder"),
    ("nemotron*", "<function=", "qwen3_coder"),
    ("llama4*", "", "llama4_pythonic"),
    ("llama|mllama", "<|python_tag|>", "llama3_json"),
    ("llama|mllama", "ipython", "llama3_json"),
    ("mistral*|mixtral|ministral*", "[TOOL_CALLS]", "mistral"),
    ("granitemoehybrid", "", "granite4"),
    ("granite*", "<|tool_call|>", "granite"),
    ("kimi_k2*", "", "kimi_k2"),
    ("*", "<|tool_calls_section_begin|>", "kimi_k2"),
    ("ernie4_5*", "<tool_call>", "ernie45"),
    ("hunyuan*", "", "hunyuan_a13b"),
    ("step3*", "", "step3"),
    ("internlm*", "<|plugin|>", "internlm"),
    ("jamba", "<tool_calls>", "jamba"),
    ("phi*", "<|tool|>", "phi4_mini_json"),
    ("gemma*", "<start_function_call>", "functiongemma"),
    ("olmo3", "<function_calls>", "olmo3"),
    ("apertus", "", "apertus"),
    ("lfm2*", "<|tool_call_start|>", "lfm2"),
    ("longcat*", "", "longcat"),
    ("mimo*", "<tool_call>", "mimo"),
    ("*", "<tool_call>", "hermes"),
    ("*", "", ANY_MODEL),
)

REASONING: tuple[Row, ...] = (
    *BOTH,
    ("gpt_oss", "", "openai_gptoss"),
    ("deepseek_v32", "", "deepseek_v3"),
    ("deepseek_v3", "thinking", "deepseek_v3"),
    ("qwen3*", "enable_thinking", "qwen3"),
    ("nemotron*", "<think>", "nemotron_v3"),
    ("mistral*|ministral*", "[THINK]", "mistral"),
    ("granite*", "thinking", "granite"),
    ("kimi_k2*", "<think>", "kimi_k2"),
    ("ernie4_5*", "<think>", "ernie45"),
    ("hunyuan*", "<think>", "hunyuan_a13b"),
    ("step3*", "<think>", "step3"),
    ("olmo3", "<think>", "olmo3"),
    ("mimo*", "<think>", "mimo"),
    ("deepseek_v3|qwen2|qwen3*|llama", "<think>\\n", "deepseek_r1"),
)


def parser_of(table: Iterable[Row], name: str, model_dir: str, chat_template: str | None = None) -> str | None:
    """The name of the model's parser in `TOOLS` or `REASONING`; None: it has none.

    `name` is the setting: a name, `auto` or `none`.
    """
    if name != AUTO:
        return None if name == NO_PARSER else name
    model_type = str(text_config(read_config(model_dir)).get("model_type", ""))
    template = _given(chat_template) if chat_template else template_of(model_dir)
    fitting = (row for row in table if any(fnmatchcase(model_type, each) for each in row[0].split("|")))
    return next((name for _, mark, name in fitting if mark in template), None)


def _given(chat_template: str) -> str:
    """The template of a setting that holds either a file's path or the template itself."""
    path = Path(chat_template)
    return path.read_text() if len(chat_template) < 4096 and path.is_file() else chat_template


def template_of(model_dir: str) -> str:
    """The model's chat templates as one text; empty if it has none."""
    folder = Path(model_dir)
    texts = [path.read_text() for path in sorted(folder.glob("*.jinja"))]
    config = folder / "tokenizer_config.json"
    if config.is_file():
        written = json.loads(config.read_text()).get("chat_template") or ""
        # Some models have several templates: a list of names and templates.
        texts += [written] if isinstance(written, str) else [str(each.get("template", "")) for each in written]
    return "\n".join(texts)
