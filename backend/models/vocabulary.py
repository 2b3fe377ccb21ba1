"""Finds the tokens that a draft model shares with its target, where their ids differ.  Any process; imports no torch.

Tokens are shared if both `tokenizer.json` write them alike ("token-level intersection", https://arxiv.org/abs/2502.05202).  If
only one of the two is byte-level, where `Ġ` stands for a space, the texts that tokens stand for are compared instead.
"""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders

from backend.models.head_config import CheckpointError, HeadConfig

LEAST_SHARED = 0.5
"""Least share of the smaller vocabulary.  The larger one has many tokens of its own even where drafts are good: Mistral's first
tokenizer shares 91 % of its 32,000 tokens with their later one, which has 131,072."""
NO_ID = -1

_BYTES = decoders.ByteLevel()
_PIECES = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
_BROKEN = "\ufffd"


@dataclass(frozen=True)
class SharedVocabulary:
    """What the vocabularies of a draft model and its target share."""

    model: HeadConfig
    ids: dict[int, int]
    """The target's id of each shared token -> the draft model's, in ascending order."""
    target_size: int
    """The number of the target's tokens."""
    own: Tokenizer
    target: Tokenizer

    @property
    def differ(self) -> bool:
        """Whether any token has two ids, so that ids must be mapped."""
        return any(theirs != ours for theirs, ours in self.ids.items())

    def inputs(self) -> list[int]:
        """What the draft model reads for each of the target's ids `[vocab]`: its own id of a shared token.

        For any other token, the last of the draft model's tokens that the token's text splits into; `NO_ID` if there is none.
        """
        others = {number: text for text, number in _texts(self.target).items() if number not in self.ids}
        splits = self.own.encode_batch(list(others.values()), add_special_tokens=False)
        known = {number: split.ids[-1] for number, split in zip(others, splits, strict=True) if split.ids} | self.ids
        read = [known.get(number, NO_ID) for number in range(self.model.vocab_size)]
        return [mine if mine < self.model.own_vocab_size else NO_ID for mine in read]


def shared_tokens(model: HeadConfig, own_dir: str, target_dir: str) -> SharedVocabulary | None:
    """Compares the vocabularies of a draft model and its target.  None: the same file, or a file is missing.

    Raises `CheckpointError` if too few tokens are shared, or if a file is missing and the sizes differ.
    """
    files = [Path(directory) / "tokenizer.json" for directory in (own_dir, target_dir)]
    if not all(file.is_file() for file in files):
        if model.own_vocab_size != model.vocab_size:
            sizes = f"it has {model.own_vocab_size} tokens, the target {model.vocab_size}"
            raise CheckpointError(f"{own_dir}: {sizes}; to map them, both directories must have a tokenizer.json")
        return None
    if files[0].read_bytes() == files[1].read_bytes():
        return None
    own, target = (_read(file) for file in files)
    if _is_byte_level(own) == _is_byte_level(target):
        ours, theirs = own.get_vocab(), target.get_vocab()
    else:
        ours, theirs = _texts(own), _texts(target)
    pairs = ((number, ours[token]) for token, number in theirs.items() if token in ours)
    # A tokenizer may have more tokens than its model has rows.
    ids = {number: mine for number, mine in sorted(pairs) if number < model.vocab_size and mine < model.own_vocab_size}
    smaller = min(len(ours), len(theirs))
    if len(ids) < LEAST_SHARED * smaller or not ids:
        raise CheckpointError(
            f"{own_dir}: another vocabulary, which shares {len(ids)} tokens with the target's: "
            f"less than {LEAST_SHARED:.0%} of the smaller one's {smaller}"
        )
    return SharedVocabulary(model, ids, len(theirs), own, target)


def _read(file: Path) -> Tokenizer:
    try:
        found = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises this class itself
        raise CheckpointError(f"{file}: cannot be read as a tokenizer ({error})") from error
    found.no_padding()
    found.no_truncation()
    return found


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return tokenizer.decoder is not None and tokenizer.decoder.decode(["aĠa"]) == "a a"


def _texts(tokenizer: Tokenizer) -> dict[str, int]:
    """The texts of a tokenizer's tokens and their ids, without tokens that are parts of characters."""
    decode = (_BYTES if _is_byte_level(tokenizer) else _PIECES).decode
    # Single bytes first: another token of the same text then takes the byte's place.
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: (not item[0].startswith("<0x"), item[1]))
    texts = {decode([token]): number for token, number in tokens}
    return {text: number for text, number in texts.items() if _BROKEN not in text}
