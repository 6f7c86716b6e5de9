"""Read YAML files that people write: plans, sites, scenarios, problems."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from rlinf.errors import InputError

MAX_CHARACTERS = 16 << 20
"""Maximum size of a file that a person wrote."""
# Numbers of YAML 1.1, without its sexagesimal numbers (1:30).
_INT = re.compile(r"[-+]?(0b[01_]+|0[0-7_]*|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
_FLOAT = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?"
    r"|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
)


class _StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe YAML loader that rejects duplicate keys and reads ``1:30`` as text, not as 90."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = set()
        for key, _ in node.value:
            if not isinstance(key.value, str):
                continue
            if key.value in keys and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} stands there twice",
                    problem_mark=key.start_mark,
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep=deep)


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in entries if tag not in _NUMBERS]
    for first, entries in _StrictLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(_NUMBERS[0], _INT, list("-+0123456789"))
_StrictLoader.add_implicit_resolver(_NUMBERS[1], _FLOAT, list("-+0123456789."))


def check_is_file(path: Path, key: str, error: type[InputError]) -> None:
    """Check that the path under ``key`` is a file.

    Raises:
        InputError: of type ``error``; the path is missing, a folder, or not a regular file.
    """
    path = path.expanduser()
    try:
        if path.is_dir():
            raise error(f"{key}: {path} is a folder; name a file")
        if not path.exists():
            raise error(f"{key}: no file {path}")
        if not path.is_file():
            raise error(f"{key}: {path} is not a regular file")
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise error(f"{key}: cannot read {path}: {reason}") from None


def not_utf8_error(path: Path, key: str, error: type[InputError], position: int) -> InputError:
    """Return the error for a file that is not text, with the position of the invalid byte."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    description = "compressed (gzip); unpack it first" if is_gzip else "not UTF-8 text"
    return error(f"{key}: {path} is {description} (byte {position})")


def read_text(path: Path, key: str, error: type[InputError]) -> str:
    """Return the text of the file under ``key``.

    Raises:
        InputError: of type ``error``; the file is missing, a folder, unreadable, or not UTF-8.
    """
    path = path.expanduser()
    check_is_file(path, key, error)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise not_utf8_error(path, key, error, problem.start) from None
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise error(f"{key}: cannot read {path}: {reason}") from None


def read_yaml(path: Path, key: str, error: type[InputError]) -> Any:
    """Return the values of the YAML file under ``key``; None if it is empty.

    Raises:
        InputError: of type ``error``; as for :func:`read_text`, or invalid YAML or duplicate keys.
    """
    text = read_text(path, key, error)
    if len(text) > MAX_CHARACTERS:
        raise error(f"{key}: {path} is too large for a file of settings ({len(text)} characters)")
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        mark = getattr(problem, "problem_mark", None)
        location = f", line {mark.line + 1}" if mark is not None else ""
        reason = getattr(problem, "problem", None) or getattr(problem, "reason", None) or problem
        raise error(f"{key}: {path}{location}: not valid YAML ({reason})") from None
