"""Folders of small reward models with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlinf.models.character_tokenizer import write_character_tokenizer

ALPHABET = "0123456789+=abcdefghijklmnopqrstuvwxyz<>|: "


def write_reward_model(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """A sequence classifier with one label and a character tokenizer.

    Args:
        changes: of the model's configuration.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    vocabulary = write_character_tokenizer(ALPHABET, folder)
    sizes: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "num_labels": 1,
    }
    settings = AutoConfig.for_model(kind, **{**sizes, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32)
        with torch.no_grad():
            module.score.weight.normal_()  # numbers that differ by more than rounding
    module.save_pretrained(folder)
    return folder
