"""Which code an output depends on."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf.algorithms import algorithms
from rlinf.config import RunConfig, validate
from rlinf.errors import CodeError
from stages.code import Code, _imports, _meaning, read_code
from stages.layout import CODE

Compose = Callable[..., dict[str, Any]]


def meaning(text: str) -> bytes:
    return b"".join(_meaning(ast.parse(text)))


PLAIN = "x: int = 1\ndef f(a):\n    return a + x\n"


@pytest.mark.parametrize(
    "text",
    [
        '"""Says what it is."""\n\n# why\nx: int = 1  # one\n\n\ndef f(a):\n    return (a + x)\n',
        'x: int = 1\n"""One."""\ndef f(\n    a,\n):\n    "Adds."\n    return a + x\n',
    ],
)
def test_comments_docstrings_and_layout_do_not_count(text: str) -> None:
    assert meaning(text) == meaning(PLAIN)


@pytest.mark.parametrize(
    "text", [PLAIN.replace("1", "2"), PLAIN.replace("+", "-"), PLAIN.replace("f(a)", "f(a, b)")]
)
def test_everything_else_does(text: str) -> None:
    assert meaning(text) != meaning(PLAIN)


def test_imports_are_found_wherever_they_are() -> None:
    text = (
        "import a.b\ndef f():\n    from .c import d\n    from ..e import f\n    from . import g\n"
    )
    found = set(_imports(ast.parse(text), "top.sub"))
    assert {"a.b", "top.sub.c", "top.sub.c.d", "top.e", "top.e.f", "top.sub.g"} <= found


def test_a_stage_depends_on_its_program_and_on_the_classes_that_are_named(compose: Compose) -> None:
    code = Code.of(validate(RunConfig, compose()))
    train, rollout = (set(code.stages[stage]) for stage in ("train", "rollout"))
    assert {"stages.train", "rlinf.algorithms.grpo", "rlinf.trainers.fsdp"} <= train
    assert {"stages.rollout", "stages.collect", "rlinf.envs.arithmetic"} <= rollout
    assert not any("ppo" in name or "gym" in name for name in train | rollout)
    assert not any(name.startswith(("rlinf.trainers", "rlinf.algorithms")) for name in rollout)
    assert not any(name.startswith(("rlinf.channels", "stages.context")) for name in train)


def test_a_class_from_outside_counts_with_what_it_imports_of_its_package(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "outside_algorithm"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "mine.py").write_text("from outside_algorithm import shares\nclass Mine: ...\n")
    (folder / "shares.py").write_text("X = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(algorithms._entries, "mine", "outside_algorithm.mine:Mine")
    values = compose()
    values["algorithm"] = {"name": "mine"}
    names = Code.of(validate(RunConfig, values)).stages["train"]
    assert {
        "outside_algorithm.mine:Mine",
        "outside_algorithm.mine",
        "outside_algorithm.shares",
    } <= set(names)


def test_a_record_is_read_as_it_was_written(compose: Compose, tmp_path: Path) -> None:
    code = Code.of(validate(RunConfig, compose()))
    assert read_code(tmp_path) is None
    (tmp_path / CODE).write_text(code.to_json())
    assert read_code(tmp_path) == code
    assert not code.differing(code)
    (tmp_path / CODE).write_bytes(b"\xff")
    with pytest.raises(CodeError, match="damaged"):
        read_code(tmp_path)
