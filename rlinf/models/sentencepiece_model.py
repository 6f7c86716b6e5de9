"""Convert a SentencePiece ``tokenizer.model`` of a byte-pair encoding to a ``tokenizers`` object.

PaliGemma's original tokenizer is such a file. Its format is the message ``ModelProto`` of
``sentencepiece_model.proto`` (github.com/google/sentencepiece); only the fields that determine the
tokens are read, so neither sentencepiece nor protobuf is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from rlinf.errors import DataError

SENTENCEPIECE_FILE = "tokenizer.model"
NORMAL, UNKNOWN, USER_DEFINED = 1, 2, 4
"""Types of pieces; the others are control symbols, bytes and unused pieces."""
BPE_MODEL = 2
"""``trainer_spec.model_type`` of byte-pair encodings."""
SPACE = "\u2581"
"""Character that represents a space in pieces."""


@dataclass(frozen=True)
class Piece:
    """A token of the vocabulary."""

    text: str
    score: float
    """Merges with a higher score come first."""
    kind: int


def read_sentencepiece(path: Path) -> Tokenizer:
    """Read a ``tokenizer.model``. The tokenizer begins each text with the begin token.

    Raises:
        DataError: The file is damaged, or uses rules other than those of Gemma's tokenizers.
    """
    try:
        fields = _group(path.read_bytes())
        pieces = [_parse_piece(data) for data in fields[1]]
        trainer, normalizer = (_group(fields.get(number, [b""])[0]) for number in (2, 3))
        is_bpe = trainer.get(3, [1])[0] == BPE_MODEL
        has_byte_fallback = bool(trainer.get(35, [0])[0])
        begin = pieces[trainer.get(41, [1])[0]].text
        unknown = next(piece.text for piece in pieces if piece.kind == UNKNOWN)
        # Unset flags are true.
        flags = [bool(normalizer.get(number, [1])[0]) for number in (3, 4, 5)]
    except (OSError, ValueError, KeyError, IndexError, TypeError, StopIteration, struct.error) as e:
        raise DataError(
            f"{path}: no SentencePiece model ({type(e).__name__}); copy it again"
        ) from None
    # Flags: a space before the text, no repeated spaces, and SPACE for spaces.
    if not is_bpe or normalizer.get(2, [b""])[0] or flags != [False, False, True]:
        raise DataError(
            f"{path}: only byte-pair encodings without text normalization are supported, such as "
            "PaliGemma's; give a tokenizer.json"
        )
    vocabulary = {piece.text: index for index, piece in enumerate(pieces)}
    model = BPE(
        vocabulary,
        _merges(pieces, vocabulary),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=has_byte_fallback,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens(
        [AddedToken(p.text, normalized=True) for p in pieces if p.kind == USER_DEFINED]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])]
    )
    return tokenizer


def _merges(pieces: list[Piece], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the pairs that each piece can be merged from, by falling score."""
    merges = []
    for piece in sorted((p for p in pieces if p.kind == NORMAL), key=lambda p: -p.score):
        text = piece.text
        pairs = ((text[:i], text[i:]) for i in range(1, len(text)))
        merges += [(a, b) for a, b in pairs if a in vocabulary and b in vocabulary]
    return merges


def _parse_piece(data: bytes) -> Piece:
    fields = _group(data)
    (score,) = struct.unpack("<f", fields.get(2, [bytes(4)])[0])
    return Piece(fields[1][0].decode(), score, fields.get(3, [NORMAL])[0])


def _group(data: bytes) -> dict[int, list[Any]]:
    """Return the values of each field of a message, by its number."""
    fields: dict[int, list[Any]] = {}
    for number, value in _fields(data):
        fields.setdefault(number, []).append(value)
    return fields


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a message (the wire format of protocol buffers)."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        wire_type = tag & 7
        if wire_type == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if wire_type == 2:
            length, position = _varint(data, position)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if position + length > len(data):
            raise ValueError("the file is cut off")
        yield tag >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if not byte & 0x80:
            return value, position
