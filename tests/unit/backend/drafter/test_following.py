"""A drafter fetches what its head shares with the target after the target's weights were exchanged."""

from pathlib import Path

import pytest
import torch
from torch import nn

from backend.drafter.following import PATIENCE_S, Following
from backend.drafter.sessions import Malformed, Session
from backend.engine.worker import tensor_transfer
from backend.models.checkpoint import borrow, load_drafter
from backend.models.demo import DRAFTER_DIR, TARGET_DIR
from backend.models.head_config import CheckpointError
from backend.wire.drafting import PROTOCOL_VERSION, Hello, Part, TargetTensor, Want
from tests.support.drafter_heads import TinyHead, write_target


def hello(verifier: str = "v", weights: int = 1, name: str = "1 one ") -> Hello:
    return Hello(PROTOCOL_VERSION, verifier, "drafts", weights, None, weights, name)


HELLO = hello()


class Followed:
    """A `Following` and what it gives."""

    def __init__(self, *names: TargetTensor) -> None:
        self.taken: list[dict[str, torch.Tensor]] = []
        self.names = set(names)
        self.following = Following(lambda: self.names, self.taken.append)


def part(of: int, rows: int, first: int = 0, name: TargetTensor = "embed_tokens.weight") -> tuple[Part, list[bytes]]:
    return Part(name, first, rows, of, 2, "float32"), [torch.full((rows, 2), float(first)).numpy().tobytes()]


def test_it_asks_once_for_the_same_weights_and_another_verifier_where_one_is_silent() -> None:
    followed = Followed("embed_tokens.weight")
    following, one, two = followed.following, Session("v", 1), Session("w", 1)
    assert following.greeted(one, HELLO, 0.0) == Want("embed_tokens.weight", 0)
    assert following.greeted(two, hello("w"), 0.1) is None
    assert following.receive(one, *part(4, 2), 0.2) == Want("embed_tokens.weight", 2)
    assert following.ask(two, 0.2 + PATIENCE_S - 0.1) is None
    assert following.ask(two, 0.2 + PATIENCE_S) == Want("embed_tokens.weight", 2)
    assert following.receive(one, *part(4, 2, 2), 3.0) is None, "too late: another is asked"
    assert not followed.taken
    assert following.receive(two, *part(4, 2, 2), 3.0) is None
    (found,) = followed.taken
    assert found["embed_tokens.weight"].tolist() == [[0, 0], [0, 0], [2, 2], [2, 2]]
    assert following.greeted(one, HELLO, 4.0) is None
    # Of one verifier alone another exchange is known by its count, whatever it is called.
    assert following.greeted(one, hello(weights=2), 5.0) is not None


def test_what_came_whole_is_kept_when_sessions_are_dropped() -> None:
    followed = Followed("embed_tokens.weight", "lm_head.weight")
    following, session, again = followed.following, Session("v", 1), Session("v", 2)
    following.greeted(session, HELLO, 0.0)
    assert following.receive(session, *part(2, 2), 0.1) == Want("lm_head.weight", 0)
    assert following.receive(session, *part(4, 2, name="lm_head.weight"), 0.2) == Want("lm_head.weight", 2)
    following.reset()
    assert following.receive(session, *part(4, 2, 2, "lm_head.weight"), 0.3) is None, "nobody was asked for it"
    assert following.greeted(again, HELLO, 0.4) == Want("lm_head.weight", 0)
    following.receive(again, *part(2, 2, name="lm_head.weight"), 0.5)
    assert [found.keys() for found in followed.taken] == [followed.names]
    # Weights that cannot be given are not asked for again.
    newer = hello(weights=2)
    assert following.greeted(again, newer, 1.0) == Want("embed_tokens.weight", 0)
    assert following.receive(again, Part("embed_tokens.weight", 0, 0, 0, 0, "float32"), [b""], 1.1) is None
    assert following.greeted(again, newer, 2.0) is None
    assert len(followed.taken) == 1


@pytest.mark.parametrize(
    ("made", "frames"),
    [
        (Part("embed_tokens.weight", 0, 3, 2, 2, "float32"), [bytes(24)]),
        (Part("embed_tokens.weight", 0, 2, 2, 2, "float32"), [bytes(15)]),
        (Part("embed_tokens.weight", 0, 2, 2, 2, "float32"), []),
        (Part("embed_tokens.weight", 0, -1, 2, 2, "float32"), [b""]),
    ],
)
def test_parts_that_do_not_fit_are_refused(made: Part, frames: list[bytes]) -> None:
    followed = Followed("embed_tokens.weight")
    session = Session("v", 1)
    followed.following.greeted(session, HELLO, 0.0)
    with pytest.raises(Malformed):
        followed.following.receive(session, made, frames, 0.1)
    assert not followed.taken


def module(**parts: nn.Module | torch.Tensor) -> nn.Module:
    made = nn.Module()
    for name, part in parts.items():
        setattr(made, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)
    return made


def test_rows_of_a_target() -> None:
    """A vector is the first rank's, a tied output matrix the embedding, what is being exchanged unreadable."""
    embedding = torch.arange(8).float().view(4, 2)
    # An adapter wraps its embedding, and other modules have norms, too.
    wrapped, norm, inner = (module(weight=each) for each in (embedding, torch.arange(2.0), torch.zeros(3)))
    tied = module(model=module(embed_tokens=module(base_layer=wrapped), norm=norm, layer=module(norm=inner)))
    tied = module(language_model=tied, visual=module(norm=module(weight=torch.zeros(3))))
    norms = [tensor_transfer.read_rows(tied, "norm.weight", 0, rank, 2) for rank in range(3)]
    assert [len(each[1]) for each in norms if each] == [8, 0, 0]
    assert all(each and each[0] == Part("norm.weight", 0, 1, 1, 2, "float32") for each in norms)
    lent = tensor_transfer.read_rows(tied, "lm_head.weight", 1, 0, 1)
    assert lent == (Part("lm_head.weight", 1, 3, 4, 2, "float32"), embedding[1:].numpy().tobytes())
    assert tensor_transfer.read_rows(tied, "lm_head.weight", 9, 0, 1) == (Part("lm_head.weight", 9, 0, 4, 2, "float32"), b"")
    assert tensor_transfer.read_rows(tied.to("meta"), "lm_head.weight", 0, 0, 1) is None
    other = tensor_transfer.read_rows(nn.Linear(2, 2), "lm_head.weight", 0, 0, 1)
    assert other is not None
    assert other[0].of == 0


def test_another_head_gets_what_the_one_before_did_not_share() -> None:
    followed = Followed("embed_tokens.weight")
    following, session = followed.following, Session("v", 1)
    following.greeted(session, HELLO, 0.0)
    following.receive(session, *part(2, 2), 0.1)
    followed.names.add("lm_head.weight")
    assert following.greeted(session, HELLO, 1.0) == Want("lm_head.weight", 0), "of the same weights, what is missing"
    following.receive(session, *part(2, 2, name="lm_head.weight"), 1.1)
    assert followed.taken[1].keys() == {"embed_tokens.weight", "lm_head.weight"}
    assert following.greeted(session, HELLO, 2.0) is None
    followed.names.remove("lm_head.weight")
    assert following.greeted(session, HELLO, 3.0) is None
    assert following.greeted(session, hello(weights=2, name="2 two "), 4.0) == Want("embed_tokens.weight", 0)
    following.receive(session, *part(2, 2), 4.1)
    assert followed.taken[2].keys() == {"embed_tokens.weight"}, "nothing of older weights"


def test_a_tied_output_matrix_is_the_newer_embedding(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", TinyHead(), tied=True)
    newer = torch.ones(2, 2)
    assert borrow(target, "lm_head.weight", {"embed_tokens.weight": newer}) is newer


def test_a_new_tensor_that_does_not_fit_the_head_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight: shape \[2, 2\], expected"):
        load_drafter(str(DRAFTER_DIR), str(TARGET_DIR), newer={"embed_tokens.weight": torch.ones(2, 2)})
