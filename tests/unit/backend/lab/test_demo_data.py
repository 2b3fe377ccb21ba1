"""The demo corpus and tokenizer: what is split where, and that text survives."""

from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from backend.lab.demo.tokenizer import BEGIN_ID, END_ID, save_tokenizer, token_stream, train_tokenizer
from backend.models.demo import TARGET_DIR
from backend.rollout.corpus import MAX_TABLE_CHARS, Document, is_table, load_corpus

SOURCE = '''class Shelf:
    """A shelf — of books."""

    def __init__(self, width=120):
        self._books = {}  # by title
	if width > 1234:
            raise ValueError(f"{width!r} is too long")
'''


def test_split_is_deterministic_and_disjoint(tmp_path: Path) -> None:
    for number in range(600):
        path = tmp_path / f"package{number % 7}" / f"module_{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def function_{number}():\n    return {number}\n", encoding="utf-8")
    first, second = load_corpus(root=tmp_path), load_corpus(root=tmp_path)
    assert first == second
    train = {document.name for document in first.train}
    validation = {document.name for document in first.validation}
    assert not train & validation
    assert len(train | validation) == 600
    assert 2 <= len(validation) <= 30


def test_copies_and_foreign_packages_are_left_out_and_data_tables_are_cut(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    for name in ("a.py", "b.py", "site-packages/c.py"):
        (tmp_path / name).write_text("import this\n", encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    table = "TABLE = (\n" + "    0x0041, 0x0042, 0x1043, 0x0944,\n" * 500 + ")\n"
    assert [is_table(each) for each in (table, SOURCE)] == [True, False]
    (tmp_path / "table.py").write_text(table, encoding="utf-8")
    corpus = load_corpus(root=tmp_path)
    found = {document.name: document.text for document in (*corpus.train, *corpus.validation)}
    assert found.keys() == {"a.py", "table.py"}
    assert len(found["table.py"]) <= MAX_TABLE_CHARS
    assert found["table.py"].endswith(",\n")


def test_tokenizer_round_trips_and_reloads(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([SOURCE] * 4, vocab_size=400, max_length=512)
    save_tokenizer(tokenizer, tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = reloaded(SOURCE).input_ids
    assert ids == tokenizer(SOURCE).input_ids
    assert ids[0] == BEGIN_ID
    assert reloaded.decode(ids, skip_special_tokens=True) == SOURCE
    assert reloaded.chat_template == tokenizer.chat_template
    stream = token_stream(tokenizer, [Document("a.py", SOURCE), Document("b.py", "x = 1\n")])
    assert stream[: len(ids)].tolist() == ids
    assert np.flatnonzero(stream == END_ID).tolist() == [len(ids), len(stream) - 1]


def test_packaged_tokenizer_splits_digits_and_renders_chats() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    assert len(tokenizer("2048", add_special_tokens=False).input_ids) == 4
    messages = [
        {"role": "system", "content": "Write Python.\nNothing else."},
        {"role": "user", "content": "def add(a, b):"},
        {"role": "assistant", "content": "    return a + b"},
        {"role": "user", "content": "def sub(a, b):\n"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("<|begin|># Write Python.\n# Nothing else.\ndef add(a, b):\n    return a + b\ndef sub(a, b):\n")
    assert tokenizer(text, add_special_tokens=False).input_ids.count(BEGIN_ID) == 1
