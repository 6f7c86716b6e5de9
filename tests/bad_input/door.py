"""What all bad input must meet: one short message with the key, exit code 65, nothing written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import prepare_run
from rlinf.errors import EXIT_BAD_INPUT, RlinfError

Base = Callable[[str, dict[str, Any]], dict[str, Any]]
MOST_LINES = 5


def merged(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values with dotted keys set; the value :data:`GONE` takes a key away."""
    values = copy.deepcopy(values)
    for key, value in changes.items():
        *path, last = key.split(".")
        at = values
        for part in path:
            at = at.setdefault(part, {})
        if value is GONE:
            at.pop(last, None)
        else:
            at[last] = value
    return values


GONE = object()


def refused(values: dict[str, Any], *words: str) -> str:
    """See that a configuration is refused as it should be; returns the message.

    Args:
        words: the message must hold each; the first is the user's key.
    """
    run = values.get("run")
    root = Path(run["root"]) if isinstance(run, dict) and isinstance(run["root"], str) else None
    before = tree(root)
    with pytest.raises(RlinfError) as caught:
        prepare_run(values)
    assert caught.value.exit_code == EXIT_BAD_INPUT, repr(caught.value)
    message = str(caught.value)
    assert tree(root) == before, "something was written"
    assert_mentions(message, *words)
    return message


def assert_mentions(message: str, *words: str) -> None:
    """See that a message is short and holds what it should."""
    assert len(message.strip().splitlines()) <= MOST_LINES, message
    assert "Traceback" not in message
    assert len(message) < 1000, message
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


def tree(root: Path | None) -> list[str]:
    """All files and folders below one."""
    return sorted(map(str, root.rglob("*"))) if root is not None and root.exists() else []
