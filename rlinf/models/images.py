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

from rlinf.checked import read_text
from rlinf.errors import DataError

PIXELS, SIZES = "pixels", "image_sizes"
"""Names of the columns: uint8 ``[N]``, the images of a prompt one after the other, each
``[height, width, 3]`` laid out flat; and int64 ``[n, 2]``, height and width of each."""
PREPROCESSOR = "preprocessor_config.json"
NARROWEST = 200
"""Most that an image's longer side may be of its shorter one."""


@dataclass(frozen=True)
class ImageSettings:
    """How a model of the Qwen2-VL family takes images (arXiv 2409.12191, section 2.1)."""

    token: int
    """That stands for each ``merge x merge`` patches of an image."""
    unwritten: tuple[int, ...]
    """Tokens that stand for what is seen, and cannot be said."""
    patch: int = 14
    """Side of a patch, pixels."""
    merge: int = 2
    frames: int = 2
    """Of a patch; a still image is repeated."""
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    scale: float = 1 / 255
    least: int = 56 * 56
    """Pixels of an image; smaller ones are enlarged."""
    most: int = 28 * 28 * 1280

    @classmethod
    def of(cls, folder: Path, settings: Mapping[str, Any]) -> ImageSettings:
        """Those of a checkpoint folder.

        Args:
            settings: its ``config.json``.

        Raises:
            DataError: its preprocessor's configuration is missing or malformed.
        """
        path = folder / PREPROCESSOR
        try:
            given = json.loads(read_text(path))
            size = given.get("size") or {}
            image = int(settings["image_token_id"])
            return cls(
                token=image,
                unwritten=tuple(sorted({image, int(settings.get("video_token_id", image))})),
                patch=int(given["patch_size"]),
                merge=int(given["merge_size"]),
                frames=int(given["temporal_patch_size"]),
                mean=tuple(map(float, given["image_mean"])),
                std=tuple(map(float, given["image_std"])),
                scale=float(given.get("rescale_factor", cls.scale)),
                least=int(given.get("min_pixels") or size.get("shortest_edge") or cls.least),
                most=int(given.get("max_pixels") or size.get("longest_edge") or cls.most),
            )
        except OSError as error:
            raise DataError(
                f"model.path: cannot read {path} ({error.strerror}), which says how images become "
                "patches; copy it from the checkpoint"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"model.path: {path} or config.json is malformed ({error!r})") from None

    @property
    def side(self) -> int:
        """Pixels of the square that a token stands for."""
        return self.patch * self.merge

    def fitted(self, image: np.ndarray) -> np.ndarray:
        """An image in a size that is whole tokens, within the limits, near its own shape.

        Args:
            image: uint8 ``[height, width, 3]``.

        Raises:
            DataError: it is too narrow.
        """
        size = self.size(*image.shape[:2])
        if size == image.shape[:2]:
            return image
        from PIL import Image

        smooth = Image.Resampling.BICUBIC
        return np.asarray(Image.fromarray(image).resize((size[1], size[0]), smooth))

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that :meth:`fitted` gives an image."""
        if max(height, width) > NARROWEST * min(height, width):
            raise DataError(
                f"an image of {width} x {height} pixels is narrower than 1 in {NARROWEST}; crop it"
            )
        side = self.side
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > self.most:
            # In the processor's order of operations: what is a whole number may be rounded past it.
            shrink = math.sqrt(height * width / self.most)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif rows * columns * side * side < self.least:
            enlarge = math.sqrt(self.least / (height * width))
            rows = math.ceil(height * enlarge / side)
            columns = math.ceil(width * enlarge / side)
        return rows * side, columns * side

    def tokens(self, image: np.ndarray) -> int:
        """How many stand for a fitted image."""
        return image.shape[0] * image.shape[1] // self.side**2

    def patches(self, image: np.ndarray) -> np.ndarray:
        """A fitted image in patches, those that a token stands for together.

        Returns:
            float32 ``[patches, 3 * frames * patch * patch]``.
        """
        mean, std = (np.array(values, np.float32) for values in (self.mean, self.std))
        values = (image.astype(np.float32) * np.float32(self.scale) - mean) / std
        rows, columns = (length // self.side for length in image.shape[:2])
        inner = (self.merge, self.patch)
        cut = values.reshape(rows, *inner, columns, *inner, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        cut = cut.reshape(rows * columns * self.merge**2, 3, 1, self.patch, self.patch)
        return np.repeat(cut, self.frames, axis=2).reshape(len(cut), -1)

    def grids(self, sizes: np.ndarray) -> np.ndarray:
        """Patches of images along frames, height and width: int64 ``[n, 3]`` of sizes ``[n, 2]``.

        Raises:
            DataError: a size is not whole tokens.
        """
        if (sizes % self.side).any() or (sizes < 1).any():
            raise DataError(
                f"images of {sizes.tolist()} pixels (height, width) are not made of squares of "
                f"{self.side}; fit them first (ImageSettings.fitted)"
            )
        return np.concatenate([np.ones((len(sizes), 1), np.int64), sizes // self.patch], axis=1)

    def positions(self, tokens: np.ndarray, sizes: np.ndarray) -> np.ndarray:
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
        is_image = tokens == self.token
        at = following = 0
        for _, height, width in self.grids(sizes).tolist():
            rows, columns = height // self.merge, width // self.merge
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

    def shift(self, sizes: np.ndarray) -> int:
        """Rotary position of a token behind the images, less its number in the prompt."""
        grids = self.grids(sizes)[:, 1:] // self.merge
        return int((grids.max(1) - grids.prod(1)).sum()) if len(grids) else 0

    def _unlike(self, is_image: np.ndarray, sizes: np.ndarray) -> DataError:
        wanted = (sizes // self.side).prod(1).tolist()
        return DataError(
            f"a prompt has {int(is_image.sum())} image tokens, and images of {wanted}: each image "
            "needs its own, in a row, and answers hold none"
        )


NO_SIZES = np.zeros((0, 2), np.int64)


def columns_of(images: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Fitted images as arrays of a record."""
    return {
        PIXELS: np.concatenate([np.ascontiguousarray(image).ravel() for image in images]),
        SIZES: np.array([image.shape[:2] for image in images], np.int64),
    }


def images_in(columns: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The images that arrays of a record hold; of a padded column what its sizes need."""
    if SIZES not in columns:
        return []
    pixels, images, at = columns[PIXELS], list[np.ndarray](), 0
    for height, width in columns[SIZES].tolist():
        if height:
            images.append(pixels[at : at + height * width * 3].reshape(height, width, 3))
            at += height * width * 3
    return images


def sizes_in(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Height and width of each of them, int64 ``[n, 2]``."""
    sizes = columns.get(SIZES, NO_SIZES)
    return sizes[sizes[:, 0] > 0]
