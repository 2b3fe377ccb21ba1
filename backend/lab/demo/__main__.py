"""Command line of the demo training: `outrider train-demo`, or `python -m backend.lab.demo`."""

import argparse
import logging
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from backend.config.sources import Say
from backend.lab.demo.options import DrafterOptions, DraftModelOptions, TargetOptions
from backend.lab.demo.train import train_demo
from backend.models.demo import DFLASH_DIR, DRAFT_MODEL_DIR, DRAFTER_DIR, TARGET_DIR

DIRECTORIES = {"eagle3": DRAFTER_DIR, "dflash": DFLASH_DIR}


def parse(arguments: Sequence[str]) -> Namespace:
    """What to train: `target`, unless its `minutes` are 0, and `drafter` for it, of the kind `head`, into `drafter_dir`.

    `command` is for the record.
    """
    parser = argparse.ArgumentParser(prog="outrider train-demo", description=__doc__)
    target, head, model, say = TargetOptions(), DrafterOptions(), DraftModelOptions(), parser.add_argument
    only = "only train a draft model for the target that is there, into this directory"
    say("--target-dir", type=Path, default=TARGET_DIR)
    say("--drafter-dir", type=Path, help="the head's directory; default: the built-in one")
    say("--target-minutes", type=float, default=target.minutes, help="0: keep the target that is there (%(default)g)")
    say("--drafter-minutes", type=float, default=head.minutes)
    say("--tokens-per-step", type=int, default=head.tokens_per_step, help="of a head's training (%(default)s)")
    written = "text that the target writes for a head's training (%(default)s)"
    say("--generated-tokens", type=int, default=head.generated_tokens, help=written)
    say("--head", choices=DIRECTORIES, default="eagle3", help="`dflash`: only train a head that drafts in one pass")
    say("--draft-model", type=Path, nargs="?", const=DRAFT_MODEL_DIR, help=only)
    say("--draft-model-minutes", type=float, default=model.minutes)
    say("--device", choices=("auto", "cpu", "cuda"), default="auto")
    say("--seed", type=int, default=0)
    say("--no-compile", dest="compile", action="store_false", help="run without torch.compile")
    given = parser.parse_args(arguments)
    given.head = "draft-model" if given.draft_model else given.head
    given.drafter_dir = given.draft_model or given.drafter_dir or DIRECTORIES[given.head]
    given.command = shlex.join(["outrider", "train-demo", *arguments])
    given.target = TargetOptions(minutes=given.target_minutes if given.head == "eagle3" else 0.0)
    sizes = {"tokens_per_step": given.tokens_per_step, "generated_tokens": given.generated_tokens}
    given.drafter = (
        DraftModelOptions(minutes=given.draft_model_minutes)
        if given.draft_model
        else DrafterOptions(minutes=given.drafter_minutes, **sizes)
    )
    return given


def main(arguments: Sequence[str], say: Say = print) -> None:
    """Trains what the arguments ask for; it reports by its log."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train_demo(options)


if __name__ == "__main__":
    main(sys.argv[1:])
