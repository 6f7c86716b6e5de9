"""Text of a configuration that goes into batch scripts and command lines.

A script quotes such text for the shell, which reads any character between quotes. sbatch reads its
own lines of a script by other rules: a line break ends the line, and a backslash takes the quote or
backslash behind it literally, between quotes too (seen with 22.05).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from rlinf.errors import PlanError

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_option(value: str) -> str:
    """Return the value of an option of sbatch, or a part of it.

    Raises:
        ValueError: it does not fit into a line of a batch script.
    """
    if found := _CONTROL.search(value):
        raise ValueError(
            f"{value!r} holds the control character {found[0]!r}, which would end or garble the "
            "option's line of the batch script; write the value on one line (in YAML without | "
            "and >)"
        )
    if "\\" in value:
        raise ValueError(f"{value!r} holds a backslash, which sbatch would leave out; do without")
    return value


def check_word(value: str) -> str:
    """Return a word of a command line, a line of shell or the value of a variable.

    Raises:
        ValueError: no program can be given it.
    """
    if "\0" in value:
        raise ValueError(f"{value!r} holds a null character, which no command can be given")
    return value


def check_variable(name: str) -> str:
    """Return the name of an environment variable.

    Raises:
        ValueError: a shell knows no variable of that name.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name of an environment variable: letters, digits and _, and no digit "
            "first"
        )
    return name


def check_folder(folder: Path) -> None:
    """See that jobs can write their logs below a folder.

    Raises:
        PlanError: sbatch, srun or submitit would take its path for another one.
    """
    try:
        check_option(str(folder))
        if "%" in str(folder):
            raise ValueError(f"{str(folder)!r} holds %, which Slurm replaces in paths of logs")
    except ValueError as error:
        raise PlanError(f"folder of Slurm jobs (run.root): {error}; choose another one") from None


OptionText = Annotated[str, AfterValidator(check_option)]
Word = Annotated[str, AfterValidator(check_word)]
Environment = dict[Annotated[str, AfterValidator(check_variable)], Word]
