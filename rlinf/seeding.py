"""Randomness by address: (run seed, iteration, stage, sample), never by a process's history."""

from __future__ import annotations

import hashlib

import numpy as np


def _key(seed: int, *address: int | str) -> int:
    text = "/".join([str(seed), *map(str, address)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def generator(seed: int, *address: int | str) -> np.random.Generator:
    """Return a random generator that depends on its address alone."""
    return np.random.Generator(np.random.Philox(key=_key(seed, *address)))


def torch_seed(seed: int, *address: int | str) -> int:
    """Return a 63-bit seed for ``torch.manual_seed`` from the same kind of address."""
    return _key(seed, *address) >> 65


def uniform_rows(
    seed: int,
    iteration: int,
    stage: str,
    samples: np.ndarray,
    length: int,
    turns: np.ndarray | None = None,
) -> np.ndarray:
    """Return uniform numbers in [0, 1) per sample: ``[len(samples), length]`` float32.

    The row of a sample depends neither on the rest of its batch nor on the worker that draws it.

    Args:
        turns: int64 ``[len(samples)]``: turns of one sample have different rows; 0 by default.
    """
    rows = np.empty((len(samples), length), dtype=np.float32)
    numbers = samples.tolist()
    for i, (sample, turn) in enumerate(
        zip(numbers, [0] * len(numbers) if turns is None else turns.tolist(), strict=True)
    ):
        address = (iteration, stage, sample, turn) if turn else (iteration, stage, sample)
        rows[i] = generator(seed, *address).random(length, dtype=np.float32)
    return rows
