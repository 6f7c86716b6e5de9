"""What CONTRIBUTING.md names is there."""

from __future__ import annotations

import re

import pytest

from rlinf import package_paths

PAGE = (package_paths.ROOT / "CONTRIBUTING.md").read_text()
PATHS = sorted(
    {
        name
        for name in re.findall(r"`((?:rlinf|stages|pipeline|configs|tests|docs)/[\w./]+)`", PAGE)
        if "NAME" not in name
    }
)
FOLDERS = sorted(set(re.findall(r"`((?:rlinf|stages|configs)(?:/\w+)?)/NAME\.\w+`", PAGE)))
TARGETS = sorted(set(re.findall(r"^make ([\w-]+)", PAGE, flags=re.MULTILINE)))


@pytest.mark.parametrize("path", PATHS)
def test_files_are_there(path: str) -> None:
    assert (package_paths.ROOT / path).exists()


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_hold_files_of_their_kind(folder: str) -> None:
    kind = "*.yaml" if folder.startswith("configs") else "*.py"
    assert any((package_paths.ROOT / folder).glob(kind))


def test_commands_are_targets_of_the_makefile() -> None:
    known = set(
        re.findall(r"^([\w-]+):", (package_paths.ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    )
    assert len(TARGETS) > 5
    assert set(TARGETS) <= known


def test_every_registry_is_in_the_table() -> None:
    folders = {
        path.parent.relative_to(package_paths.ROOT).as_posix()
        for path in package_paths.ROOT.glob("rlinf/*/__init__.py")
        if "Registry(" in path.read_text()
    }
    assert folders <= set(FOLDERS)
