"""The id of a job in what sbatch printed.

sbatch prints ``Submitted batch job 12``, with several clusters ``Submitted batch job 12 on cluster
NAME``, or with ``--parsable`` ``12`` or ``12;NAME`` (manual page of sbatch). At some sites it is a
wrapper that prints a banner, checks and balances before and after that line, on the same output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from rlinf.errors import SlurmError
from slurm.ids import whole_of

_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Colours and the like, by ECMA-48."""
_SENTENCE = re.compile(r"\bSubmitted batch job (\d+)\b", re.IGNORECASE)
_PARSABLE = re.compile(r"(\d+)(?:;[\w.-]+)?")
_SHOWN = 1500
"""Characters of an answer in an error."""


class UnreadSubmission(SlurmError):
    """sbatch took a job, and its answer does not tell the job's id."""


def read_submission(answer: str, marked: Callable[[], Collection[str]] = tuple) -> str:
    """Return the job's id in the answer of sbatch.

    Args:
        marked: returns the ids of the jobs in the queue that this submission has marked; called
            only where the answer holds several numbers, to tell which of them is the job.

    Raises:
        UnreadSubmission: it holds no id, or several that cannot be told apart; shows the answer.
        SlurmError: the queue was asked and did not answer.
    """
    found = _candidates(answer)
    if len(found) > 1:
        there = {whole_of(identity) for identity in marked()}
        found = [identity for identity in found if identity in there] or found
    if len(found) != 1:
        what = f"several numbers ({', '.join(found)})" if found else "no job id"
        raise UnreadSubmission(
            f"sbatch took the job, but its answer holds {what}: {_shown(answer)}"
        )
    return found[0]


def _candidates(answer: str) -> list[str]:
    """Return what may be the id: by the whole sentence, else numbers alone on their line."""
    lines = [line.strip() for line in _ESCAPE.sub("", answer).splitlines()]
    said = [match[1] for line in lines if (match := _SENTENCE.search(line))]
    alone = [match[1] for line in lines if (match := _PARSABLE.fullmatch(line))]
    return list(dict.fromkeys(said or alone))


def _shown(answer: str) -> str:
    text = _ESCAPE.sub("", answer).strip()
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
