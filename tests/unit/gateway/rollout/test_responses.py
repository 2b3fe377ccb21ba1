"""Free responses of a round: their ends, log probabilities and seeds, whichever verifiers wrote them."""

import numpy as np
import pytest
from vllm.v1.outputs import LogprobsLists

from backend.config import Settings
from backend.engine.front.offline import OfflineProcessor, response_row
from backend.models.demo import TARGET_DIR
from backend.rollout.outcome import RoundResult
from backend.rollout.requests import RolloutRequest, Tokenizer
from backend.rollout.trace import Case
from tests.support.fake_verifier import FakeVerifier, Sequence, count_up
from tests.support.rollout_workers import Workers, run


@pytest.fixture(scope="module")
def front() -> OfflineProcessor:
    return OfflineProcessor(Settings(), str(TARGET_DIR))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(TARGET_DIR))


async def play(workers: Workers, front: OfflineProcessor, batch: list[RolloutRequest], seed: int | None = None) -> RoundResult:
    async with workers.joined() as fleet:
        return await run(fleet, batch, front.outputs(fleet.core), seed)


async def test_a_stop_string_ends_a_response_that_two_verifiers_wrote(
    workers: Workers, front: OfflineProcessor, tokenizer: Tokenizer
) -> None:
    """The first one dies between the two halves of the stop string; the second one has emitted more than it."""
    written = tokenizer.encode_response("    return value + other\n\n\nclass Other:\n")
    prompt = tokenizer.encode_prompt("def add(value, other):\n")
    text = tokenizer.decode(written)
    half = next(n for n in range(len(written)) if "return val" in tokenizer.decode(written[:n]))
    params = front.params(prompt, {"stop": [text[text.index("val") :][:12]], "logprobs": 1, "max_tokens": 200})

    def emit(sequence: Sequence, tokens: list[int]) -> None:
        ids, many = np.array([[token, 9] for token in tokens]), len(tokens)
        sequence.emit(tokens, logprobs=LogprobsLists(ids, np.array([[-0.5, -1.5]] * many), np.array([1] * many)))

    async def begin(verifier: FakeVerifier, sequence: Sequence) -> None:
        emit(sequence, written[:half])

    async def go_on(verifier: FakeVerifier, sequence: Sequence) -> None:
        assert sequence.emitted == written[:half]
        emit(sequence, written[half:])
        await sequence.aborted.wait()

    doomed = workers.start("verifier-0", begin)

    def replace_it() -> None:
        if any(record.emitted for record in workers.fleet.core.sequences) and workers.verifiers["verifier-0"] is doomed:
            workers.kill("verifier-0")
            workers.start("verifier-0", go_on)

    workers.on_look = replace_it
    finished = await play(workers, front, [RolloutRequest(0, Case(0, "p", ""), prompt, None, params, 50)])
    row = response_row(finished.responses[0])
    assert row["text"] == text[: text.index("val")]
    assert (row["finish_reason"], row["stop_reason"]) == ("stop", params.stop[0])
    kept = len(row["token_ids"])
    assert half < kept < len(written)
    assert row["token_ids"] == written[:kept], "what came after the stop string is gone"
    assert len(row["logprobs"]["content"]) == kept
    last = {"token_id": written[kept - 1], "logprob": -0.5, "rank": 1}
    other = {"token_id": 9, "logprob": -1.5, "rank": 1}
    assert row["logprobs"]["content"][-1] == {**last, "top_logprobs": [last, other]}
    (row_of_request,) = finished.parts[0].requests
    assert row_of_request.tokens == kept


async def test_a_seed_makes_a_seed_of_every_free_response(workers: Workers, front: OfflineProcessor) -> None:
    verifier = workers.start("verifier-0", count_up)
    params = front.params([1, 2], {"max_tokens": 2})
    batch = [RolloutRequest(n, Case(n, "p", ""), [1, 2], None, params, 2, seed) for n, seed in ((0, None), (1, None), (2, 7))]
    await play(workers, front, batch, seed=5)
    seeds = {each.request_id.rpartition("/")[2]: each.request.sampling_params.seed for each in verifier.sequences}
    assert seeds["2"] == 7, "a prompt's own seed comes first"
    assert len(set(seeds.values())) == 3
    assert None not in seeds.values()
