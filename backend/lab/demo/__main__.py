"""Command line of the demo training: `outrider train-demo`, or `python -m backend.lab.demo`."""

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from backend.lab.demo.dflash import train_head
from backend.lab.demo.draft_model import train_draft_model
from backend.lab.demo.options import DemoOptions, DrafterOptions, DraftModelOptions, TargetOptions
from backend.lab.demo.train import train_demo
from backend.models.demo import DFLASH_DIR, DRAFT_MODEL_DIR, DRAFTER_DIR, TARGET_DIR


def parse(arguments: Sequence[str]) -> tuple[DemoOptions, Path | None]:
    """The options, and the directory for a draft model if only a draft model is to be trained."""
    parser = argparse.ArgumentParser(prog="outrider train-demo", description=__doc__)
    parser.add_argument("--target-dir", type=Path, default=TARGET_DIR)
    parser.add_argument("--drafter-dir", type=Path, help="the head's directory; default: the built-in one")
    parser.add_argument(
        "--target-minutes", type=float, default=TargetOptions().minutes, help="0: keep the target that is there (%(default)g)"
    )
    parser.add_argument("--drafter-minutes", type=float, default=DrafterOptions().minutes)
    parser.add_argument(
        "--tokens-per-step", type=int, default=DrafterOptions().tokens_per_step, help="of a head's training (%(default)s)"
    )
    parser.add_argument(
        "--generated-tokens",
        type=int,
        default=DrafterOptions().generated_tokens,
        help="text that the target writes for a head's training (%(default)s)",
    )
    parser.add_argument(
        "--head", choices=("eagle3", "dflash"), default="eagle3", help="`dflash`: only train a head that drafts in one pass"
    )
    parser.add_argument(
        "--draft-model",
        type=Path,
        nargs="?",
        const=DRAFT_MODEL_DIR,
        help="only train a draft model for the target that is there, into this directory",
    )
    parser.add_argument("--draft-model-minutes", type=float, default=DraftModelOptions().minutes)
    parser.add_argument("--draft-model-domain", choices=("code", "prose"), default=DraftModelOptions().domain)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    given = parser.parse_args(arguments)
    options = DemoOptions(
        target_dir=given.target_dir,
        drafter_dir=given.drafter_dir or (DFLASH_DIR if given.head == "dflash" else DRAFTER_DIR),
        head=given.head,
        device=given.device,
        seed=given.seed,
        compile=not given.no_compile,
        target=replace(TargetOptions(), minutes=given.target_minutes),
        drafter=replace(
            DrafterOptions(),
            minutes=given.drafter_minutes,
            tokens_per_step=given.tokens_per_step,
            generated_tokens=given.generated_tokens,
        ),
        draft_model=replace(DraftModelOptions(), minutes=given.draft_model_minutes, domain=given.draft_model_domain),
    )
    return options, given.draft_model


def main(arguments: Sequence[str]) -> None:
    options, draft_model = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if draft_model is not None:
        train_draft_model(options, draft_model)
    elif options.head == "dflash":
        train_head(options)
    else:
        train_demo(options)


if __name__ == "__main__":
    main(sys.argv[1:])
