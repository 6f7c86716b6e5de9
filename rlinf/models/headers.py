"""What can be seen of a checkpoint folder without loading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlinf.checked import read_text
from rlinf.errors import DataError

INDEX = "model.safetensors.index.json"
LFS = b"version https://git-lfs"
HEADER_BYTES = 100_000_000
"""The safetensors format allows no longer header."""


def read_settings(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a checkpoint folder.

    Raises:
        DataError: it is not one of a model that can be trained.
    """
    path = folder / "config.json"
    settings = read_object(path)
    if not isinstance(settings.get("model_type"), str):
        raise DataError(f"model.path: {path} names no model_type; is it a checkpoint folder?")
    if settings.get("quantization_config"):
        raise DataError(
            f"model.path: {folder} holds quantised weights, which cannot be trained; use the "
            "checkpoint they were made from"
        )
    if (folder / "adapter_config.json").exists():
        raise DataError(
            f"model.path: {folder} has an adapter (adapter_config.json) beside the weights, which "
            "would be ignored; merge it into them, or remove its files"
        )
    return settings


def positions(settings: dict[str, Any]) -> int | None:
    """How many positions a model was made for; None if its settings do not say."""
    inner = settings.get("text_config")
    settings = inner if isinstance(inner, dict) else settings
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    known = [settings[name] for name in names if isinstance(settings.get(name), int)]
    if not known:
        return None
    scaling = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    factor = scaling.get("factor", 1.0) if isinstance(scaling, dict) else 1.0
    return int(known[0] * max(1.0, float(factor)))


def vocabulary(settings: dict[str, Any]) -> int | None:
    """How many tokens a model knows, if its settings say so."""
    inner = settings.get("text_config")
    size = settings.get("vocab_size") or (inner or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def check_headers(folder: Path) -> None:
    """See that the weight files are whole, by their headers.

    Raises:
        DataError: none is there, or one is missing, cut off, or only stands for the file.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(
            f"model.path: {folder} has no *.safetensors; convert the weights first "
            "(pickled weights are not loaded)"
        )
    for path in files:
        _check_file(path)
    index = folder / INDEX
    if index.is_file():
        parts = read_object(index).get("weight_map")
        if not isinstance(parts, dict):
            raise DataError(f"model.path: {index} has no weight_map")
        missing = sorted({str(name) for name in parts.values()} - {path.name for path in files})
        if missing:
            raise DataError(
                f"model.path: {folder} lacks {', '.join(missing[:3])} ({len(missing)} of the files "
                f"that {INDEX} names); copy the folder again"
            )


def _check_file(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if start + file.read(len(LFS) - 8) == LFS:
                raise DataError(
                    f"model.path: {path} is a pointer of git-lfs, not the weights; fetch them: "
                    "git lfs pull"
                )
            file.seek(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 0 < length <= min(HEADER_BYTES, size - 8):
                raise DataError(f"model.path: {path} is cut off or no safetensors file")
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for k, entry in header.items() if k != "__metadata__"]
    except OSError as error:
        raise DataError(f"model.path: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise DataError(f"model.path: {path} is cut off or no safetensors file") from None
    if not ends:
        raise DataError(f"model.path: {path} holds no tensors")
    if size != 8 + length + max(ends):
        raise DataError(
            f"model.path: {path} has {size} bytes, and {8 + length + max(ends)} by its header; "
            "copy it again"
        )


def read_object(path: Path, where: str = "model.path") -> dict[str, Any]:
    """A JSON file that holds an object.

    Args:
        where: the key that errors name.

    Raises:
        DataError: it does not, or cannot be read.
    """
    try:
        values = json.loads(read_text(path))
    except OSError as error:
        raise DataError(f"{where}: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {path} is not JSON ({str(error)[:100]})") from None
    if not isinstance(values, dict):
        raise DataError(f"{where}: {path} holds no object")
    return values
