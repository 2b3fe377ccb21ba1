"""Episodes with tool calls: each output of the model calls a calculator, and the result continues the conversation.

    python examples/calculator.py [--affinity none]

Structured outputs make sure that each output is a call.  Prints the share of prompt tokens that verifiers had in their prefix
caches.  With sessions (the default), a turn goes to the verifier that has computed the turns before it.
"""

from __future__ import annotations

import argparse
import random
import re

from outrider import Episode, Fleet

CALL = r"calculate\([0-9]{1,2} [+*-] [0-9]{1,2}\)\n"
TURNS = 8


def calculator(episode: Episode) -> str | float:
    """Answers a call.  The result of the last call is the reward."""
    call = re.fullmatch(r"calculate\((\d+) (.) (\d+)\)\n", episode.turns[-1].text or "")
    if call is None:  # Cut off by `max_tokens`.
        return 0.0
    left, right = int(call[1]), int(call[3])
    result = {"+": left + right, "*": left * right, "-": left - right}[call[2]]
    return f"{result}\n" if len(episode.turns) < TURNS else float(result)


def beginnings(count: int) -> list[str]:
    """Starts of about 400 tokens each, all different."""
    draw = random.Random(0)
    return ["".join(f"account_{draw.randrange(1000)} = {draw.randrange(1000)}\n" for _ in range(40)) for _ in range(count)]


def main() -> None:
    """Runs the episodes and prints the sums over all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--affinity", default="session", help="session or none")
    parser.add_argument("--episodes", type=int, default=16)
    options = parser.parse_args()
    sampling = {"max_tokens": 32, "seed": 1, "structured_outputs": {"regex": CALL}}
    with Fleet("demo", verifiers=2, gateway_affinity=options.affinity) as fleet:
        episodes = list(fleet.episodes(beginnings(options.episodes), calculator, sampling))
    turns = [turn for episode in episodes for turn in episode.turns[1:]]
    prompts = sum(len(turn.prompt_token_ids) for turn in turns)
    cached = sum(turn.cached_tokens for turn in turns)
    print(f"{len(turns)} turns after the first: {cached} of {prompts} prompt tokens cached ({cached / prompts:.0%})")


if __name__ == "__main__":
    main()
