"""`outrider.Fleet` joins a real fleet."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from backend.models.demo import TARGET_DIR
from examples.calculator import CALL, TURNS, beginnings, calculator
from outrider import Fleet, OutriderError
from tests.integration.served.conftest import KEY
from tests.support.fleet_process import ServedFleet, wait_for

pytestmark = pytest.mark.engine

ROUNDED = 0.1
"""By how much two computations in bfloat16 may differ, in nats."""
GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}


def test_samples_of_a_joined_fleet(fleet: ServedFleet) -> None:
    with Fleet.join(fleet.url, api_key=KEY) as joined:
        fields = {"seed": 1, "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
        first = {(s.index, s.sample): s for s in joined.generate(["def f(", "import "], fields, n=2)}
        again = {(s.index, s.sample): s for s in joined.generate(["def f(", "import "], fields, n=2)}
        assert sorted(first) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert {key: s.token_ids for key, s in first.items()} == {key: s.token_ids for key, s in again.items()}
        assert all(len(s.token_ids) == 8 and s.logprobs is not None and len(s.logprobs) == 8 for s in first.values())
        assert first[0, 0].token_ids != first[0, 1].token_ids
        assert first[0, 0].account is not None
        assert first[0, 0].account["tokens"] == 8
        with pytest.raises(OutriderError) as raised:
            list(joined.generate(["x"], {"temperature": -3}))
        assert raised.value.status == 400


def test_logprobs_of_the_model_or_of_what_was_drawn_from(fleet: ServedFleet) -> None:
    model = AutoModelForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.bfloat16)
    prompt, sampling = [5, 6, 7], {"temperature": 0.5, "top_k": 20, "seed": 1, "max_tokens": 48, "ignore_eos": True}
    with Fleet.join(fleet.url, api_key=KEY) as joined:
        for mode in (None, "raw", "processed"):
            (sample,) = joined.generate([prompt], {**sampling, "logprobs": 0, "logprobs_mode": mode})
            with torch.no_grad():
                logits = model(torch.tensor([prompt + sample.token_ids])).logits[0, len(prompt) - 1 : -1].float()
            if mode == "processed":
                logits /= 0.5
                logits[logits < logits.topk(20).values[:, -1:]] = -torch.inf
            expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            assert sample.logprobs is not None
            off = (torch.tensor(sample.logprobs) - expected).abs().max()
            print(f"{mode}: {off:.2g} from transformers at most")
            assert off < ROUNDED
            body = {"model": "demo", "prompt": prompt, "logprobs": 0, "outrider": {"logprobs_mode": mode}, **sampling}
            (choice,) = fleet.http.post("/v1/completions", json=body).json()["choices"]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(sample.logprobs, abs=ROUNDED)
    few = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "top_k": 3, "logprobs": True, "top_logprobs": 3}
    for mode, whole in (("raw", False), ("processed", True)):
        answer = fleet.http.post("/v1/chat/completions", json={**few, "model": "demo", "outrider": {"logprobs_mode": mode}})
        tokens = answer.json()["choices"][0]["logprobs"]["content"]
        sums = [sum(math.exp(top["logprob"]) for top in each["top_logprobs"]) for each in tokens]
        assert all(each > 1 - 1e-4 for each in sums) is whole


def test_a_pause_holds_what_runs_and_what_comes(fleet: ServedFleet) -> None:
    with Fleet.join(fleet.url, api_key=KEY) as joined:
        running = joined.submit("def f(", {**GREEDY, "max_tokens": 500})
        joined.pause()
        new = joined.submit("import ", GREEDY)
        wait_for(lambda: fleet.metric("outrider_requests_in_flight") == 2)
        assert joined.poll(running) is joined.poll(new) is None
        joined.resume()
        assert [len(joined.wait(each)[0].token_ids) for each in (running, new)] == [500, 16]


def test_tool_calls_of_an_episode(fleet: ServedFleet) -> None:
    """Each turn begins with all that was said before, and every call is one that the tool can read."""
    sampling = {"max_tokens": 32, "seed": 3, "structured_outputs": {"regex": CALL}}
    with Fleet.join(fleet.url, api_key=KEY) as joined:
        for episode in joined.episodes(beginnings(1), calculator, sampling, n=2):
            assert episode.reward is not None
            assert len(episode.turns) == TURNS
            assert len(episode.token_ids) == len(episode.output_mask)
            assert sum(episode.output_mask) == sum(len(turn.token_ids) for turn in episode.turns)
            for turn, after in zip(episode.turns, episode.turns[1:], strict=False):
                both = turn.prompt_token_ids + turn.token_ids
                assert after.prompt_token_ids[: len(both)] == both
                # Nothing is cached where routing, without affinity, has sent the turn to the other verifier.
                assert after.cached_tokens < len(after.prompt_token_ids)
