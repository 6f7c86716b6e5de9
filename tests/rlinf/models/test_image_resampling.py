"""Resizing and center crops, against their definitions in TensorFlow, pixel by pixel."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from rlinf.models.image_resampling import ImageResampler


def pictures(height: int, width: int) -> torch.Tensor:
    random = np.random.default_rng(0)
    return torch.from_numpy(random.integers(0, 256, (2, height, width, 3), np.uint8))


def cropped(image: np.ndarray) -> np.ndarray:
    """``tf.image.crop_and_resize`` of 90 % of the area, and ``convert_image_dtype`` to bytes."""
    height, width = image.shape[:2]
    out = np.zeros_like(image)
    side = math.sqrt(0.9)
    low, high = (1 - side) / 2, (1 + side) / 2
    for y in range(height):
        for x in range(width):
            row = low * (height - 1) + y * (high - low) * (height - 1) / (height - 1)
            column = low * (width - 1) + x * (high - low) * (width - 1) / (width - 1)
            top, left = math.floor(row), math.floor(column)
            bottom, right = math.ceil(row), math.ceil(column)
            a, b = row - top, column - left
            value = (1 - a) * ((1 - b) * image[top, left] + b * image[top, right])
            value = value + a * ((1 - b) * image[bottom, left] + b * image[bottom, right])
            out[y, x] = np.floor(value / 255 * 255.5)
    return out


def test_a_crop_interpolates_the_center_as_tensorflow_does() -> None:
    images = pictures(9, 12)
    found = ImageResampler((9, 12), center_crop=True)(images)
    assert found.dtype == torch.uint8
    wanted = np.stack([cropped(image) for image in images.numpy().astype(float)])
    np.testing.assert_array_equal(found.numpy(), wanted)


@pytest.mark.parametrize("size", [(14, 10), (40, 36), (20, 24)])
def test_resizing_is_that_of_a_lanczos_filter(size: tuple[int, int]) -> None:
    """Pillow's has the same kernel, and rounds and clips between rows and columns."""
    images = 90 + pictures(20, 24) // 4
    found = ImageResampler(size, center_crop=False)(images).numpy().astype(int)
    for image, result in zip(images.numpy(), found, strict=True):
        wanted = Image.fromarray(image).resize(size[::-1], Image.Resampling.LANCZOS)
        assert np.abs(result - np.asarray(wanted).astype(int)).max() <= 1


def test_an_image_of_the_right_size_is_the_same() -> None:
    images = pictures(8, 8)
    assert ImageResampler([8, 8], center_crop=False)(images) is images


def test_the_result_does_not_depend_on_the_other_images() -> None:
    images = pictures(30, 40)
    resample = ImageResampler((16, 24), center_crop=True)
    assert torch.equal(resample(images)[1:], resample(images[1:]))
