"""Read and write videos: MP4 files (H.264) with PyAV, whose wheel includes FFmpeg."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np

from rlinf.errors import DataError, require_package

QUALITY = "18"
"""Constant rate factor of x264; the loss is barely visible."""


def write_video(path: Path, frames: Iterable[np.ndarray], fps: int) -> int:
    """Write frames uint8 ``[H, W, 3]`` of one size to a new file and return their number.

    An odd height or width is made even by repeating the last row or column, as the format requires.

    Raises:
        MissingPackageError: PyAV is not installed.
        ValueError: there are no frames, or their sizes differ.
    """
    require_package("av", "video", "writing videos")
    import av

    stream, count = None, 0
    with av.open(str(path), "w") as file:
        for frame in frames:
            padded = np.pad(frame, [(0, size % 2) for size in frame.shape[:2]] + [(0, 0)], "edge")
            if stream is None:
                stream = file.add_stream("libx264", rate=Fraction(fps), options={"crf": QUALITY})
                stream.height, stream.width = padded.shape[:2]
                stream.pix_fmt = "yuv420p"
            if (stream.height, stream.width) != padded.shape[:2]:
                raise ValueError(f"{path}: frames of one video must have one size")
            file.mux(stream.encode(av.VideoFrame.from_ndarray(padded, format="rgb24")))
            count += 1
        if stream is None:
            raise ValueError(f"{path}: a video needs a frame")
        file.mux(stream.encode())
    return count


def read_frames(path: Path, first: int, count: int, fps: int) -> np.ndarray:
    """Return ``count`` frames of a video from frame ``first`` on, uint8 ``[count, H, W, 3]``.

    Decoding begins at the key frame before them.

    Args:
        fps: frames per second, which the video keeps throughout.

    Raises:
        MissingPackageError: PyAV is not installed.
        DataError: the file is not a readable video, or ends before.
    """
    require_package("av", "video", "reading videos")
    import av

    frames: list[np.ndarray] = []
    try:
        with av.open(str(path), format="mp4") as file:
            stream = file.streams.video[0]
            time_base, start = Fraction(stream.time_base or 1), stream.start_time or 0
            file.seek(start + int(first / fps / time_base), stream=stream)
            for frame in file.decode(stream):
                index = round(((frame.pts or 0) - start) * time_base * fps)
                if index >= first + count:
                    break
                if index >= first:
                    frames.append(frame.to_ndarray(format="rgb24"))
    except (av.error.FFmpegError, IndexError) as error:
        raise DataError(f"{path}: no readable video ({error})") from None
    if len(frames) != count:
        raise DataError(
            f"{path}: has {len(frames)} of the {count} frames from frame {first} on, at {fps} "
            "frames per second"
        )
    return np.stack(frames)


def read_video(path: Path) -> Iterator[np.ndarray]:
    """Yield the frames of a video in order, uint8 ``[H, W, 3]``.

    Raises:
        MissingPackageError: PyAV is not installed.
        DataError: the file is not a readable video.
    """
    require_package("av", "video", "reading videos")
    import av

    try:
        # Fix the format, because some formats that FFmpeg detects are lists of other files.
        with av.open(str(path), format="mp4") as file:
            for frame in file.decode(video=0):
                yield frame.to_ndarray(format="rgb24")
    except (av.error.FFmpegError, IndexError) as error:
        raise DataError(f"{path}: no readable video ({error})") from None
