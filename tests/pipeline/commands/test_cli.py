"""The command line explains itself."""

from __future__ import annotations

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from pipeline.commands.cli import app

COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]


def test_the_list_of_commands_cuts_no_sentence_short() -> None:
    """On a terminal of 80 columns."""
    shown = CliRunner().invoke(app, ["--help"], terminal_width=80).output
    listed = shown.partition("Commands:")[2]
    assert [line.split()[0] for line in listed.splitlines() if line.strip()] != []
    assert all(name in listed for name in COMMANDS)
    assert "..." not in listed


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_and_option_is_explained(name: str) -> None:
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    assert command.help
    missing = [p.name for p in command.params if not getattr(p, "help", "") and p.name != "help"]
    assert missing == []
