"""GRPO on the demo model with rollouts from a fleet.  It learns to write lower-case letters, in minutes on two CPU cores.

    python examples/grpo.py [--steps 40] [--mode off] [--off-policy] [--seeded] [--drafter HEAD --learning always]

The reward of an output is its share of lower-case letters.  By default training is on policy: each rollout is drawn by the
newest weights.  With `--off-policy`, the next rollout starts before the update, and the importance ratio corrects for it.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import backend.models.demo
from outrider import Fleet, Sample

TARGET = Path(backend.models.demo.__file__).parent / "target"
PROMPTS = [
    "def read_lines(path):\n    ",
    "class Stack:\n",
    "import os\n\n",
    "def add(a, b):\n",
    "for line in lines:\n    ",
    "if __name__ == ",
    "try:\n    ",
    "# The number of ",
]
CLIP = 0.2


def reward(sample: Sample) -> float:
    """The share of lower-case letters in the output, from 0 to 1."""
    text = sample.text or ""
    return sum(each.islower() for each in text) / max(len(text), 1)


def loss_of(model: torch.nn.Module, samples: list[Sample], advantages: torch.Tensor) -> torch.Tensor:
    """The negative clipped objective of PPO, averaged over all output tokens.  `advantages` has one number per sample."""
    sequences = [torch.tensor(each.prompt_token_ids + each.token_ids) for each in samples]
    tokens = pad_sequence(sequences, batch_first=True)
    logprobs = torch.log_softmax(model(tokens).logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]
    terms = []
    for row, sample, advantage in zip(logprobs, samples, advantages, strict=True):
        first = len(sample.prompt_token_ids) - 1
        ratio = torch.exp(row[first : first + len(sample.token_ids)] - torch.tensor(sample.logprobs))
        terms.append(torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage))
    return -torch.cat(terms).mean()


def acceptance_length(samples: list[Sample]) -> float:
    """Tokens that a drafted verification emits on average; 1 if nothing was drafted."""
    counts: list[list[int]] = [each.account["accepted_lengths"] for each in samples if each.account]
    drafts = sum(map(sum, counts))
    return 1 + sum(length * count for each in counts for length, count in enumerate(each)) / max(drafts, 1)


def versions(samples: list[Sample]) -> set[int]:
    """The versions of the weights that drew the samples."""
    return {int(span.version) for each in samples for span in each.weight_versions}


def main() -> None:
    """Trains and prints one line per step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--mode", default="auto", help="the fleet's: auto, sync, ahead, off")
    parser.add_argument("--drafter", default="demo", help="what drafts, as for `outrider serve`")
    parser.add_argument("--learning", default="off", help="whether its head learns from the rollouts: off, on, always")
    parser.add_argument("--off-policy", action="store_true")
    parser.add_argument(
        "--seeded", action="store_true", help="outputs repeat, so that runs can be compared; drafts are accepted less"
    )
    parser.add_argument("--group", type=int, default=16, help="samples of each prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)

    drafters = 0 if options.mode == "off" else 1
    with Fleet("demo", options.drafter, mode=options.mode, drafters=drafters, drafting_learning=options.learning) as fleet:

        def roll_out(step: int) -> list[int]:
            sampling = {"max_tokens": options.max_tokens, "logprobs": 0}
            firsts = itertools.count(step * len(PROMPTS) * options.group, options.group)
            seeds = [{"seed": next(firsts)} if options.seeded else {} for _ in PROMPTS]
            return [fleet.submit(each, sampling | seed, n=options.group) for each, seed in zip(PROMPTS, seeds, strict=True)]

        began = time.monotonic()
        running = roll_out(0)
        for step in range(options.steps):
            groups = [fleet.wait(each) for each in running]
            rolled_out = time.monotonic()
            if options.off_policy and step + 1 < options.steps:
                running = roll_out(step + 1)
            samples = [each for group in groups for each in group]
            rewards = torch.tensor([[reward(each) for each in group] for group in groups])
            spread = rewards.std(1, keepdim=True) + 1e-4
            loss = loss_of(model, samples, ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            fleet.update_weights(model.state_dict())
            if not options.off_policy and step + 1 < options.steps:
                running = roll_out(step + 1)
            now = time.monotonic()
            times = f"rollout {rolled_out - began:5.2f} s  training {now - rolled_out:5.2f} s"
            drafted = f"acceptance length {acceptance_length(samples):.2f}"
            drawn_by = f"weights {min(versions(samples))}-{max(versions(samples))}"
            print(f"step {step:3}  reward {rewards.mean():.3f}  {times}  {drafted}  {drawn_by}", flush=True)
            began = now


if __name__ == "__main__":
    main()
