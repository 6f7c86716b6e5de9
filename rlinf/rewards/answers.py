"""Answers that were paid for once: kept in the run by the digest of their question.

A file of JSON lines for each node and rank, for appending is safe on one node alone. A line is
written as soon as its answer is there, so that a stage that ends early asks for the rest alone.
What a process wrote in part when it was killed is passed over.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from rlinf.errors import ConfigError


class Answers:
    """By digest; may be used by several threads."""

    def __init__(self, folder: Path | None, name: str) -> None:
        """
        Args:
            folder: where those of all processes are, earlier ones too; None: nothing is written.
            name: of the file that is added to.
        """
        self._lock, self._known = threading.Lock(), dict[str, str]()
        self._folder, self._name = folder, name
        self._read: dict[Path, int] = {}
        """Bytes of each file that have been taken."""
        self.requests = self.tokens = 0
        """That all lines tell of, those without an answer among them."""
        self.refresh()

    def get(self, digest: str) -> str | None:
        """The answer to a question; None: there is none."""
        return self._known.get(digest)

    def put(self, digest: str, text: str | None, requests: int, tokens: int) -> None:
        """Keep an answer, or only what asking for it has cost.

        Raises:
            ConfigError: the file is a link.
        """
        entry = {"digest": digest, "text": text, "requests": requests, "tokens": tokens}
        line = json.dumps(entry).encode()
        with self._lock:
            if self._folder is None:
                self._take(line)
                return
            self._append(self._folder / f"{self._name}.jsonl", line)
        self.refresh()

    def refresh(self) -> None:
        """Take what this and other processes have added."""
        with self._lock:
            for path in sorted(self._folder.glob("*.jsonl")) if self._folder is not None else ():
                with path.open("rb") as file:
                    file.seek(self._read.get(path, 0))
                    # What comes after the last end of a line is still being written.
                    whole, end, _ = file.read().rpartition(b"\n")
                for line in whole.splitlines():
                    self._take(line)
                self._read[path] = self._read.get(path, 0) + len(whole) + len(end)

    def _take(self, line: bytes) -> None:
        try:
            entry: Any = json.loads(line)
            digest, text = str(entry["digest"]), entry["text"]
            requests, tokens = int(entry["requests"]), int(entry["tokens"])
        except (ValueError, LookupError, TypeError, RecursionError):
            return
        if isinstance(text, str):
            # The first one counts: what was made with it may have been committed.
            self._known.setdefault(digest, text)
        self.requests += requests
        self.tokens += tokens

    @staticmethod
    def _append(path: Path, line: bytes) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if path.is_symlink():
                raise ConfigError(f"{path} is a link; remove it") from error
            raise
        try:
            size = os.fstat(file).st_size
            # A line that was cut off must not spoil the next one.
            whole = not size or os.pread(file, 1, size - 1) == b"\n"
            os.write(file, (b"" if whole else b"\n") + line + b"\n")
        finally:
            os.close(file)
