"""`train_demo`: trains a target and its drafter on Python source, measures them, and writes both to their directories.

Owns the order of the stages.  Every stage leaves its result in `run_dir`, so a call continues where an interrupted one stopped.
"""

import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from backend.lab.demo.checkpoints import save_drafter, save_target
from backend.lab.demo.drafter import train_drafter
from backend.lab.demo.evaluate import ACCEPTANCE_PLAN, Scores, evaluate, sample
from backend.lab.demo.model import Target
from backend.lab.demo.options import DemoOptions
from backend.lab.demo.target import train_target
from backend.lab.demo.tokenizer import save_tokenizer, token_stream, train_tokenizer
from backend.lab.demo.training import Progress
from backend.learning.head import Drafter
from backend.models.writing import DRAFT_LENGTH, replacing
from backend.rollout.corpus import load_corpus

LOGGER = logging.getLogger(__name__)
VERIFIER_NAME = "outrider-demo-target"
RECORD = "training.json"
SAMPLE_PROMPT = 'import os\n\n\ndef read_lines(path):\n    """Return the lines of a file."""\n'


@dataclass(frozen=True, slots=True)
class Data:
    """The tokenizer and the token streams of both splits."""

    tokenizer: PreTrainedTokenizerFast
    train: npt.NDArray[np.int32]
    validation: npt.NDArray[np.int32]
    documents: Mapping[str, int]


def train_demo(options: DemoOptions) -> Scores:
    """Train both models and write them to `target_dir` and `drafter_dir`; returns the measured figures."""
    data = prepare_data(options)
    target, target_progress = train_target(options, data.train, data.validation)
    LOGGER.info("target: %.2fM tokens in %.1f min", target_progress.tokens / 1e6, target_progress.elapsed_s / 60)
    drafter, drafter_progress = train_drafter(options, target, data.train)
    scores = evaluate(target.eval(), drafter.eval(), data.validation, options.target.length)
    LOGGER.info(
        "validation loss %.4f, perplexity %.2f, acceptance length %.3f",
        scores.loss,
        scores.perplexity,
        scores.acceptance.length,
    )
    package(options, data, target, drafter, record(options, data, scores, target_progress, drafter_progress))
    continuation = sample(target, data.tokenizer(SAMPLE_PROMPT, return_tensors="pt").input_ids[0], 128)
    LOGGER.info("sample:\n%s%s", SAMPLE_PROMPT, data.tokenizer.decode(continuation))
    return scores


def prepare_data(options: DemoOptions) -> Data:
    """Read the corpus, train the tokenizer, and tokenize both splits; done once per run directory."""
    directory = options.run_dir / "data"
    if not directory.exists():
        corpus = load_corpus()
        tokenizer = train_tokenizer((document.text for document in corpus.train), options.vocab_size, options.target.positions)
        with replacing(directory) as fresh:
            save_tokenizer(tokenizer, fresh)
            np.save(fresh / "train.npy", token_stream(tokenizer, corpus.train))
            np.save(fresh / "validation.npy", token_stream(tokenizer, corpus.validation))
            counts = {"train": len(corpus.train), "validation": len(corpus.validation)}
            (fresh / "documents.json").write_text(json.dumps(counts), encoding="utf-8")
    return Data(
        tokenizer=PreTrainedTokenizerFast.from_pretrained(str(directory)),
        train=np.load(directory / "train.npy"),
        validation=np.load(directory / "validation.npy"),
        documents=json.loads((directory / "documents.json").read_text(encoding="utf-8")),
    )


def package(options: DemoOptions, data: Data, target: Target, drafter: Drafter, description: Mapping[str, Any]) -> None:
    """Write both models, each with the training record, to their directories."""
    text = json.dumps(description, indent=2) + "\n"
    with replacing(Path(options.target_dir)) as fresh:
        save_target(target, fresh)
        save_tokenizer(data.tokenizer, fresh)
        (fresh / RECORD).write_text(text, encoding="utf-8")
    with replacing(Path(options.drafter_dir)) as fresh:
        save_drafter(drafter, fresh, VERIFIER_NAME)
        (fresh / RECORD).write_text(text, encoding="utf-8")


def record(options: DemoOptions, data: Data, scores: Scores, target: Progress, drafter: Progress) -> dict[str, Any]:
    """The training record: command, data, options and measured figures; it contains no paths of this machine."""
    return {
        "command": (
            f"python -m backend.lab.demo --target-minutes {options.target.minutes:g}"
            f" --drafter-minutes {options.drafter.minutes:g} --seed {options.seed}"
        ),
        "data": {
            "source": f"standard library of Python {platform.python_version()}",
            "documents": dict(data.documents),
            "train_tokens": len(data.train),
            "validation_tokens": len(data.validation),
        },
        "target": {"options": asdict(options.target)} | _spent(target),
        "drafter": {"options": asdict(options.drafter)} | _spent(drafter),
        "measured": {
            "validation_loss_nats_per_token": round(scores.loss, 4),
            "validation_perplexity_per_token": round(scores.perplexity, 3),
            "acceptance_length": round(scores.acceptance.length, 3),
            "acceptance_rate_by_position": [
                round(count / max(1, scores.acceptance.drafts), 4) for count in scores.acceptance.accepted_by_position
            ],
            "acceptance_setting": f"greedy, drafts of {DRAFT_LENGTH}, {ACCEPTANCE_PLAN}",
        },
    }


def _spent(progress: Progress) -> dict[str, Any]:
    """Steps, tokens, minutes, and numbers of windows by their length in tokens, of one training."""
    return {
        "steps": progress.step,
        "tokens_seen": progress.tokens,
        "windows_by_length": {str(length): count for length, count in sorted(progress.drawn.items())},
        "minutes": round(progress.elapsed_s / 60, 1),
    }
