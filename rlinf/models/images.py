"""Images as a vision-language model takes them: sizes, patches, and where their tokens are.

Records carry images as bytes, 3 for each pixel, of a size that is patches without a rest. Policies
and engines cut them into patches themselves, so that nothing else is needed where they compute.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.errors import DataError
from rlinf.verified_io import read_text

PIXELS_COLUMN, SIZES_COLUMN = "pixels", "image_sizes"
"""Names of the columns: uint8 ``[N]``, the images of a prompt one after the other, each
``[height, width, 3]`` laid out flat; and int64 ``[n, 2]``, height and width of each."""
PREPROCESSOR_FILE = "preprocessor_config.json"
MAX_ASPECT_RATIO = 200
"""Most that an image's longer side may be of its shorter one."""


@dataclass(frozen=True)
class ImageProcessor:
    """How a model of the Qwen2-VL family takes images (arXiv 2409.12191, section 2.1)."""

    image_token_id: int
    """That stands for each ``merge x merge`` patches of an image."""
    ungenerated_token_ids: tuple[int, ...]
    """Tokens that stand for what is seen, and cannot be said."""
    patch_size: int = 14
    """Side of a patch, pixels."""
    merge_size: int = 2
    temporal_patch_size: int = 2
    """Of a patch; a still image is repeated."""
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255
    min_pixels: int = 56 * 56
    """Pixels of an image; smaller ones are enlarged."""
    max_pixels: int = 28 * 28 * 1280

    @classmethod
    def from_folder(cls, folder: Path, settings: Mapping[str, Any]) -> ImageProcessor:
        """Those of a checkpoint folder.

        Args:
            settings: its ``config.json``.

        Raises:
            DataError: its preprocessor's configuration is missing or malformed.
        """
        path = folder / PREPROCESSOR_FILE
        try:
            given = json.loads(read_text(path))
            size = given.get("size") or {}
            image = int(settings["image_token_id"])
            return cls(
                image_token_id=image,
                ungenerated_token_ids=tuple(
                    sorted({image, int(settings.get("video_token_id", image))})
                ),
                patch_size=int(given["patch_size"]),
                merge_size=int(given["merge_size"]),
                temporal_patch_size=int(given["temporal_patch_size"]),
                image_mean=tuple(map(float, given["image_mean"])),
                image_std=tuple(map(float, given["image_std"])),
                rescale_factor=float(given.get("rescale_factor", cls.rescale_factor)),
                min_pixels=int(
                    given.get("min_pixels") or size.get("shortest_edge") or cls.min_pixels
                ),
                max_pixels=int(
                    given.get("max_pixels") or size.get("longest_edge") or cls.max_pixels
                ),
            )
        except OSError as error:
            raise DataError(
                f"model.path: cannot read {path} ({error.strerror}), which says how images become "
                "patches; copy it from the checkpoint"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"model.path: {path} or config.json is malformed ({error!r})") from None

    @property
    def pixels_per_token(self) -> int:
        """Pixels of the square that a token stands for."""
        return self.patch_size * self.merge_size

    def resize(self, image: np.ndarray) -> np.ndarray:
        """An image in a size that is whole tokens, within the limits, near its own shape.

        Args:
            image: uint8 ``[height, width, 3]``.

        Raises:
            DataError: it is too narrow.
        """
        size = self.resized_shape(*image.shape[:2])
        if size == image.shape[:2]:
            return image
        from PIL import Image

        smooth = Image.Resampling.BICUBIC
        return np.asarray(Image.fromarray(image).resize((size[1], size[0]), smooth))

    def resized_shape(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that :meth:`fitted` gives an image."""
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise DataError(
                f"an image of {width} x {height} pixels is narrower than 1 in {MAX_ASPECT_RATIO}; "
                "crop it"
            )
        side = self.pixels_per_token
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > self.max_pixels:
            # In the processor's order of operations: what is a whole number may be rounded past it.
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif rows * columns * side * side < self.min_pixels:
            enlarge = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * enlarge / side)
            columns = math.ceil(width * enlarge / side)
        return rows * side, columns * side

    def num_tokens(self, image: np.ndarray) -> int:
        """How many stand for a fitted image."""
        return image.shape[0] * image.shape[1] // self.pixels_per_token**2

    def to_patches(self, image: np.ndarray) -> np.ndarray:
        """A fitted image in patches, those that a token stands for together.

        Returns:
            float32 ``[patches, 3 * frames * patch * patch]``.
        """
        mean, std = (np.array(values, np.float32) for values in (self.image_mean, self.image_std))
        values = (image.astype(np.float32) * np.float32(self.rescale_factor) - mean) / std
        rows, columns = (length // self.pixels_per_token for length in image.shape[:2])
        inner = (self.merge_size, self.patch_size)
        cut = values.reshape(rows, *inner, columns, *inner, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        cut = cut.reshape(
            rows * columns * self.merge_size**2, 3, 1, self.patch_size, self.patch_size
        )
        return np.repeat(cut, self.temporal_patch_size, axis=2).reshape(len(cut), -1)

    def patch_grids(self, sizes: np.ndarray) -> np.ndarray:
        """Patches of images along frames, height and width: int64 ``[n, 3]`` of sizes ``[n, 2]``.

        Raises:
            DataError: a size is not whole tokens.
        """
        if (sizes % self.pixels_per_token).any() or (sizes < 1).any():
            raise DataError(
                f"images of {sizes.tolist()} pixels (height, width) are not made of squares of "
                f"{self.pixels_per_token}; fit them first (ImageProcessor.resize)"
            )
        return np.concatenate(
            [np.ones((len(sizes), 1), np.int64), sizes // self.patch_size], axis=1
        )

    def rope_positions(self, tokens: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Rotary positions of a prompt, or of one and its answer, along time, height and width.

        Text has the same on all three; the tokens of an image share their time, and count rows and
        columns from there; what follows begins behind the largest (M-RoPE, arXiv 2409.12191).

        Args:
            tokens: ``[L]``.
            sizes: of its images.

        Returns:
            int64 ``[3, L]``.

        Raises:
            DataError: its image tokens are not those of its images.
        """
        found = np.zeros((3, len(tokens)), np.int64)
        is_image = tokens == self.image_token_id
        at = following = 0
        for _, height, width in self.patch_grids(sizes).tolist():
            rows, columns = height // self.merge_size, width // self.merge_size
            ahead = np.flatnonzero(is_image[at:])
            begin = at + int(ahead[0]) if len(ahead) else len(tokens)
            end = begin + rows * columns
            if not is_image[begin:end].all() or end > len(tokens):
                raise self._unlike(is_image, sizes)
            found[:, at:begin] = following + np.arange(begin - at)
            following += begin - at
            found[0, begin:end] = following
            found[1, begin:end] = following + np.repeat(np.arange(rows), columns)
            found[2, begin:end] = following + np.tile(np.arange(columns), rows)
            at, following = end, following + max(rows, columns)
        if is_image[at:].any():
            raise self._unlike(is_image, sizes)
        found[:, at:] = following + np.arange(len(tokens) - at)
        return found

    def rope_shift(self, sizes: np.ndarray) -> int:
        """Rotary position of a token behind the images, less its number in the prompt."""
        grids = self.patch_grids(sizes)[:, 1:] // self.merge_size
        return int((grids.max(1) - grids.prod(1)).sum()) if len(grids) else 0

    def _unlike(self, is_image: np.ndarray, sizes: np.ndarray) -> DataError:
        wanted = (sizes // self.pixels_per_token).prod(1).tolist()
        return DataError(
            f"a prompt has {int(is_image.sum())} image tokens, and images of {wanted}: each image "
            "needs its own, in a row, and answers hold none"
        )


NO_SIZES = np.zeros((0, 2), np.int64)


def pack_images(images: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Fitted images as arrays of a record."""
    return {
        PIXELS_COLUMN: np.concatenate([np.ascontiguousarray(image).ravel() for image in images]),
        SIZES_COLUMN: np.array([image.shape[:2] for image in images], np.int64),
    }


def unpack_images(columns: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The images that arrays of a record hold; of a padded column what its sizes need."""
    if SIZES_COLUMN not in columns:
        return []
    pixels, images, at = columns[PIXELS_COLUMN], list[np.ndarray](), 0
    for height, width in columns[SIZES_COLUMN].tolist():
        if height:
            images.append(pixels[at : at + height * width * 3].reshape(height, width, 3))
            at += height * width * 3
    return images


def image_sizes(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Height and width of each of them, int64 ``[n, 2]``."""
    sizes = columns.get(SIZES_COLUMN, NO_SIZES)
    return sizes[sizes[:, 0] > 0]
