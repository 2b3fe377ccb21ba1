"""`outrider bench --micro`: the drafter, the drafting codec, the transport and routing, each alone.

`run` is the parent's; `measure_drafter` runs in a child on the drafter's cores, the echo of the transport in another.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from backend.config import DraftingSettings, Settings
from backend.config.settings import Affinity, Routing
from backend.fleet.speed import Speed
from backend.lab.bench.children import ENVIRONMENT, Child, close_all
from backend.lab.bench.options import OWN, Options
from backend.lab.bench.plan import CoreSplit
from backend.models.resolve import Say, resolve
from backend.routing.routers import Ask, Candidate, Measured, make_router
from backend.transport import Buffer, Dealer, Hub, RingReader, RingWriter, Wire
from backend.wire.drafting import Commit, Draft, Drafts, Round, decode_to_drafter, decode_to_verifier, encode

BATCHES = (1, 4, 16)
CONTEXTS = (64, 512, 2048)
PAYLOADS = (256, 4096, 65536, 1048576)
ANSWER_BYTES = 1024
ROUNDS = {
    "16 requests x 3 rows, demo": 16 * 3 * 256 * 4,
    "1 request x 5 rows of 4096, 16 bit": 5 * 4096 * 2,
    "16 requests x 5 rows of 4096, 16 bit": 16 * 5 * 4096 * 2,
    "prefill, 2000 rows of 4096, 16 bit": 2000 * 4096 * 2,
}
"""Bytes of features per round; the answer is small."""
ROWS = 3
"""Rows that a verification adds to each request: a usual acceptance length."""
REPEATS = 30
CODEC_REPEATS = 300
VERIFIERS = 1000
PROMPT_TOKENS = 1024
WARM_UP = 3
ANSWER_TIMEOUT_S = 30.0


def run(options: Options, split: CoreSplit, about: Mapping[str, Any], output: Path, say: Say) -> None:
    """Measures all four and writes micro.json."""
    own = options.targets == (OWN,)
    settings = Settings(model=options.model or "", drafter=options.drafter or "") if own else Settings()
    models = resolve(settings, say)
    k = options.ks[0]
    with tempfile.TemporaryDirectory(prefix="outrider-") as name:
        directory = Path(name)
        drafter = _drafter(models.target_dir, models.drafter_dir, split, k, directory, say)
        codec = [measure_codec(batch, k) for batch in BATCHES]
        for row in codec:
            say(f"codec, batch {row['batch']}: encode {row['encode_us']:.0f} us, decode {row['decode_us']:.0f} us")
        transport, rounds = _transport(split, directory, say)
    routing = [measure_routing(policy, affinity) for affinity in ("none", "both") for policy in get_args(Routing)]
    for row in routing:
        say(f"routing, {VERIFIERS} verifiers, {row['policy']}, affinity {row['affinity']}: {row['choose_us']:.0f} us")
    content = {
        **about,
        "k": k,
        "drafter": drafter,
        "codec": codec,
        "transport": transport,
        "rounds": rounds,
        "routing": routing,
    }
    (output / "micro.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    say(f"wrote {output}/micro.json")


def _drafter(target: str, head: str | None, split: CoreSplit, k: int, directory: Path, say: Say) -> list[dict[str, float]]:
    job = {
        "role": "micro",
        "cores": split.drafter,
        "environment": ENVIRONMENT,
        "target_dir": target,
        "head_dir": head,
    }
    child = Child(job, directory / "micro.log")
    rows = []
    try:
        child.wait_ready()
        for batch in BATCHES:
            for context in CONTEXTS:
                row: dict[str, float] = child.ask({"batch": batch, "context": context, "k": k})
                rows.append(row)
                say(
                    f"drafter, batch {batch}, context {context}: {row['ms_per_round']:.2f} ms per round, "
                    f"{row['rows_per_s']:.0f} rows/s, {row['draft_tokens_per_s']:.0f} draft tokens/s"
                )
    finally:
        close_all([child])
    return rows


def measure_drafter(target_dir: str, head_dir: str | None, batch: int, context: int, k: int) -> dict[str, float]:
    """Rounds of `batch` requests that each add `ROWS` true rows behind `context` tokens and want `k` draft tokens."""
    import torch

    from backend.drafter.process import DrafterModel, build_proposer
    from backend.drafter.proposer import Ask, Until

    settings = DraftingSettings(cache_tokens=max(4096, 2 * batch * (context + (REPEATS + WARM_UP + 1) * ROWS + k)))
    proposer = build_proposer(DrafterModel(target_dir, head_dir), settings)
    chance = random.Random(0)
    generator = torch.Generator().manual_seed(0)

    def ask(request: int, length: int, rows: int) -> Ask:
        width = proposer.hidden
        features = torch.randn(rows, width, generator=generator) if width else None
        return Ask(request, length, rows, features, Until(k))

    def tokens(count: int) -> list[int]:
        return chance.choices(range(proposer.vocab_size), k=count)

    context = min(context, proposer.max_position - (REPEATS + WARM_UP + 1) * ROWS - k)
    for request in range(batch):
        proposer.open(request, tokens(context), context - 1, 0.0)
    proposer.draft([ask(request, context, context - 1) for request in range(batch)])
    spent = []
    for number in range(1, WARM_UP + REPEATS + 1):
        length = context + number * ROWS
        for request in range(batch):
            proposer.commit(request, length, tokens(ROWS), ROWS, 0.0)
        asks = [ask(request, length, ROWS) for request in range(batch)]
        began = time.perf_counter()
        proposer.draft(asks)
        spent.append(time.perf_counter() - began)
    median = statistics.median(spent[WARM_UP:])
    return {
        "batch": batch,
        "context": context,
        "ms_per_round": median * 1e3,
        "ms_least": min(spent[WARM_UP:]) * 1e3,
        "rows_per_s": batch * ROWS / median,
        "draft_tokens_per_s": batch * k / median,
    }


def measure_codec(batch: int, k: int) -> dict[str, float]:
    """A round and its answer, for `batch` requests: both ends' share of one verification, in microseconds."""
    items: list[Any] = [Commit(f"request-{i:08x}", 500 + i, list(range(ROWS)), ROWS) for i in range(batch)]
    question = Round(1, "float32", 256, items)
    answer = Drafts(
        1, 1500, 20, [Draft(f"request-{i:08x}", 500 + i, list(range(1000, 1000 + k)), [0.5] * 2 * k) for i in range(batch)]
    )
    asked, answered = encode(question), encode(answer)
    return {
        "batch": batch,
        "encode_us": _median_us(lambda: (encode(question), encode(answer)), CODEC_REPEATS),
        "decode_us": _median_us(lambda: (decode_to_drafter(asked), decode_to_verifier(answered)), CODEC_REPEATS),
        "round_bytes": len(asked),
        "drafts_bytes": len(answered),
    }


def measure_routing(policy: Routing, affinity: Affinity) -> dict[str, Any]:
    """Median time of one choice among `VERIFIERS`, all of them measured, for a prompt seen before."""
    dice = random.Random(0)
    measured = Measured(3, 0, 1e5, 1e3, Speed(0.02, 0.002, 3.0), 100.0)
    candidates = [Candidate(f"verifier-{i}", dice.randrange(9999), dice.randrange(9), i, measured) for i in range(VERIFIERS)]
    ask = Ask(PROMPT_TOKENS, [dice.randrange(4000) for _ in range(PROMPT_TOKENS)], session="one")
    router = make_router(policy, affinity, seed=0, slots=64)
    chosen_us = _median_us(lambda: router.choose(ask, candidates), CODEC_REPEATS)
    return {"policy": policy, "affinity": affinity, "choose_us": chosen_us}


def _transport(split: CoreSplit, directory: Path, say: Say) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """There and back over ipc, to a process on the drafter's cores."""
    job = {"role": "echo", "cores": split.drafter, "address": f"ipc://{directory}/echo"}
    child = Child(job, directory / "echo.log")
    hub = Hub(Wire())
    rows = []
    try:
        dealer = hub.dealer(child.wait_ready(), "micro")
        for size in PAYLOADS:
            payload = bytes(size)
            us = _median_us(lambda payload=payload: _there_and_back(hub, dealer, payload), REPEATS)  # type: ignore[misc]
            rows.append({"bytes": size, "round_trip_us": us, "mb_per_s": 2 * size / us})
            say(f"ipc, {size} bytes: {us:.0f} us there and back, {2 * size / us:.0f} MB/s")
        rounds = _rounds(hub, dealer, say)
    finally:
        hub.close()
        close_all([child])
    return rows, rounds


def _rounds(hub: Hub, dealer: Dealer, say: Say) -> list[dict[str, Any]]:
    """What a round costs beside the drafter's compute: all through the socket, and with the features in a ring.

    The ring is written and read here, around a message and its answer: the same work, in the same order, as by two processes.
    """
    answer = bytes(ANSWER_BYTES)
    writer = RingWriter(2 * max(ROUNDS.values()))
    reader = RingReader(writer.ref)

    def by_ring(features: memoryview) -> None:
        at = writer.write(features)
        _there_and_back(hub, dealer, answer)
        assert at is not None
        reader.read(at, len(features))

    rows: list[dict[str, Any]] = []
    for name, size in ROUNDS.items():
        features = memoryview(bytearray(size))
        socket_us = _median_us(lambda features=features: _there_and_back(hub, dealer, answer, features), REPEATS)  # type: ignore[misc]
        ring_us = _median_us(lambda features=features: by_ring(features), REPEATS)  # type: ignore[misc]
        rows.append({"round": name, "bytes": size, "socket_us": socket_us, "ring_us": ring_us})
        say(f"round of {name}: {socket_us:.0f} us by socket, {ring_us:.0f} us by ring")
    reader.close()
    writer.close()
    return rows


def _there_and_back(hub: Hub, dealer: Dealer, *frames: Buffer) -> None:
    dealer.send(*frames)
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while dealer.receive() is None:
        if time.monotonic() > deadline:
            raise TimeoutError("the echo does not answer")
        hub.poll(1.0)


def _median_us(action: Callable[[], Any], repeats: int) -> float:
    for _ in range(WARM_UP):
        action()
    spent = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent) * 1e6
