"""Errors of simulators as text. A prefix marks errors of the user's code that a retry would raise
again.

The simulator process (:mod:`rlinf.envs.vector_env`) loads this module too, so it imports only the
standard library.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from ..transient_errors import is_transient

USER_CODE_PREFIX = "task: your simulator raised"
"""Prefix of the traceback of an error in the user's code that a retry would raise again."""
MAX_TRACEBACK_CHARS = 100_000
"""Maximum length of a traceback; a longer one keeps its end, the most informative part."""


def format_error(error: BaseException, user_modules: Sequence[str] = ()) -> str:
    """Return the traceback of an error; for an error in the user's code, from the user's frame on.

    Args:
        user_modules: modules of the user, by name or file. Modules of the same package or folder
            are the user's too.
    """
    tb = error.__traceback__
    while tb is not None and not _is_user_file(tb.tb_frame.f_code.co_filename, user_modules):
        tb = tb.tb_next
    if tb is None or isinstance(error, MemoryError) or is_transient(error):
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))[
            -MAX_TRACEBACK_CHARS:
        ]
    text = "".join(traceback.format_exception(type(error), error, tb, chain=False))
    return f"{USER_CODE_PREFIX} {type(error).__name__}\n{text[-MAX_TRACEBACK_CHARS:]}"


def _is_user_file(file: str, user_modules: Sequence[str]) -> bool:
    folder = os.path.dirname(os.path.abspath(file))  # noqa: PTH100, PTH120
    for name in user_modules:
        if name.endswith(".py"):
            if folder == os.path.dirname(os.path.abspath(name)):  # noqa: PTH100, PTH120
                return True
            continue
        top_module = sys.modules.get(name.partition(".")[0])
        roots = list(getattr(top_module, "__path__", ()))
        if any(os.path.abspath(file).startswith(os.path.join(r, "")) for r in roots):  # noqa: PTH100, PTH118
            return True
        module_file = getattr(top_module, "__file__", None) if not roots else None
        if module_file and folder == os.path.dirname(os.path.abspath(module_file)):  # noqa: PTH100, PTH120
            return True
    return False
