"""Patches are those of the library's processor, positions those of its network, for any image."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlinf.errors import DataError
from rlinf.models.images import (
    PREPROCESSOR_FILE,
    ImageProcessor,
    image_sizes,
    pack_images,
    unpack_images,
)

TOKEN = 7
SETTINGS = ImageProcessor(image_token_id=TOKEN, suppressed_token_ids=(TOKEN,))
SIDES = st.integers(8, 200)


def image(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@settings(max_examples=20)
@given(SIDES, SIDES, st.integers(0, 99))
@example(8, 72, 0)
def test_patches_are_those_of_the_processor(height: int, width: int, seed: int) -> None:
    """That which works without torchvision; sizes, resizing, scaling and order."""
    module = pytest.importorskip(
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
        reason="this transformers has no processor that works without torchvision",
    )
    given_ = image(height, width, seed)
    right = module.Qwen2VLImageProcessorPil()(images=[given_], return_tensors="np")
    fitted = SETTINGS.resize(given_)
    np.testing.assert_allclose(
        SETTINGS.to_patches([fitted]), right["pixel_values"], rtol=0, atol=2e-6
    )
    grids = SETTINGS.patch_grids(np.array([fitted.shape[:2]]))
    np.testing.assert_array_equal(grids, right["image_grid_thw"])
    assert SETTINGS.num_tokens(fitted) == grids.prod() // SETTINGS.merge_size**2


def test_a_patch_is_what_the_formula_says() -> None:
    """Pixel by pixel: patches of a token together, each channel, frame, row and column in turn."""
    small = ImageProcessor(
        image_token_id=TOKEN, suppressed_token_ids=(), patch_size=2, image_mean=(0.5, 0.4, 0.3)
    )
    shown = image(8, 12)
    found = small.to_patches([shown])
    at = 0
    for row, column in np.ndindex(2, 3):
        for down, right in np.ndindex(2, 2):
            wanted = [
                (
                    shown[4 * row + 2 * down + y, 4 * column + 2 * right + x, channel] / 255
                    - small.image_mean[channel]
                )
                / small.image_std[channel]
                for channel, _, y, x in np.ndindex(3, small.temporal_patch_size, 2, 2)
            ]
            np.testing.assert_allclose(found[at], wanted, atol=1e-6)
            at += 1
    assert at == len(found)


PARTS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)), max_size=3)


@given(PARTS, st.integers(1, 5))
def test_positions_are_those_of_the_network(parts: list[tuple[int, int, int]], after: int) -> None:
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    tokens, sizes = list[int](), list[tuple[int, int]]()
    for text, rows, columns in parts:
        tokens += [1] * text + [TOKEN] * (rows * columns)
        sizes.append((rows * 28, columns * 28))
    tokens += [1] * after
    ids, shapes = np.array(tokens), np.array(sizes, np.int64).reshape(-1, 2)
    found = SETTINGS.rope_positions(ids, shapes)

    class Bare:
        config = Qwen2_5_VLConfig()
        get_vision_position_ids = Qwen2_5_VLModel.get_vision_position_ids

    right, deltas = Qwen2_5_VLModel.get_rope_index(
        Bare(),
        torch.from_numpy(ids)[None],
        torch.from_numpy((ids == TOKEN).astype(np.int32))[None],
        image_grid_thw=torch.from_numpy(SETTINGS.patch_grids(shapes)),
    )
    np.testing.assert_array_equal(found, right[:, 0].numpy())
    assert SETTINGS.rope_shift(shapes) == int(deltas[0, 0])
    # What follows later goes on where this ends.
    np.testing.assert_array_equal(
        SETTINGS.rope_positions(np.append(ids, 1), shapes)[:, -1],
        len(ids) + SETTINGS.rope_shift(shapes),
    )
    assert len(list(groupby(tokens))) >= len(parts)


@pytest.mark.parametrize(
    "tokens", [[1, 7, 7, 1, 1], [1, 7, 7, 7, 7, 7], [7, 7, 1, 7, 7], [1, 1], [1, 7, 7]]
)
def test_image_tokens_that_are_not_those_of_the_images_are_refused(tokens: list[int]) -> None:
    with pytest.raises(DataError, match=r"image tokens, and images of \[4\]"):
        SETTINGS.rope_positions(np.array(tokens), np.array([[56, 56]]))


def test_an_image_that_was_not_fitted_is_refused() -> None:
    with pytest.raises(DataError, match=r"not made of squares of 28; fit them first"):
        SETTINGS.patch_grids(np.array([[56, 50]]))
    with pytest.raises(DataError, match="aspect ratio must be smaller than 200"):
        SETTINGS.resize(image(2, 500))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3))
def test_columns_hold_the_images_padded_or_not(shapes: list[tuple[int, int]]) -> None:
    every = [image(*shape, seed) for seed, shape in enumerate(shapes)]
    columns = pack_images(every)
    longer = {
        "pixels": np.append(columns["pixels"], np.ones(9, np.uint8)),
        "image_sizes": np.append(columns["image_sizes"], [[0, 0]], axis=0),
    }
    for given_ in (columns, longer):
        for one, other in zip(unpack_images(given_), every, strict=True):
            np.testing.assert_array_equal(one, other)
        assert image_sizes(given_).tolist() == [list(shape) for shape in shapes]
    assert unpack_images({}) == []
    assert len(image_sizes({})) == 0


def test_a_folder_without_a_preprocessor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"preprocessor_config\.json .*defines the image"):
        ImageProcessor.from_folder(tmp_path, {"image_token_id": 5})
    (tmp_path / PREPROCESSOR_FILE).write_text(json.dumps({"patch_size": 14}))
    with pytest.raises(DataError, match="malformed"):
        ImageProcessor.from_folder(tmp_path, {"image_token_id": 5})
