"""Names and docstrings stay in the field's words: CONTRIBUTING.md says how they read."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf import package_paths

PACKAGES = ("rlinf", "pipeline", "stages", "launchers", "slurm")
FORBIDDEN_WORDS = frozenset(
    [
        "said",
        "told",
        "tells",
        "asks",
        "asked",
        "asker",
        "askers",
        "apart",
        "gone",
        "fell",
        "taken",
        "took",
        "lives",
        "settle",
        "settled",
        "spoilt",
        "judged",
        "worth",
        "wished",
        "parted",
        "speaks",
        "speaking",
        "manieth",
        "held",
        "came",
        "comes",
        "goes",
        "look",
        "hear",
        "tell",
        "whom",
        "heir",
        "inbox",
        "outbox",
    ]
)
"""Small verbs and participles that stood where the field has nouns."""
FORBIDDEN_IN_TESTS = frozenset(["said", "told", "asked", "judged", "spoilt", "wished"])
"""The same for tests, whose functions may be named by a sentence."""
TERMS = frozenset(["held_out"])
"""Terms of the field that contain a forbidden word."""
FORMER_NAMES = frozenset(
    [
        "warm_start",
        "retention.keep",
        "flow=dynamic_sampling",
        "kept.json",
        "claims.jsonl",
        "set-aside",
        "told.txt",
        "UNSEEDED",
    ]
)
"""Names that users saw before; no page, plan or experiment has them."""
FORBIDDEN_STARTS = frozenset(
    ["What", "Which", "Of", "Those", "That", "By", "As", "Where", "Why", "How"],
)
"""First words of docstrings that begin a clause instead of a sentence."""
MAX_FILES = 363
"""Files of the product; a concept that is cut into pieces makes it grow."""


def product_files(root: Path) -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((root / package).rglob("*.py"))


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every name that a module gives: line and name."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def words_of(name: str) -> set[str]:
    for term in TERMS:
        name = re.sub(term, "", name, flags=re.IGNORECASE)
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def violations(path: Path) -> list[str]:
    """Identifiers and docstrings of a file that do not read as the field's."""
    tree = ast.parse(path.read_text())
    found = [
        f"{path}:{line} the name {name!r} has {', '.join(sorted(words))}"
        for line, name in identifiers(tree)
        if (words := words_of(name) & FORBIDDEN_WORDS)
    ]
    for line, text in docstrings(tree):
        first = text.split()[0].rstrip(",:;.")
        if first in FORBIDDEN_STARTS or text[0].islower():
            found.append(f"{path}:{line} the docstring begins with {text.splitlines()[0][:60]!r}")
    return found


def test_names_and_docstrings_are_in_plain_words() -> None:
    found = [text for path in product_files(package_paths.ROOT) for text in violations(path)]
    assert not found, "\n".join(found)


def test_names_in_tests_are_in_plain_words() -> None:
    tests = package_paths.ROOT / "tests"
    found = [
        f"{path}:{line} the name {name!r}"
        for path in sorted(tests.rglob("*.py"))
        for line, name in identifiers(ast.parse(path.read_text()))
        if not name.startswith("test_") and words_of(name) & FORBIDDEN_IN_TESTS
    ]
    assert not found, "\n".join(found)


def test_pages_and_settings_have_no_former_names() -> None:
    found = [
        f"{path}: {name}"
        for folder, pattern in (("docs", "*.md"), ("docs", "*.yaml"), ("configs", "*.yaml"))
        for path in sorted((package_paths.ROOT / folder).rglob(pattern))
        for name in FORMER_NAMES
        if name in path.read_text()
    ]
    assert not found, "\n".join(found)


def duplicated_classes(root: Path) -> list[str]:
    count = Counter(
        node.name
        for path in product_files(root)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, times in count.items() if times > 1)


def test_each_class_name_stands_once() -> None:
    assert duplicated_classes(package_paths.ROOT) == []


def test_the_product_is_not_cut_into_more_files() -> None:
    assert sum(1 for _ in product_files(package_paths.ROOT)) <= MAX_FILES


@pytest.mark.parametrize(
    "text",
    [
        '"""What a run has."""\n',
        '"""Return it."""\ndef f() -> None:\n    said = 1\n',
        '"""Return it."""\nclass WorldAsks:\n    """A world."""\n',
        '"""Return it."""\ndef f(told: int) -> None:\n    """taken from it."""\n',
    ],
)
def test_the_check_would_notice(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(text)
    assert violations(tmp_path / "a.py")


def test_a_class_in_two_files_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "rlinf").mkdir()
    for name in ("a", "b"):
        (tmp_path / "rlinf" / f"{name}.py").write_text("class World:\n    pass\n")
    assert duplicated_classes(tmp_path) == ["World"]
