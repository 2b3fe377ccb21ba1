"""Which draft tokens count as accepted: those that were emitted."""

from types import SimpleNamespace
from typing import Any

import pytest

from backend.engine.counting import CountingScheduler, Drafted


class Vllm:
    """vLLM's scheduler: cuts what was sampled at the request's end."""

    def __init__(self, room: int) -> None:
        self.room = room
        params = SimpleNamespace(extra_args=None)
        self.requests = {"r": SimpleNamespace(num_tokens=9, num_prompt_tokens=5, sampling_params=params)}

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        tokens = model_runner_output.sampled_token_ids[0][: self.room]
        ended = "length" if len(tokens) == self.room else None
        output = SimpleNamespace(request_id="r", new_token_ids=tokens, prefill_stats=None, finish_reason=ended)
        return {0: SimpleNamespace(outputs=[output])}


class Scheduler(CountingScheduler, Vllm):
    def drafted_by(self, request_id: str) -> Drafted:
        return Drafted("d", source="prediction")


@pytest.mark.parametrize(("room", "accepted"), [(20, 8), (9, 8), (8, 8), (2, 2), (1, 1)])
def test_draft_tokens_behind_the_end_are_not_accepted(room: int, accepted: int) -> None:
    scheduler = Scheduler(room)
    scheduler.accounts.began("r", 0)
    step = SimpleNamespace(num_scheduled_tokens={"r": 9}, scheduled_spec_decode_tokens={"r": list(range(8))})
    scheduler.update_from_output(step, SimpleNamespace(sampled_token_ids=[list(range(9))], req_id_to_index={"r": 0}))
    counted = scheduler.counters.drafter("d")
    assert (counted.draft_tokens, counted.accepted_tokens, sum(counted.accepted_by_position)) == (8, accepted, accepted)
    account = scheduler.accounts.ended("r") or scheduler.accounts.take()[0][0]
    assert (account.tokens, account.tallies[0].accepted) == (min(room, 9), accepted)
    assert account.accepted_lengths[accepted] == 1
