"""The commands that README and the pages of ``docs`` show, and how each of them is tested."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tests.docs.figures import ROOT, handwritten

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
KNOWN = Path(__file__).parent / "commands.yaml"


def commands_of(text: str) -> list[str]:
    """Return the lines of the shell blocks of a page, without comments and line breaks."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if command := re.sub(r"(^|\s+)# .*$", "", line).strip():
                found.append(command)
    return found


def shown() -> dict[str, str]:
    """Return every command with the page that shows it first."""
    found: dict[str, str] = {}
    for page in (*PAGES, *handwritten()):
        for command in commands_of(page.read_text()):
            found.setdefault(command, page.name)
    return found


def known() -> dict[str, Any]:
    """Return ``commands.yaml``: which command is run, where, or why it is not."""
    values: dict[str, Any] = yaml.safe_load(KNOWN.read_text())
    return values
