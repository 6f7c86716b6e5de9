"""Errors of simulators as text: whose code raised, and whether a retry may succeed.

Also loaded in the simulator process (:mod:`rlinf.envs.vector_env`): it imports the standard library
alone.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from ..transient_errors import is_transient

USER_CODE_PREFIX = "task: your simulator raised"
"""Prefix of the traceback of an error in the user's code that a retry would meet again."""
MAX_TRACEBACK_CHARS = 100_000
"""Characters kept of a traceback; its end is the most informative part."""


def format_error(error: BaseException, own: Sequence[str] = ()) -> str:
    """Return the traceback of an error; for an error in the user's code, from the user's frame on.

    Args:
        own: modules of the user, by name or file. Modules of the same package or folder also count
            as the user's.
    """
    step = error.__traceback__
    while step is not None and not _is_own(step.tb_frame.f_code.co_filename, own):
        step = step.tb_next
    if step is None or isinstance(error, MemoryError) or is_transient(error):
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))[
            -MAX_TRACEBACK_CHARS:
        ]
    text = "".join(traceback.format_exception(type(error), error, step, chain=False))
    return f"{USER_CODE_PREFIX} {type(error).__name__}\n{text[-MAX_TRACEBACK_CHARS:]}"


def _is_own(file: str, own: Sequence[str]) -> bool:
    folder = os.path.dirname(os.path.abspath(file))  # noqa: PTH100, PTH120
    for name in own:
        if name.endswith(".py"):
            if folder == os.path.dirname(os.path.abspath(name)):  # noqa: PTH100, PTH120
                return True
            continue
        top = sys.modules.get(name.partition(".")[0])
        roots = list(getattr(top, "__path__", ()))
        if any(os.path.abspath(file).startswith(os.path.join(r, "")) for r in roots):  # noqa: PTH100, PTH118
            return True
        alone = getattr(top, "__file__", None) if not roots else None
        if alone and folder == os.path.dirname(os.path.abspath(alone)):  # noqa: PTH100, PTH120
            return True
    return False
