"""Load on a running fleet, and how its drafter's head learns meanwhile: a line of JSON every few seconds.

    outrider serve --drafter grow --verifier-lookup false
    python scripts/learning_curve.py --seconds 300 --temperature 0.8

Prompts are pieces of the standard library's source.  `length` is the acceptance length of the drafter's drafts in that
interval, from the answers' own accounts.  `present_length` and `candidate_length` are the trainer's, on held-out sequences.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

LEARNED = ("version", "steps", "training_s", "sequences", "present_length", "candidate_length", "live_acceptance", "taken_back")


def prompts(seed: int) -> Iterator[str]:
    """Endless."""
    texts = [path.read_text(errors="ignore") for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    long = [text for text in texts if len(text) > 4000]
    draw = random.Random(seed)
    while True:
        text = draw.choice(long)
        start = draw.randrange(len(text) - 1500)
        yield text[start : start + draw.randrange(200, 600)]


async def run(options: argparse.Namespace) -> None:
    """Until the time is over."""
    source, began = prompts(options.seed), time.monotonic()
    tokens = drafts = accepted = 0

    def is_over() -> bool:
        return time.monotonic() - began > options.seconds

    async def ask(client: httpx.AsyncClient) -> None:
        nonlocal tokens, drafts, accepted
        body = {"model": options.model, "max_tokens": options.tokens, "temperature": options.temperature, "ignore_eos": True}
        while not is_over():
            asked = body | {"prompt": next(source), "outrider": {"stats": True}}
            answer = (await client.post("/v1/completions", json=asked)).raise_for_status().json()
            tokens += answer["usage"]["completion_tokens"]
            for each in answer["outrider"]["choices"][0]["sources"]:
                if each["source"] in ("fresh", "ahead"):
                    drafts, accepted = drafts + each["drafts"], accepted + each["accepted"]

    async def watch(client: httpx.AsyncClient) -> None:
        nonlocal tokens, drafts, accepted
        while not is_over():
            tokens = drafts = accepted = 0
            await asyncio.sleep(options.every)
            fleet = (await client.get("/fleet")).raise_for_status().json()
            learned: dict[str, Any] = fleet["drafters"][0].get("learning") or {}
            line = {
                "s": round(time.monotonic() - began),
                "tokens_per_s": round(tokens / options.every, 1),
                "length": round(1 + accepted / drafts, 3) if drafts else None,
                "drafts": drafts,
            }
            print(json.dumps(line | {name: learned[name] for name in LEARNED if name in learned}), flush=True)

    async with httpx.AsyncClient(base_url=options.url, timeout=120) as client:
        await asyncio.gather(watch(client), *(ask(client) for _ in range(options.concurrency)))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--every", type=float, default=10, help="seconds of a line")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=5)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
