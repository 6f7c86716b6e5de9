"""Random numbers that depend on (run seed, iteration, stage, sample), not on earlier draws."""

from __future__ import annotations

import hashlib

import numpy as np


def _key(seed: int, *address: int | str) -> int:
    """Return a 128-bit hash of seed and address.

    Args:
        address: the purpose of the numbers, such as (iteration, stage, sample).
    """
    text = "/".join([str(seed), *map(str, address)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def generator(seed: int, *address: int | str) -> np.random.Generator:
    """Return a random generator that depends only on seed and address (see :func:`_key`)."""
    return np.random.Generator(np.random.Philox(key=_key(seed, *address)))


def torch_seed(seed: int, *address: int | str) -> int:
    """Return a 63-bit seed for ``torch.manual_seed`` that depends only on seed and address."""
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
        turns: turn of each sample, int64 ``[len(samples)]``; turns have different numbers. None: 0.
    """
    rows = np.empty((len(samples), length), dtype=np.float32)
    sample_ids = samples.tolist()
    for i, (sample, turn) in enumerate(
        zip(sample_ids, [0] * len(sample_ids) if turns is None else turns.tolist(), strict=True)
    ):
        address = (iteration, stage, sample, turn) if turn else (iteration, stage, sample)
        rows[i] = generator(seed, *address).random(length, dtype=np.float32)
    return rows
