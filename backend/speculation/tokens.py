"""A request's token ids as a drafter knows them.  Pure."""

UNKNOWN = -1
"""Stands for a token that was lost with a message."""

_STRIDE = 256


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens are the same."""
    shortest = min(len(a), len(b))
    at = 0
    while at < shortest and a[at : at + _STRIDE] == b[at : at + _STRIDE]:
        at += _STRIDE
    at = min(at, shortest)
    while at < shortest and a[at] == b[at]:
        at += 1
    return at


def splice(known: list[int], base_len: int, tokens: list[int]) -> int:
    """Makes `known` `base_len` long and end with `tokens`; returns how many leading tokens stayed as they were."""
    at = base_len - len(tokens)
    kept = min(len(known), base_len)
    if at < kept:
        kept = at + common_prefix(known[at:kept], tokens)
    del known[kept:]
    if at > kept:
        known.extend([UNKNOWN] * (at - kept))
    known.extend(tokens[len(known) - at :])
    return kept
