"""A character tokenizer in the Hugging Face format, for tasks with a small alphabet."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

PAD, EOS = "<pad>", "<eos>"


def write_character_tokenizer(alphabet: str, folder: Path) -> dict[str, int]:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; returns the vocabulary."""
    vocabulary = {PAD: 0, EOS: 1}
    for character in sorted(set(alphabet)):
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "padding_side": "left",
        "model_max_length": 1_000_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return vocabulary
