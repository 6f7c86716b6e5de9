"""Writes the SentencePiece models of :mod:`tests.rlinf.models.test_sentencepiece_model`, and what
the library sentencepiece makes of texts; run in an interpreter that has it:

    python tests/rlinf/models/sentencepiece_reference.py
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "sentencepiece"
WORDS = "pick up the red block and put it into the drawer place cup on the plate open close push"
SENTENCES = [" ".join(WORDS.split()[i % 7 : 4 + i % 11]) + f" {i}" for i in range(400)]
SENTENCES += ["Task: push, State: 12 255 0 -1;", "Action: ", "öffne die Schublade"] * 20
TEXTS = [
    "",
    "pick up the red block",
    "put the cup on the plate\n",
    "Task: open the drawer, State: 3 -1 255 128;\nAction: ",
    "  two  spaces   and three ",
    "öffne die Tür ▁ 日本 🤖",
    "tabs\tand\r\nlines\n\n",
    "<bos> is no token here, <loc0001> is",
    "a" * 40,
]
GEMMA: dict[str, Any] = {
    "model_type": "bpe",
    "vocab_size": 420,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "user_defined_symbols": ["\n", "\n\n", "\u2581\u2581", "<loc0000>", "<loc0001>"],
    "pad_id": 0,
    "eos_id": 1,
    "bos_id": 2,
    "unk_id": 3,
}
"""The rules of Gemma's tokenizers."""
MODELS = {
    "gemma": GEMMA,
    "without_bytes": {**GEMMA, "byte_fallback": False, "vocab_size": 160},
    "prefixed": {**GEMMA, "add_dummy_prefix": True},
    "unigram": {**GEMMA, "model_type": "unigram"},
}


def main() -> None:
    import sentencepiece

    FOLDER.mkdir(exist_ok=True)
    tokens = {}
    for name, options in MODELS.items():
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES),
            model_writer=model,
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
        (FOLDER / f"{name}.model").write_bytes(model.getvalue())
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        tokens[name] = [processor.encode(text, add_bos=True) for text in TEXTS]
    (FOLDER / "tokens.json").write_text(json.dumps({"texts": TEXTS, "tokens": tokens}))


if __name__ == "__main__":
    main()
