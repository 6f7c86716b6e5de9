"""Image resizing and center crops as in the data pipeline and the evaluation of OpenVLA.

Both are those of TensorFlow: ``tf.image.resize`` with ``lanczos3`` and ``antialias``, and
``tf.image.crop_and_resize``. Each is a linear map along rows and columns. It is computed in double
precision, because rounding to bytes must not depend on the batch size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CROP_AREA = 0.9
"""Area of the center crop, a fraction of the image, as in OpenVLA's evaluation."""
LANCZOS_RADIUS = 3


class ImageResampler:
    """Resizes images to the size that a network reads, and may crop their center."""

    def __init__(self, size: Sequence[int], *, center_crop: bool) -> None:
        """
        Args:
            size: Height and width of the results.
            center_crop: Whether to resize the center with :data:`CROP_AREA` to the full size.
        """
        self._size, self._center_crop = tuple(size), center_crop

    def __call__(self, images: Tensor) -> Tensor:
        """Return the images, uint8 ``[n, height, width, 3]``, of images uint8 ``[n, H, W, 3]``."""
        if images.shape[1:3] != self._size:
            images = _apply(images, lanczos_weights, self._size).round().clamp(0, 255).byte()
        if self._center_crop:
            cropped = _apply(images, crop_weights, self._size)
            # tf.image.convert_image_dtype multiplies by 255.5 and truncates.
            images = (cropped.clamp(0, 255) / 255 * 255.5).byte()
        return images


def _apply(images: Tensor, weights: Callable[[int, int], Tensor], size: Sequence[int]) -> Tensor:
    """Return images, float64, resampled along rows and columns."""
    rows, columns = (
        weights(source, target).to(images.device)
        for source, target in zip(images.shape[1:3], size, strict=True)
    )
    return torch.einsum("hH,nHWc,wW->nhwc", rows, images.double(), columns)


@functools.lru_cache(16)
def lanczos_weights(source: int, target: int) -> Tensor:
    """Return the weights ``[target, source]`` of a Lanczos kernel, which is wider if it shrinks."""
    scale = source / target
    centers = (torch.arange(target, dtype=torch.float64) + 0.5) * scale
    pixels = torch.arange(source, dtype=torch.float64) + 0.5
    distance = (pixels - centers[:, None]) / max(scale, 1.0)
    weights = torch.sinc(distance) * torch.sinc(distance / LANCZOS_RADIUS)
    weights = weights * (distance.abs() < LANCZOS_RADIUS)
    return weights / weights.sum(1, keepdim=True)


@functools.lru_cache(16)
def crop_weights(source: int, target: int) -> Tensor:
    """Return the weights ``[target, source]`` that interpolate the center crop linearly.

    The first and last pixels of the result are at the edges of the crop.
    """
    side = math.sqrt(CROP_AREA)
    steps = torch.linspace(0, 1, target, dtype=torch.float64)
    positions = (source - 1) * ((1 - side) / 2 + side * steps)
    pixels = torch.arange(source, dtype=torch.float64)
    return (1 - (pixels - positions[:, None]).abs()).clamp(min=0)
