"""A file of partial results, so that interrupted work continues where it stopped."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import torch
import xxhash

from rlinf import package_paths
from rlinf.artifacts import write_atomic
from rlinf.config import json_digest
from rlinf.errors import ConfigError
from rlinf.interpreters import resolve_interpreter


class ResultCache:
    """A file of results by the digest of their settings and code."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._results: dict[str, dict[str, Any]] = {}
        if path.exists():
            self._results = json.loads(path.read_text())

    def __contains__(self, key: str) -> bool:
        return key in self._results

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._results[key]

    def __setitem__(self, key: str, result: dict[str, Any]) -> None:
        """Store a result and write the file."""
        self._results[key] = result
        self._write()

    def discard_others(self, keys: Collection[str]) -> None:
        """Remove results whose key is not in ``keys``."""
        if self._results.keys() - set(keys):
            self._results = {key: r for key, r in self._results.items() if key in keys}
            self._write()

    def _write(self) -> None:
        write_atomic(self._path, json.dumps(self._results, indent=1) + "\n")


def result_key(environment: str | None, **settings: Any) -> str:
    """Return the digest of settings, of the package's code and of the versions of its dependencies.

    Args:
        environment: name of an environment of ``make env``; None: this one.
    """
    package_list = package_paths.ROOT / "configs" / "environments" / f"{environment}.txt"
    versions = torch.__version__ if environment is None else package_list.read_text()
    return json_digest({**settings, "code": _code(), "versions": versions})


def missing_environment(environment: str | None) -> str | None:
    """Return what to do about a missing environment; None: it exists."""
    try:
        if environment is not None:
            resolve_interpreter(environment, "equality")
    except ConfigError:
        return f"not run: make env NAME={environment}"
    return None


@cache
def _code() -> str:
    """Return the digest of the code, without comments and docstrings."""
    digest = xxhash.xxh3_128()
    for path in sorted((package_paths.ROOT / "rlinf").rglob("*.py")):
        code = ast.parse(path.read_bytes())
        for node in ast.walk(code):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [statement for statement in body if not _is_docstring(statement)]  # type: ignore[attr-defined]
        digest.update(ast.dump(code).encode())
    return digest.hexdigest()


def _is_docstring(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
