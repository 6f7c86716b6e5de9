"""Job ids as Slurm writes them: ``12``, an array's element ``12_3``, several of them ``12_[3-5]``,
a component of a heterogeneous job ``12+1``.

Forms: manual pages of squeue (JOBID) and sbatch (``--array``), and Slurm's page on heterogeneous
jobs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

COMPONENT = "RLINF_HET_GROUPS"
"""Variable with the numbers of the components of a heterogeneous job that are a process's own."""
_ID = re.compile(r"\d+(?:_(?:\d+|\[[\d,:%.-]*\]?)|\+\d+)?")
_SEVERAL = re.compile(r"(\d+)_\[([^\]%]*)(?:%\d+)?\]?")
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def expand(text: str) -> list[str]:
    """``12_[0,3-5,8-12:2%4]`` as ids of single elements; other ids as they are.

    ``%4`` is how many may run at once. A list that Slurm cut short (``12_[1,3,...]``) gives the
    elements it names.
    """
    several = _SEVERAL.fullmatch(text)
    if several is None:
        return [text]
    found = []
    for part in several[2].split(","):
        if span := _RANGE.fullmatch(part):
            first = int(span[1])
            last = int(span[2] or first)
            found += [f"{several[1]}_{i}" for i in range(first, last + 1, int(span[3] or 1))]
    return found


def is_id(text: str) -> bool:
    """Return whether a text is an id of one of these forms, and no word of a banner."""
    return _ID.fullmatch(text) is not None


def whole_of(identity: str) -> str:
    """The id of the array or heterogeneous job that a part belongs to; of another job its own."""
    return re.split("[_+]", identity, maxsplit=1)[0]


def own_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """This process's job, by a name that means it alone; None outside of jobs.

    SLURM_JOB_ID of an array's last element is the id of the whole array, so that ``scontrol
    requeue`` with it would requeue all of its elements. In all components of a heterogeneous job it
    is the id of the first (measured on 22.05).
    """
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array is not None and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    components = own_components(environment)
    return components[0] if components else environment.get("SLURM_JOB_ID")


def own_components(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The components of a heterogeneous job that this process's ranks are on; else none."""
    if "SLURM_JOB_ID" not in environment or COMPONENT not in environment:
        return []
    return [f"{environment['SLURM_JOB_ID']}+{n}" for n in environment[COMPONENT].split(",")]
