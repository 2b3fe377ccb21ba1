"""The benchmark's prompts: of the domain asked for, the same for everyone, never twice the same."""

import pytest

from backend.lab.bench.options import DOMAINS
from backend.lab.bench.prompts import Prompts, docstrings
from backend.lab.demo.tokenizer import save_tokenizer, train_tokenizer
from backend.rollout.corpus import Document

LENGTH = 64


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["def f(x):\n    return x + 1\n"] * 50, 300, 512), directory)
    return Prompts(str(directory), LENGTH)


@pytest.mark.parametrize("domain", DOMAINS)
def test_prompts_are_reproducible_and_differ(prompts: Prompts, domain: str) -> None:
    one, other = prompts.make(domain, "0/1"), prompts.make(domain, "0/2")
    assert one == prompts.make(domain, "0/1")
    assert one != other
    assert 0 < len(one) <= LENGTH
    assert all(0 <= token < 300 for token in one)
    if domain != "chat":
        assert len(one) == LENGTH


def test_docstrings_come_from_what_parses() -> None:
    text = 'def f():\n    """' + "Says something. " * 10 + '"""\n'
    assert len(docstrings([Document("a.py", text), Document("b.py", "def ("), Document("c.py", "x = 1\n")])) == 1
