"""Parquet files, folders of them, and saved Hugging Face data sets, as JSON-lines files in the
user's cache folder.

A table is converted once, batch by batch, and the result is kept under the digest of the table's
bytes (:mod:`rlinf.data.cache_folder`). All readers of rows then read JSON lines.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from rlinf.data.cache_folder import PARTIAL_PREFIX, private_folder, remove_old_files
from rlinf.errors import DataError, require_package
from rlinf.verified_io import is_owner_only

log = logging.getLogger("rlinf")
PARQUET_SUFFIX = ".parquet"
STATE_FILE = "state.json"
"""A file of every data set that ``datasets`` has saved with ``save_to_disk``."""
SPLITS_FILE = "dataset_dict.json"
"""A file of every ``DatasetDict``, whose splits are folders of saved data sets."""
SHARD_SUFFIX = re.compile(r"-\d+-of-\d+$")
"""End of the names of a split's Parquet files, as ``datasets`` and the hub write them."""
SPLIT_NAMES = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
"""Names of files that are a whole split, so that other files beside them belong to other splits."""
BLOCK_BYTES = 1 << 20
BATCH_ROWS = 4096
"""Number of rows that are converted at once."""
FORMAT_VERSION = "1"
"""Part of the name of converted files; incremented when the conversion changes."""


def is_table(path: Path) -> bool:
    """Return whether a path is a Parquet file, a folder of them, or that of a saved data set."""
    is_parquet = path.suffix == PARQUET_SUFFIX and path.is_file()
    return is_parquet or (path / STATE_FILE).is_file() or bool(_shards(path))


def saved_splits(path: Path) -> list[str]:
    """Return the names of the splits in a folder that a ``DatasetDict`` was saved to."""
    if not (path / SPLITS_FILE).is_file():
        return []
    return sorted(folder.parent.name for folder in path.glob(f"*/{STATE_FILE}"))


def _shards(path: Path) -> list[Path]:
    """Return the Parquet files of a folder in the order of their names."""
    return sorted(file for file in path.glob(f"*{PARQUET_SUFFIX}") if file.is_file())


def convert_table(path: Path, key: str) -> Path:
    """Return a JSON-lines file with the rows of a table; it is written if it is not in the cache.

    Columns of bytes, such as images, are left out. Dates and decimals become texts, and numbers
    that are not finite become null.

    Args:
        key: configuration key that names the table.

    Raises:
        DataError: the table is damaged, or the cache folder cannot be used.
        MissingPackageError: pyarrow is not installed.
    """
    require_package("pyarrow", "parquet", f"{key}: {path}")
    try:
        files = _table_files(path, key)
        digest = _digest(files)
        folder = private_folder()
        target = folder / f"table-{FORMAT_VERSION}-{digest}.jsonl"
        if not _is_usable(target):
            log.info("%s: converting %s to JSON lines; this is done once", key, path)
            _write(files, path, key, target)
            with contextlib.suppress(OSError):  # Another process removes files as well.
                remove_old_files(folder, target)
        os.utime(target)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{key}: {path} cannot be converted to JSON lines ({error}); set XDG_CACHE_HOME to a "
            "folder that you can write to, or name a JSON-lines file"
        ) from None
    return target


def _table_files(path: Path, key: str) -> list[Path]:
    """Return the files of a table in the order of their rows.

    Raises:
        DataError: a folder has the Parquet files of several splits.
    """
    if path.is_file():
        return [path]
    if not (path / STATE_FILE).is_file():
        shards = _shards(path)
        splits = sorted({SHARD_SUFFIX.sub("", file.stem) for file in shards})
        has_splits = any(SHARD_SUFFIX.search(file.stem) for file in shards) or SPLIT_NAMES & {
            *splits
        }
        if len(splits) > 1 and has_splits:
            raise DataError(
                f"{key}: {path} holds the files of several splits: {', '.join(splits)}; move those "
                "of one split into a folder of its own, or name one file"
            )
        return shards
    state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    return [path / entry["filename"] for entry in state["_data_files"]]


def _digest(files: Sequence[Path]) -> str:
    digest = xxhash.xxh3_128()
    for file in files:
        with file.open("rb") as opened:
            while block := opened.read(BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def _is_usable(path: Path) -> bool:
    """Return whether a converted file exists and only the user can have written it."""
    try:
        with path.open("rb") as file:
            return is_owner_only(file.fileno())
    except FileNotFoundError:
        return False


def _write(files: Sequence[Path], table: Path, key: str, target: Path) -> None:
    """Write the rows to a temporary file, then rename it."""
    from pyarrow import ArrowException

    descriptor, partial = tempfile.mkstemp(dir=target.parent, prefix=PARTIAL_PREFIX)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as output:
            for file in files:
                for rows in _row_batches(file):
                    output.writelines(
                        json.dumps(_plain(row), ensure_ascii=False) + "\n" for row in rows
                    )
            output.flush()
            os.fsync(output.fileno())
        Path(partial).rename(target)
    except (ArrowException, UnicodeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise DataError(f"{key}: {table} is damaged or no table ({reason})") from None
    finally:
        Path(partial).unlink(missing_ok=True)


def _row_batches(file: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a file as dictionaries, some at a time."""
    if file.suffix == PARQUET_SUFFIX:
        from pyarrow import parquet

        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(BATCH_ROWS):
                yield batch.to_pylist()
        return
    import pyarrow

    with (
        pyarrow.memory_map(str(file)) as source,
        contextlib.closing(pyarrow.ipc.open_stream(source)) as stream,
    ):
        for batch in stream:
            yield batch.to_pylist()


def _plain(value: Any) -> Any:
    """Return a value as JSON can store it; see :func:`convert_table`."""
    if isinstance(value, dict):
        return {
            str(name): _plain(item)
            for name, item in value.items()
            if not isinstance(item, bytes | bytearray)
        }
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value if not isinstance(item, bytes | bytearray)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)
