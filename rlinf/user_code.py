"""Errors of user code: recognised by the traceback, and reported once.

User code is each module that the configuration names (``reward.name=mylab.rewards:Brief``), and the
other modules of its package or, without a package, of its folder. An exception belongs to the
user if its traceback has a frame of such a module. It becomes a :class:`UserCodeError`, which no
driver retries, or a :class:`TransientUserCodeError` if another attempt may succeed
(:mod:`rlinf.transient_errors`).
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import NamedTuple

from rlinf.errors import (
    RlinfError,
    TransientUserCodeError,
    UserCodeError,
    exception_line,
    to_resource_error,
)
from rlinf.transient_errors import cause_of, is_transient

PRODUCT_PACKAGES = frozenset({"rlinf", "stages", "pipeline", "launchers", "slurm"})
"""Top-level packages whose modules are never user code."""
LIBRARY_FOLDERS = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))


class _UserComponent(NamedTuple):
    """A component that the configuration names."""

    label: str
    file: Path
    attribute: object


_components: dict[str, _UserComponent] = {}
"""Components by label."""
_packages: set[Path] = set()
"""Folders of packages; all modules below them are user code."""
_folders: set[Path] = set()
"""Folders of modules without a package; the modules directly in them are user code."""


def register_user_component(label: str, module: ModuleType, attribute: object) -> None:
    """Treat the modules around ``module`` as user code from now on.

    Args:
        label: name of the component in errors, such as ``reward.name: mylab.rewards:Brief``.
        attribute: the class, function or variable that the configuration names.
    """
    top = module.__name__.partition(".")[0]
    file = getattr(module, "__file__", None)
    if top in PRODUCT_PACKAGES or label in _components or file is None:
        return
    _components[label] = _UserComponent(label, Path(file), attribute)
    _remember_modules_around(module)
    for base in inspect.getmro(attribute) if inspect.isclass(attribute) else ():
        owner = sys.modules.get(base.__module__)
        if owner is not None and not _is_library(owner):
            _remember_modules_around(owner)


def _remember_modules_around(module: ModuleType) -> None:
    """Add the module's package or, without a package, its folder."""
    package = sys.modules.get(module.__name__.partition(".")[0])
    file = getattr(module, "__file__", None)
    if package is not None and hasattr(package, "__path__"):
        _packages.update(map(Path, package.__path__))
    elif file is not None and not _is_library(module):
        _folders.add(Path(file).parent)


def _is_library(module: ModuleType) -> bool:
    """Return whether a module belongs to the product, the standard library or site-packages."""
    file = getattr(module, "__file__", None)
    if module.__name__.partition(".")[0] in PRODUCT_PACKAGES or file is None:
        return True
    return any(Path(file).is_relative_to(folder) for folder in LIBRARY_FOLDERS)


def to_user_code_error(error: BaseException) -> RlinfError | None:
    """Return the error to report in place of ``error`` if user code raised it, else None.

    It returns None for errors raised on purpose (:class:`RlinfError`), errors caused by a full disk
    or exhausted memory, and errors that end the process from outside (a signal, Ctrl-C).
    ``sys.exit`` in user code counts as an error.
    """
    if not isinstance(error, Exception | SystemExit) or isinstance(error, RlinfError):
        return None
    if not _components or to_resource_error(error) is not None:
        return None
    entries = list(_traceback_entries(error.__traceback__))
    user_entry = next((entry for entry in entries if _is_user_code(entry.tb_frame)), None)
    if user_entry is None:
        return None
    if isinstance(error, SystemExit) and _is_product(entries[-1].tb_frame):
        return None  # a signal's handler ends the process
    text = next(iter(str(error).splitlines()), "")
    summary = f"{type(error).__name__}: {text}" if text else type(error).__name__
    label = _label([entry.tb_frame for entry in entries], user_entry.tb_frame)
    message = f"{label} raised {summary}\n{_traceback(error, user_entry)}"
    return (TransientUserCodeError if is_transient(error) else UserCodeError)(message)


def exit_code_and_message(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the message to report for an error.

    They are the error's own if it was raised on purpose, else those of :func:`to_resource_error` or
    :func:`to_user_code_error`, else 1 and the full traceback.
    """
    if not isinstance(error, RlinfError):
        error = to_resource_error(error) or to_user_code_error(error) or error
    if isinstance(error, RlinfError):
        return error.exit_code, str(error)
    return 1, "".join(traceback.format_exception(error))


@contextlib.contextmanager
def translate_user_errors() -> Iterator[None]:
    """Replace errors of user code by the result of :func:`to_user_code_error`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        reported = to_user_code_error(error)
        if reported is None:
            raise
        raise reported from None


def _traceback_entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _is_user_code(frame: FrameType) -> bool:
    if _is_product(frame):
        return False
    file = Path(frame.f_code.co_filename)
    return (
        file.parent in _folders
        or any(file.is_relative_to(package) for package in _packages)
        or any(file == component.file for component in _components.values())
    )


def _is_product(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in PRODUCT_PACKAGES


def _label(frames: list[FrameType], first: FrameType) -> str:
    """Return the label of the component whose code raised.

    It is the component of the first frame in ``frames`` whose ``self`` or ``cls`` belongs to a
    component; otherwise, the last component in the file of ``first``.
    """
    classes = [(component.attribute, component.label) for component in _components.values()]
    for frame in frames:
        receiver = frame.f_locals.get("self", frame.f_locals.get("cls"))
        cls = receiver if inspect.isclass(receiver) else type(receiver)
        for attribute, label in classes:
            if attribute in cls.__mro__:
                return label
    file = Path(first.f_code.co_filename)
    labels = [component.label for component in _components.values() if component.file == file]
    return labels[-1] if labels else f"{file}:"


def _traceback(error: BaseException, first: TracebackType) -> str:
    """Return the traceback from the user's line on, and one line about the cause."""
    formatted = traceback.TracebackException(type(error), error, first, compact=True)
    text = "".join(formatted.format(chain=False)).rstrip()
    cause = cause_of(error)
    if cause is None:
        return text
    return f"{text}\nraised from {exception_line(''.join(traceback.format_exception_only(cause)))}"
