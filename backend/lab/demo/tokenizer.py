"""The demo tokenizer: byte-level BPE over Python source, saved so that transformers and vLLM load it.

Owns the special tokens, the rule that splits text before BPE merges, the chat template, and the making of token streams.

Every sequence starts with `<|begin|>`: the tokenizer adds it to plain text, the chat template writes it, and training puts it
before every window.  So the model never sees another token at position 0.  `<|endoftext|>` ends a file.  A line break is always
a token of its own, and so is the indentation after it.  So a prompt that ends with a line break is tokenized as in training.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from backend.rollout.corpus import Document

BEGIN, END, PAD = "<|begin|>", "<|endoftext|>", "<|pad|>"
BEGIN_ID, END_ID, PAD_ID = 0, 1, 2
PIECES = (
    r"\n"
    r"|(?<=\n) +"
    r"| ?_*\p{L}+"
    r"|\p{N}"
    r"| ?_+"
    r"| ?[^\s\p{L}\p{N}_]+"
    r"| +"
    r"|\s"
)
CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}"
    "{{- '# ' + (message['content'] | trim | replace('\\n', '\\n# ')) + '\\n' -}}"
    "{%- else -%}"
    "{{- message['content'] -}}"
    "{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of exactly `vocab_size` tokens, special tokens and the 256 bytes included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B:1", special_tokens=[(BEGIN, BEGIN_ID)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, which contains the chat template.

    The tokenizer's class gets the name that every transformers version knows.  Keys that tell from where it was loaded are
    removed.
    """
    tokenizer.save_pretrained(str(directory), save_jinja_files=False)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only", "backend", "name_or_path"):
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def token_stream(tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]) -> npt.NDArray[np.int32]:
    """All documents in one stream `[num_tokens]`, each as `<|begin|> text <|endoftext|>`."""
    encodings = tokenizer.backend_tokenizer.encode_batch([document.text for document in documents])
    rows = [np.asarray([*encoding.ids, END_ID], dtype=np.int32) for encoding in encodings]
    return np.concatenate(rows)
