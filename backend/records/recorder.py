"""Where rows go while a verifier works.  Called on the engine thread; what a recorder does with a row happens elsewhere.

A method may cost a step no more than the time to put a row aside: no lock that is held for long, no file, no socket, never a
wait.  With no recorder at all no row is ever made.
"""

from __future__ import annotations

from typing import Protocol

from backend.records.rows import DecisionRow, RequestRow, StepRow, VerificationRow

REQUEST_ID_KEY = "outrider_request_id"
"""In `SamplingParams.extra_args`: the name a client gives its request, under which its rows are kept.  vLLM's front half adds a
random suffix to request ids; this one arrives as it was sent.  Without it rows carry the id the engine knows."""

LONGEST_REQUEST_ID = 200


class Recorder(Protocol):
    """Takes rows, in the order they happened."""

    def step(self, row: StepRow) -> None:
        """After a step; the step's verifications and requests came before it."""
        ...

    def verification(self, row: VerificationRow) -> None:
        """One request's outcome in the present step."""
        ...

    def request(self, row: RequestRow) -> None:
        """A request has ended."""
        ...

    def decision(self, row: DecisionRow) -> None:
        """Mode `auto` has changed its plan, from the present step on."""
        ...


class NullRecorder:
    """Keeps nothing."""

    def step(self, row: StepRow) -> None:
        """Forgotten."""

    def verification(self, row: VerificationRow) -> None:
        """Forgotten."""

    def request(self, row: RequestRow) -> None:
        """Forgotten."""

    def decision(self, row: DecisionRow) -> None:
        """Forgotten."""


def name_for_records(request_id: str, extra_args: dict[str, object] | None) -> str:
    """The id a request's rows carry: its client's own where one was sent, else the engine's."""
    own = extra_args.get(REQUEST_ID_KEY) if extra_args else None
    return own[:LONGEST_REQUEST_ID] if isinstance(own, str) and own else request_id
