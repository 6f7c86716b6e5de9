"""A character tokenizer in the Hugging Face format, for tasks with a small alphabet.

It is byte-level BPE without merges. For some architectures, ``AutoTokenizer`` converts every
tokenizer to this form; this one already has it, so it stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from rlinf.errors import DataError
from rlinf.verified_io import read_text

PAD_TOKEN, EOS_TOKEN = "<pad>", "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
DEFAULT_ALPHABET = "".join(map(chr, [*range(32, 127), *range(0xA0, 0x800)]))
"""Alphabet of new robot policies with a text instruction (vision-language-action models)."""


def write_character_tokenizer(
    alphabet: str,
    folder: Path,
    chat_template: str | None = None,
    special_tokens: Sequence[str] = (),
) -> dict[str, int]:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, and return the vocabulary.

    Args:
        alphabet: All characters that texts may have.
        chat_template: The chat template, if there is one.
        special_tokens: Further special tokens. With a chat template, the last one ends a turn.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = {
        symbol
        for character in alphabet
        for text, _ in byte_level.pre_tokenize_str(character)
        for symbol in text
    }
    vocabulary = {PAD_TOKEN: 0, EOS_TOKEN: 1}
    for token in (*sorted(symbols), *special_tokens):
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD_TOKEN, EOS_TOKEN, *special_tokens])
    tokenizer.save(str(folder / TOKENIZER_FILE))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD_TOKEN,
        "eos_token": EOS_TOKEN if chat_template is None else special_tokens[-1],
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return vocabulary


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a folder.

    Raises:
        DataError: There is no readable tokenizer.
    """
    path = folder / TOKENIZER_FILE
    try:
        return Tokenizer.from_str(read_text(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise DataError(
            f"model.path: {path} is no tokenizer ({str(error)[:100]}); fetch it again"
        ) from None
