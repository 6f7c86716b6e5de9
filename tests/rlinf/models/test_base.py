"""What policies share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf.data.batch import pad_right


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.float64, np.bool_])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_arrays_are_filled_on_the_right(dtype: type, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    arrays = [random.integers(0, 9, (n, *shape)).astype(dtype) for n in (4, 0, 2, 5)]
    padded = pad_right(arrays, 6, value=1)
    assert padded.shape == (4, 6, *shape)
    assert padded.dtype == torch.as_tensor(arrays[0]).dtype
    for row, array in zip(padded, arrays, strict=True):
        assert (row[: len(array)].numpy() == array).all()
        assert (row[len(array) :] == 1).all()


def test_padding_does_not_touch_what_it_was_given() -> None:
    arrays = [np.ones(2, np.float32), np.ones(2, np.float32)]
    arrays[0].flags.writeable = False
    pad_right(arrays, 2).zero_()
    assert all((array == 1).all() for array in arrays)
