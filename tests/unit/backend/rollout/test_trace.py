"""Traces: read, matched, made; and what is wrong with one is said in a line that names it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend.config import Settings
from backend.engine.front.offline import OfflineProcessor
from backend.models.demo import TARGET_DIR
from backend.rollout.make import make_trace
from backend.rollout.options import rollout_options, trace_options
from backend.rollout.requests import RolloutRequest, Tokenizer, make_requests
from backend.rollout.trace import Case, TraceError, match, read_prompts, read_trace, trace_file


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(TARGET_DIR))


@pytest.fixture(scope="module")
def front() -> OfflineProcessor:
    return OfflineProcessor(Settings(verifier={"engine_args": {"max_model_len": 64}}), str(TARGET_DIR))


@pytest.fixture
def make_of(tokenizer: Tokenizer, front: OfflineProcessor) -> Callable[..., list[RolloutRequest]]:
    """Makes requests of cases for a context of 64 tokens, with these options."""

    def made(cases: list[Case], *arguments: str) -> list[RolloutRequest]:
        options, _ = rollout_options(["--trace", "t", "--out", "o", *arguments])
        return make_requests(cases, tokenizer, Path("trace"), options, front)

    return made


def test_a_trace_is_read_in_order_and_its_name_tells_the_step(tmp_path: Path) -> None:
    file = tmp_path / "train.3.parquet"
    pq.write_table(pa.table({"extra": [1, 2], "gen": ["a", "b"], "prompt": ["x", "y"]}), file)
    assert read_trace(file) == [Case(0, "x", "a"), Case(1, "y", "b")]
    assert trace_file(str(file), None) == (file, 3)
    assert trace_file(str(file), 8) == (file, 8)
    assert trace_file("t/train.{S}.parquet", 4) == (Path("t/train.4.parquet"), 4)
    assert trace_file("cases.parquet", None)[1] == 0
    with pytest.raises(TraceError, match="give --step"):
        trace_file("train.{S}.parquet", None)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no such file"),
        (b"not parquet at all", "not a parquet file"),
        ({"prompt": ["x"]}, "no column 'gen'; it has prompt"),
        ({"prompt": ["x"], "gen": [7]}, "column 'gen' holds int64, not strings"),
        ({"prompt": [["x"]], "gen": ["y"]}, "column 'prompt' holds list"),
        ({"prompt": ["x", "y"], "gen": ["a", None]}, "row 1: no gen"),
        ({"prompt": pa.array([], pa.string()), "gen": pa.array([], pa.string())}, "the trace is empty"),
    ],
)
def test_what_is_wrong_with_a_trace_is_named(tmp_path: Path, content: bytes | dict[str, Any] | None, complaint: str) -> None:
    file = tmp_path / "train.3.parquet"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        pq.write_table(pa.table(content), file)
    with pytest.raises(TraceError, match=complaint) as caught:
        read_trace(file)
    assert str(file) in str(caught.value)


def test_prompts_take_their_responses_from_the_trace(tmp_path: Path) -> None:
    cases = [Case(0, "x", "a"), Case(1, "y", "b"), Case(2, "x", "c")]
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "y"}\n\n{"prompt": "x"}\n{"prompt": "x"}\n')
    assert match(read_prompts(file), cases, file, Path("t")) == [Case(0, "y", "b"), Case(1, "x", "a"), Case(2, "x", "c")]
    file.write_text('{"prompt": "y", "sampling_params": {"seed": 1}}\n')
    assert match(read_prompts(file), cases, file, Path("t")) == [Case(0, "y", "b", {"seed": 1})]
    file.write_bytes('{"prompt": "a\u2028b\u2029c\u0085d"}\r\n{"prompt": "e"}'.encode())
    assert [case.prompt for case in read_prompts(file)] == ["a\u2028b\u2029c\u0085d", "e"], "only a newline ends a line"
    file.write_text('{"prompt": "y"}\n{"prompt": "z"}\n')
    with pytest.raises(TraceError, match=r"prompts.jsonl: row 1: t has no row with the prompt 'z'"):
        match(read_prompts(file), cases, file, Path("t"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no prompts"),
        ("{", "line 1: not JSON"),
        ("3", "line 1: not a JSON object"),
        ('{"prompt": 3}', "row 0: no prompt"),
        ('{"prompt": "x", "sampling_params": 3}', "row 0: sampling_params is not a JSON object"),
    ],
)
def test_what_is_wrong_with_prompts_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(TraceError, match=complaint):
        read_prompts(file)


def test_fixed_requests_carry_the_tokens_of_their_response_and_free_ones_know_what_to_expect(
    tokenizer: Tokenizer, make_of: Callable[..., list[RolloutRequest]]
) -> None:
    cases = [Case(0, "def f(x):\n", "    return x\n"), Case(1, "class A:\n", "")]
    (request,) = make_of(cases[:1], "--fixed-responses")
    assert request.fixed is not None
    assert tokenizer.decode(request.fixed) == "    return x\n"
    assert request.params.max_tokens == request.expected == len(request.fixed)
    assert request.prompt[0] == 0, "a prompt begins with the tokenizer's own first token"
    known, unknown = make_of(cases)
    assert (known.fixed, known.expected, known.params.max_tokens) == (None, request.expected, 64 - len(known.prompt))
    assert unknown.expected == unknown.params.max_tokens
    several = make_of(cases, "--n", "3")
    assert [(each.number, each.case.number) for each in several] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert make_of(cases, "--max-tokens", "3")[0].params.max_tokens == 3


def test_a_prompts_own_sampling_parameters_come_first(make_of: Callable[..., list[RolloutRequest]]) -> None:
    cases = [Case(0, "x", ""), Case(1, "x", "", {"temperature": 0, "stop": "\n", "max_tokens": 4, "seed": 6})]
    plain, _, own, second = make_of(
        cases, "--temperature", "0.5", "--n", "2", "--sampling", '{"top_p": 0.9, "stop": ["a", "b"]}'
    )
    assert (plain.params.temperature, plain.params.top_p, plain.params.stop, plain.seed) == (0.5, 0.9, ["a", "b"], None)
    assert (own.params.temperature, own.params.stop) == (0, ["\n"])
    assert (own.params.max_tokens, own.seed, second.seed) == (4, 6, 7)


FIXED = "--fixed-responses"


@pytest.mark.parametrize(
    ("case", "arguments", "complaint"),
    [
        (Case(1, "word " * 70, "x"), [FIXED], "the prompt has"),
        (Case(1, "word " * 70, "x"), [], "the prompt has"),
        (Case(1, "x", "word " * 70), [FIXED], "the context has 64"),
        (Case(1, "x", ""), [FIXED], "the response to 'x' is empty"),
        (Case(1, "x", "word " * 9), [FIXED, "--max-tokens", "2"], "more than --max-tokens 2"),
        (Case(1, "x", "y", {"top_p": 2}), [], r"sampling_params: top_p must be in \(0, 1\], got 2"),
        (Case(1, "x", "y", {"top_p": 2}), [FIXED], "--fixed-responses says what is emitted"),
    ],
)
def test_a_case_that_cannot_be_run_is_named(
    make_of: Callable[..., list[RolloutRequest]], case: Case, arguments: list[str], complaint: str
) -> None:
    with pytest.raises(TraceError, match=rf"trace: row 1: .*{complaint}"):
        make_of([Case(0, "fine", "fine"), case], *arguments)


def test_source_code_is_cut_by_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for number in range(20):
        text = "\n".join(f"value_{number}_{i} = {i} + {i}" for i in range(300))
        (tmp_path / f"module_{number}.py").write_text(text)
    (tmp_path / "short.py").write_text("x = 1\n")
    out = tmp_path / "train.0.parquet"

    def make(*arguments: str, source: Path = tmp_path) -> str:
        return make_trace(trace_options([str(source), "--out", str(out), "--max-prompt", "20", "--max-gen", "40", *arguments]))

    line, cases, first = make(), read_trace(out), out.read_bytes()
    assert f"{len(cases)} rows" in line
    assert len(cases) > 10
    assert all(16 <= len(tokenizer.encode_response(case.gen)) <= 40 for case in cases)
    texts = [file.read_text() for file in tmp_path.glob("*.py")]
    assert all(any(case.prompt + case.gen in text for text in texts) for case in cases)
    make()
    assert out.read_bytes() == first, "the same seed makes the same trace"
    make("--limit", "2")
    assert len(read_trace(out)) == 2
    make("--n", "3")
    prompts = [case.prompt for case in cases]
    assert [case.prompt for case in read_trace(out)] == [prompts[number - number % 3] for number in range(len(cases))]
    assert [case.gen for case in read_trace(out)] == [case.gen for case in cases]
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="empty: no file gave a pair"):
        make(source=tmp_path / "empty")


def test_a_column_that_is_there_twice_or_holds_no_text_is_one_line(tmp_path: Path) -> None:
    texts = pa.array(["a"])
    bytes_of_no_text = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    for columns, names, line in (
        ([texts, texts, texts], ["prompt", "prompt", "gen"], "several columns 'prompt'"),
        ([texts, bytes_of_no_text], ["prompt", "gen"], "not UTF-8 text"),
    ):
        pq.write_table(pa.Table.from_arrays(columns, names), tmp_path / "train.1.parquet")
        with pytest.raises(TraceError, match=line):
            read_trace(tmp_path / "train.1.parquet")
