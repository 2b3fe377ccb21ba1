"""The kinds of drafters: one entry says all that the fleet must know of a kind.  Pure data, any process.

A new kind without weights is a `Proposer` (`backend/drafter/proposer.py`) in a file of its own, and an entry here.  The setting
`drafter` and docs/guide/drafters.md name it.  Of a kind that drafts in one pass the scheduler must know (`one_pass`,
`backend/engine/build.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

DrafterKind = Literal["eagle", "dflash", "draft_model", "ngram", "none"]


@dataclass(frozen=True)
class Kind:
    """One kind of drafter."""

    proposer: str = ""
    """`module:class` of its `Proposer`, which only drafters import; empty: nothing drafts.

    The class is called with a model's weights, the size of the cache in tokens, and the device.  Without weights it is called
    with the target's vocabulary size, its longest position (2**31 where unknown), and the size of the cache in tokens.
    """
    has_weights: bool = False
    """Whether `--drafter` names a directory.  Without weights it names the kind, and the drafter needs no device."""
    takes_features: bool = False
    """Whether it reads the target's hidden states, which verifiers then send.  Only such kinds learn."""
    native: Mapping[str, Any] | None = None
    """Without weights: vLLM's speculative configuration for `--mode native`; None: that mode refuses the kind."""


KINDS: Mapping[DrafterKind, Kind] = {
    "eagle": Kind("backend.drafter.eagle:EagleProposer", has_weights=True, takes_features=True),
    "dflash": Kind("backend.drafter.dflash:DFlashProposer", has_weights=True, takes_features=True),
    "draft_model": Kind("backend.drafter.eagle:ModelProposer", has_weights=True),
    # The suffixes are as long as those of the drafter (`backend/speculation/lookup.py`).
    "ngram": Kind(
        "backend.drafter.ngram:NgramProposer", native={"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    ),
    "none": Kind(),
}
WEIGHTLESS: Mapping[str, DrafterKind] = {name: name for name, kind in KINDS.items() if kind.proposer and not kind.has_weights}
"""The kinds without weights, by their name in `--drafter`."""
