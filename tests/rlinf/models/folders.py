"""Small folders and tokenizers in the published format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import AddedToken, PreTrainedTokenizerFast

from tests.rlinf.models.chat_templates import SPECIALS


def make_tokenizer(
    template: str | None = None,
    *,
    eos: str = "<|endoftext|>",
    begins: Sequence[str] = (),
    specials: Sequence[str] = SPECIALS,
    plain: Sequence[str] = ("<think>", "</think>"),
) -> Any:
    """One token for each byte, special tokens, and others that are plain text.

    Args:
        begins: special tokens that its post-processor puts before a text.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*specials])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    if begins:
        known = [(text, made.token_to_id(text)) for text in begins]
        made.post_processor = TemplateProcessing(
            single=f"{' '.join(begins)} $A", special_tokens=known
        )
    bos = "<s>" if "<s>" in specials else None
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=eos, pad_token=eos, bos_token=bos
    )
    found.chat_template = template
    return found


def write_folder(
    folder: Path,
    tokenizer: Any,
    settings: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> Path:
    """A folder with settings and tokenizer, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    known = {"model_type": "qwen2", "vocab_size": len(tokenizer), "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps({**known, **(settings or {})}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
