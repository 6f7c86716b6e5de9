"""Slurm's short form of host names, without asking Slurm: containers have no ``scontrol``."""

from __future__ import annotations

import re
from itertools import product


def expand(text: str) -> list[str]:
    """``a100-[1-2,5],h[08-10]`` as single names, in order.

    Raises:
        ValueError: not a host list.
    """
    return [name for part in _split(text) for name in _expand_one(part)]


def _split(text: str) -> list[str]:
    """Parts between the commas outside brackets."""
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(parts) != text:
        raise ValueError(f"not a host list: {text!r}")
    return parts


def _expand_one(part: str) -> list[str]:
    """All names of ``rack[1-2]n[1-4]``."""
    choices = [
        _numbers(piece[1:-1]) if piece.startswith("[") else [piece]
        for piece in re.findall(r"\[[^\]]*\]|[^\[\]]+", part)
    ]
    return ["".join(words) for words in product(*choices)]


def _numbers(ranges: str) -> list[str]:
    found = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ValueError(f"not a range of hosts: {item!r}")
        width = len(first)
        found += [f"{n:0{width}d}" for n in range(int(first), int(last or first) + 1)]
    return found
