"""Text of a configuration reaches sbatch and the shell as it is, or is refused."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlinf.errors import PlanError
from slurm.sbatch_options import (
    check_log_folder,
    check_option_text,
    check_shell_text,
    check_variable_name,
)

WORDS = st.text("ab '\"\\#$`;\n\r\t\0\x85é", max_size=8)


def read_by_sbatch(script: str) -> list[str]:
    """Return the words of the first line of a script that is for sbatch, by sbatch's rules.

    Quotes are removed; a backslash is too, between quotes as well, and keeps what is behind it.
    """
    line = script.partition("\n")[0].removeprefix("#SBATCH ")
    words, quote, escaped, within = [""], "", False, False
    for letter in line:
        if escaped:
            words[-1], escaped, within = words[-1] + letter, False, True
        elif letter == "\\":
            escaped = True
        elif quote:
            quote, words[-1] = ("", words[-1]) if letter == quote else (quote, words[-1] + letter)
        elif letter in "'\"":
            quote, within = letter, True
        elif letter.isspace() and within:
            words, within = [*words, ""], False
        elif not letter.isspace():
            words[-1], within = words[-1] + letter, True
    assert not quote, "unmatched quote"
    return words


@given(WORDS)
@example("a\ntouch /tmp/x #")
@example("of a block of YAML\n")
@example("ends in \\")
def test_an_option_is_read_back_by_sbatch_or_refused(value: str) -> None:
    try:
        check_option_text(value)
    except ValueError:
        assert any(ord(letter) < 32 or letter in "\\\x85" for letter in value)
        return
    line = f"#SBATCH --comment={shlex.quote(value)}\n"
    assert read_by_sbatch(line) == [f"--comment={value}"]


@pytest.mark.parametrize("name", ["A", "_a9", "NCCL_SOCKET_IFNAME"])
def test_names_of_variables_are_those_of_a_shell(name: str) -> None:
    text = subprocess.check_output(["bash", "-c", f"export {check_variable_name(name)}=1; env"])
    assert f"{name}=1" in text.decode().splitlines()


@pytest.mark.parametrize("name", ["", "9A", "A B", "A;touch x", "A=B", "$(id)", "A\n", "É", "A-B"])
def test_what_is_no_name_of_a_variable_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a name of an environment variable"):
        check_variable_name(name)


def test_a_word_may_hold_all_but_a_null_character() -> None:
    assert check_shell_text("a\nb 'c' \\") == "a\nb 'c' \\"
    with pytest.raises(ValueError, match="null character"):
        check_shell_text("a\0b")


@pytest.mark.parametrize("name", ["50%j", "a\nb", "a\\b"])
def test_a_folder_is_refused_where_logs_would_go_elsewhere(name: str) -> None:
    check_log_folder(Path("/scratch/of ada/it's #1"))
    with pytest.raises(PlanError, match=r"run\.root.*; choose another one"):
        check_log_folder(Path("/scratch") / name / "run")
