"""SentencePiece models become tokenizers that give the library's own tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from rlinf.errors import DataError
from rlinf.models.sentencepiece_model import read_sentencepiece

FOLDER = Path(__file__).parent / "sentencepiece"
REFERENCE = json.loads((FOLDER / "tokens.json").read_text())


@pytest.mark.parametrize("name", ["gemma", "without_bytes"])
@pytest.mark.parametrize("number", range(len(REFERENCE["texts"])))
def test_the_tokens_are_those_of_the_library(tmp_path: Path, name: str, number: int) -> None:
    """Also after it was saved as ``tokenizer.json``."""
    tokenizer = read_sentencepiece(FOLDER / f"{name}.model")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text, wanted = REFERENCE["texts"][number], REFERENCE["tokens"][name][number]
    for each in (tokenizer, Tokenizer.from_file(str(tmp_path / "tokenizer.json"))):
        assert each.encode(text).ids == wanted


def test_tokens_become_the_text_again() -> None:
    tokenizer = read_sentencepiece(FOLDER / "gemma.model")
    for text in REFERENCE["texts"]:
        # The library shows the character for spaces as a space.
        assert tokenizer.decode(tokenizer.encode(text).ids[1:]) == text.replace("\u2581", " ")


@pytest.mark.parametrize("name", ["prefixed", "unigram"])
def test_other_rules_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=rf"{name}\.model: only byte-pair encodings"):
        read_sentencepiece(FOLDER / f"{name}.model")


@pytest.mark.parametrize("content", [b"", b"\x0a\xff", b"{}", b"\x07\x07", None])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes((FOLDER / "gemma.model").read_bytes()[:3000] if content is None else content)
    with pytest.raises(DataError, match=r"tokenizer\.model: no SentencePiece model"):
        read_sentencepiece(path)
