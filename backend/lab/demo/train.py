"""`train_demo`: trains a target and its drafter on Python source, measures them, and writes both to their directories."""

import logging
import platform
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedTokenizerFast

from backend.lab.demo.drafter import save_drafter, train_drafter
from backend.lab.demo.evaluate import evaluate
from backend.lab.demo.llama import generate, load_llama, save_llama
from backend.lab.demo.options import DemoOptions
from backend.lab.demo.target import train_target
from backend.lab.demo.tokenizer import save_tokenizer, token_stream, train_tokenizer
from backend.models.writing import replacing, write_json
from backend.rollout.corpus import load_corpus

LOGGER = logging.getLogger(__name__)
VERIFIER_NAME = "outrider-demo-target"
RECORD = "training.json"
SAMPLE_PROMPT = 'import os\n\n\ndef read_lines(path):\n    """Return the lines of a file."""\n'


def train_demo(options: DemoOptions) -> None:
    """Trains both models and writes them, each with the training record, to `target_dir` and `drafter_dir`."""
    corpus, keeps_target = load_corpus(), not options.target.minutes
    if keeps_target:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(options.target_dir))
        target = load_llama(options.target_dir)
    else:
        documents = (document.text for document in corpus.train)
        tokenizer = train_tokenizer(documents, options.vocab_size, options.target.positions)
    stream, validation = (token_stream(tokenizer, part) for part in (corpus.train, corpus.validation))
    record: dict[str, Any] = {}
    if not keeps_target:
        target, progress = train_target(options, stream)
        record["target"] = {"options": asdict(options.target)} | progress.spent()
    drafter, progress = train_drafter(options, target, stream)
    measured = evaluate(target.eval(), drafter.eval(), validation, options.target.length)
    LOGGER.info("measured: %s", measured)
    # It contains no paths of this machine.
    record |= {
        "command": (
            f"python -m backend.lab.demo --target-minutes {options.target.minutes:g}"
            f" --drafter-minutes {options.drafter.minutes:g} --tokens-per-step {options.drafter.tokens_per_step}"
            f" --generated-tokens {options.drafter.generated_tokens} --seed {options.seed}"
        ),
        "data": {
            "source": f"standard library of Python {platform.python_version()}",
            "train_tokens": len(stream),
            "validation_tokens": len(validation),
        },
        "drafter": {"options": asdict(options.drafter)} | progress.spent(),
        "measured": measured,
    }
    if not keeps_target:
        with replacing(options.target_dir) as fresh:
            save_llama(target, fresh)
            save_tokenizer(tokenizer, fresh)
            write_json(fresh / RECORD, record)
    with replacing(options.drafter_dir) as fresh:
        save_drafter(drafter, target, fresh, VERIFIER_NAME)
        write_json(fresh / RECORD, record)
    prompt = tokenizer(SAMPLE_PROMPT, return_tensors="pt").input_ids.to(target.device)
    LOGGER.info("sample:\n%s", tokenizer.decode(generate(target, prompt, 128)[0]))
