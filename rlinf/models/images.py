"""Image preprocessing of vision-language models: sizes, patches, and rotary positions.

Records have images as RGB bytes, resized to sides that are multiples of a token's side. Policies
and engines convert them to patches with the processor of transformers that needs no torchvision.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf.errors import DataError
from rlinf.verified_io import read_text

if TYPE_CHECKING:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PIXELS_COLUMN, SIZES_COLUMN = "pixels", "image_sizes"
"""Column names: the flattened images ``[height, width, 3]`` of a prompt, concatenated, uint8
``[N]``; and height and width of each image, int64 ``[n, 2]``."""
PREPROCESSOR_FILE = "preprocessor_config.json"
STORED_OPTIONS = (
    *("patch_size", "merge_size", "temporal_patch_size"),
    *("image_mean", "image_std", "rescale_factor"),
)
"""Entries of that file that are fields of :class:`ImageProcessor`."""


@dataclass(frozen=True)
class ImageProcessor:
    """The image preprocessing of the Qwen2-VL family (arXiv 2409.12191, section 2.1)."""

    image_token_id: int
    """Id of the token that represents ``merge_size x merge_size`` patches of an image."""
    suppressed_token_ids: tuple[int, ...]
    """Ids of image and video tokens, which a policy must not generate."""
    patch_size: int = 14
    """Side of a patch, pixels."""
    merge_size: int = 2
    """Side of the square of patches that one token represents."""
    temporal_patch_size: int = 2
    """Number of video frames in a patch; a still image is repeated."""
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255
    min_pixels: int = 56 * 56
    """Smallest number of pixels of an image; smaller images are enlarged."""
    max_pixels: int = 28 * 28 * 1280
    """Largest number of pixels; larger images are reduced."""

    @classmethod
    def from_folder(cls, folder: Path, settings: Mapping[str, Any]) -> ImageProcessor:
        """Read the image preprocessing of a checkpoint folder.

        Args:
            folder: The checkpoint folder.
            settings: Its ``config.json``.

        Raises:
            DataError: ``preprocessor_config.json`` is missing or malformed.
        """
        path = folder / PREPROCESSOR_FILE
        try:
            values = json.loads(read_text(path))
            size = values.get("size") or {}
            image_token = int(settings["image_token_id"])
            return cls(
                image_token_id=image_token,
                suppressed_token_ids=tuple(
                    sorted({image_token, int(settings.get("video_token_id", image_token))})
                ),
                patch_size=int(values["patch_size"]),
                merge_size=int(values["merge_size"]),
                temporal_patch_size=int(values["temporal_patch_size"]),
                image_mean=tuple(map(float, values["image_mean"])),
                image_std=tuple(map(float, values["image_std"])),
                rescale_factor=float(values.get("rescale_factor", cls.rescale_factor)),
                min_pixels=int(
                    values.get("min_pixels") or size.get("shortest_edge") or cls.min_pixels
                ),
                max_pixels=int(
                    values.get("max_pixels") or size.get("longest_edge") or cls.max_pixels
                ),
            )
        except OSError as error:
            raise DataError(
                f"model.path: cannot read {path} ({error.strerror}), which defines the image "
                "patches; copy it from the checkpoint"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"model.path: {path} or config.json is malformed ({error!r})") from None

    def to_settings(self) -> dict[str, Any]:
        """Return the content of ``preprocessor_config.json``."""
        values = {name: getattr(self, name) for name in STORED_OPTIONS}
        sizes = {"shortest_edge": self.token_side**2, "longest_edge": self.max_pixels}
        return {"image_processor_type": "Qwen2VLImageProcessor", **values, "size": sizes}

    @property
    def token_side(self) -> int:
        """Side of the square that one token represents, pixels."""
        return self.patch_size * self.merge_size

    def resize(self, image: np.ndarray) -> np.ndarray:
        """Resize an image to a multiple of the token size within the pixel limits.

        Args:
            image: uint8 ``[height, width, 3]``.

        Raises:
            DataError: The image is too narrow.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        height, width = image.shape[:2]
        limits = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        try:
            size = smart_resize(height, width, self.token_side, **limits)
        except ValueError as error:
            raise DataError(
                f"an image of {width} x {height} pixels: {error}; crop the image"
            ) from None
        if size == (height, width):
            return image
        from PIL import Image

        method = Image.Resampling.BICUBIC
        return np.asarray(Image.fromarray(image).resize((size[1], size[0]), method))

    def num_tokens(self, image: np.ndarray) -> int:
        """Return the number of tokens of a resized image."""
        return image.shape[0] * image.shape[1] // self.token_side**2

    def to_patches(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """Cut resized images into patches; those of an image and of a token are consecutive.

        Returns:
            float32 ``[patches, 3 * temporal_patch_size * patch_size * patch_size]``.
        """
        patches: np.ndarray = self._processor(images=list(images), return_tensors="np").pixel_values
        return patches

    @cached_property
    def _processor(self) -> Qwen2VLImageProcessorPil:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        return Qwen2VLImageProcessorPil(
            do_resize=False,
            input_data_format="channels_last",
            image_mean=list(self.image_mean),
            image_std=list(self.image_std),
            rescale_factor=self.rescale_factor,
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            temporal_patch_size=self.temporal_patch_size,
        )

    def patch_grids(self, sizes: np.ndarray) -> np.ndarray:
        """Return the number of patches along time, height and width, int64 ``[n, 3]``.

        Args:
            sizes: Height and width of each image, ``[n, 2]``.

        Raises:
            DataError: A size is not a multiple of the token size.
        """
        if (sizes % self.token_side).any() or (sizes < 1).any():
            raise DataError(
                f"images of {sizes.tolist()} pixels (height, width) are not made of squares of "
                f"{self.token_side}; fit them first (ImageProcessor.resize)"
            )
        return np.concatenate(
            [np.ones((len(sizes), 1), np.int64), sizes // self.patch_size], axis=1
        )

    def rope_positions(self, tokens: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return rotary positions along time, height and width (M-RoPE, arXiv 2409.12191).

        Text tokens have equal positions on all three axes. The tokens of an image share one time
        position, from which rows and columns are counted. The next text starts after the largest
        position of the image.

        Args:
            tokens: The token ids of a prompt, or of a prompt and its answer, ``[L]``.
            sizes: The sizes of its images, ``[n, 2]``.

        Returns:
            int64 ``[3, L]``.

        Raises:
            DataError: The image tokens do not fit the images.
        """
        result = np.zeros((3, len(tokens)), np.int64)
        is_image = tokens == self.image_token_id
        text_start = next_position = 0
        for _, height, width in self.patch_grids(sizes).tolist():
            rows, columns = height // self.merge_size, width // self.merge_size
            image_tokens = np.flatnonzero(is_image[text_start:])
            begin = text_start + int(image_tokens[0]) if len(image_tokens) else len(tokens)
            end = begin + rows * columns
            if not is_image[begin:end].all() or end > len(tokens):
                raise self._mismatch_error(is_image, sizes)
            result[:, text_start:begin] = next_position + np.arange(begin - text_start)
            next_position += begin - text_start
            result[0, begin:end] = next_position
            result[1, begin:end] = next_position + np.repeat(np.arange(rows), columns)
            result[2, begin:end] = next_position + np.tile(np.arange(columns), rows)
            text_start, next_position = end, next_position + max(rows, columns)
        if is_image[text_start:].any():
            raise self._mismatch_error(is_image, sizes)
        result[:, text_start:] = next_position + np.arange(len(tokens) - text_start)
        return result

    def rope_shift(self, sizes: np.ndarray) -> int:
        """Return the difference of rotary position and index, for tokens after the images."""
        grids = self.patch_grids(sizes)[:, 1:] // self.merge_size
        return int((grids.max(1) - grids.prod(1)).sum()) if len(grids) else 0

    def _mismatch_error(self, is_image: np.ndarray, sizes: np.ndarray) -> DataError:
        expected = (sizes // self.token_side).prod(1).tolist()
        return DataError(
            f"a prompt has {int(is_image.sum())} image tokens, and images of {expected}: each "
            "image needs its own consecutive tokens, and answers must have none"
        )


NO_SIZES = np.zeros((0, 2), np.int64)
"""The sizes of a prompt without images."""


def pack_images(images: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Convert resized images to the columns of a record."""
    return {
        PIXELS_COLUMN: np.concatenate([np.ascontiguousarray(image).ravel() for image in images]),
        SIZES_COLUMN: np.array([image.shape[:2] for image in images], np.int64),
    }


def unpack_images(columns: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return the images in the columns of a record; sizes of zero (padding) are ignored."""
    if SIZES_COLUMN not in columns:
        return []
    pixels, images, start = columns[PIXELS_COLUMN], list[np.ndarray](), 0
    for height, width in columns[SIZES_COLUMN].tolist():
        if height:
            stop = start + height * width * 3
            images.append(pixels[start:stop].reshape(height, width, 3))
            start = stop
    return images


def image_sizes(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the height and width of each image in the columns, int64 ``[n, 2]``."""
    sizes = columns.get(SIZES_COLUMN, NO_SIZES)
    return sizes[sizes[:, 0] > 0]
