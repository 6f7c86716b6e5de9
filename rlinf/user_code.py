"""Errors that the user's own code raises: recognised by the traceback, and reported once.

User code is each module that the configuration names (``reward.name=mylab.rewards:Brief``), with
the other modules of its package or, if it has none, of its folder. An exception whose traceback
has a frame of such a module is the user's. It becomes a :class:`UserCodeError`, which no driver
retries, unless it may pass by itself; then it is a :class:`TransientUserCodeError`.

Errors that pass by themselves are those of connections and files (``OSError``, except a missing
or forbidden path), of HTTP and services that are busy or out of reach, of a locked database, of
device memory and collectives, and of worker processes that died. The error itself decides, or one
that it was raised from; of a group each must pass.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sqlite3
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from http.client import HTTPException
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import NamedTuple

from rlinf.errors import (
    RlinfError,
    TransientUserCodeError,
    UserCodeError,
    last_line,
    storage_error,
)

PRODUCT = frozenset({"rlinf", "stages", "pipeline", "launchers", "slurm"})
"""Top-level packages whose modules are never user code."""
TRANSIENT = (OSError, HTTPException, subprocess.TimeoutExpired, BrokenExecutor)
PERMANENT = (
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)
"""Errors of files that another try would meet again: the path is wrong."""
HTTP_TRANSIENT = frozenset({408, 425, 429, *range(500, 600)})
"""Statuses of HTTP that another try may not get (RFC 9110, 6585 and 8470)."""
GRPC_TRANSIENT = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED"})
CLIENTS = frozenset(
    {"aiohttp", "anthropic", "grpc", "httpcore", "httpx", "openai", "redis", "requests", "urllib3"}
)
"""Packages that reach services, whose errors need not be an ``OSError``."""
UNREACHED = re.compile(r"Timeout|Connect|Network|RemoteProtocol")
"""Part of the names of their errors that tell of a connection."""
TORCH_TRANSIENT = ("OutOfMemoryError", "AcceleratorError", "distributed.DistError")
TRANSIENT_TEXTS = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "NCCL", "gloo/transport")
"""Parts of the messages of device and network errors that PyTorch raises as RuntimeError."""
LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))


class _Part(NamedTuple):
    """A part that the configuration names."""

    label: str
    file: Path
    attribute: object


_parts: dict[str, _Part] = {}
_packages: set[Path] = set()
_folders: set[Path] = set()


def remember_part(label: str, module: ModuleType, attribute: object) -> None:
    """Count the modules around ``module`` as user code from now on.

    Args:
        label: how errors name the part, such as ``reward.name: mylab.rewards:Brief``.
        attribute: the class, function or variable that the configuration names.
    """
    top = module.__name__.partition(".")[0]
    file = getattr(module, "__file__", None)
    if top in PRODUCT or label in _parts or file is None:
        return
    _parts[label] = _Part(label, Path(file), attribute)
    _remember_modules_around(module)
    for base in inspect.getmro(attribute) if inspect.isclass(attribute) else ():
        owner = sys.modules.get(base.__module__)
        if owner is not None and not _is_library(owner):
            _remember_modules_around(owner)


def _remember_modules_around(module: ModuleType) -> None:
    package = sys.modules.get(module.__name__.partition(".")[0])
    file = getattr(module, "__file__", None)
    if package is not None and hasattr(package, "__path__"):
        _packages.update(map(Path, package.__path__))
    elif file is not None and not _is_library(module):
        _folders.add(Path(file).parent)


def _is_library(module: ModuleType) -> bool:
    """Whether a module is the product's, the standard library's or an installed one."""
    file = getattr(module, "__file__", None)
    if module.__name__.partition(".")[0] in PRODUCT or file is None:
        return True
    return any(Path(file).is_relative_to(folder) for folder in LIBRARIES)


def user_error(error: BaseException) -> RlinfError | None:
    """The error to report in place of ``error`` if user code raised it; None: it did not.

    Errors that are raised on purpose (:class:`RlinfError`), that a full disk or used-up memory
    explains, and that end the process from outside (a signal, Ctrl-C) stay as they are.
    ``sys.exit`` in user code counts as an error.
    """
    if not isinstance(error, Exception | SystemExit) or isinstance(error, RlinfError):
        return None
    if not _parts or storage_error(error) is not None:
        return None
    steps = list(_steps(error.__traceback__))
    first = next((step for step in steps if _is_user_code(step.tb_frame)), None)
    if first is None:
        return None
    if isinstance(error, SystemExit) and _is_product(steps[-1].tb_frame):
        return None  # a signal's handler ends the process
    text = next(iter(str(error).splitlines()), "")
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    label = _label([step.tb_frame for step in steps], first.tb_frame)
    message = f"{label} raised {said}\n{_traceback(error, first)}"
    return (TransientUserCodeError if _may_pass(error) else UserCodeError)(message)


def exit_of(error: BaseException) -> tuple[int, str]:
    """Exit code and message of an error: its own if it was raised on purpose, else those of what
    :func:`storage_error` or :func:`user_error` make of it, else 1 and the whole traceback."""
    if not isinstance(error, RlinfError):
        error = storage_error(error) or user_error(error) or error
    if isinstance(error, RlinfError):
        return error.exit_code, str(error)
    return 1, "".join(traceback.format_exception(error))


@contextlib.contextmanager
def reporting_user_errors() -> Iterator[None]:
    """Raise errors of user code as :func:`user_error` reports them."""
    try:
        yield
    except (Exception, SystemExit) as error:
        found = user_error(error)
        if found is None:
            raise
        raise found from None


def _steps(step: TracebackType | None) -> Iterator[TracebackType]:
    while step is not None:
        yield step
        step = step.tb_next


def _is_user_code(frame: FrameType) -> bool:
    if _is_product(frame):
        return False
    file = Path(frame.f_code.co_filename)
    return (
        file.parent in _folders
        or any(file.is_relative_to(package) for package in _packages)
        or any(file == part.file for part in _parts.values())
    )


def _is_product(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in PRODUCT


def _label(frames: list[FrameType], first: FrameType) -> str:
    """The part that was at work: the class of the outermost method, else what its file holds."""
    classes = [(part.attribute, part.label) for part in _parts.values()]
    for frame in frames:
        owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
        kind = owner if inspect.isclass(owner) else type(owner)
        for attribute, label in classes:
            if attribute in kind.__mro__:
                return label
    there = Path(first.f_code.co_filename)
    labels = [part.label for part in _parts.values() if part.file == there]
    return labels[-1] if labels else f"{there}:"


def _traceback(error: BaseException, first: TracebackType) -> str:
    """One traceback, which begins at the user's line; the cause, if there is one, as a line."""
    shown = traceback.TracebackException(type(error), error, first, compact=True)
    text = "".join(shown.format(chain=False)).rstrip()
    cause = _cause(error)
    if cause is None:
        return text
    return f"{text}\nraised from {last_line(''.join(traceback.format_exception_only(cause)))}"


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _may_pass(error: BaseException | None) -> bool:
    """Whether another try may succeed."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        if isinstance(error, PERMANENT):
            return False
        if isinstance(error, BaseExceptionGroup) and all(map(_may_pass, error.exceptions)):
            return True
        if isinstance(error, TRANSIENT) or _is_of_device(error) or _is_of_service(error):
            return True
        seen.add(id(error))
        error = _cause(error)
    return False


def _is_of_service(error: BaseException) -> bool:
    """Whether a service was busy or out of reach, or a database locked."""
    places = (error, getattr(error, "response", None))
    found = [getattr(place, name, None) for place in places for name in ("status_code", "status")]
    if any(isinstance(status, int) and status in HTTP_TRANSIENT for status in found):
        return True
    if isinstance(error, sqlite3.OperationalError):
        return "is locked" in str(error)
    ours = [c for c in type(error).__mro__ if c.__module__.partition(".")[0] in CLIENTS]
    if any(UNREACHED.search(kind.__name__) for kind in ours):
        return True
    code = getattr(error, "code", None) if ours else None
    return callable(code) and getattr(code(), "name", "") in GRPC_TRANSIENT


def _is_of_device(error: BaseException) -> bool:
    """Whether PyTorch raised it over device memory, a device or a lost peer."""
    if isinstance(error, RuntimeError) and any(text in str(error) for text in TRANSIENT_TEXTS):
        return True
    torch = sys.modules.get("torch")
    return any(isinstance(error, kind) for kind in _torch_errors(torch))


def _torch_errors(torch: ModuleType | None) -> list[type]:
    """The classes of :data:`TORCH_TRANSIENT` that this PyTorch has; none before its import."""
    kinds = []
    for name in TORCH_TRANSIENT:
        found: object = torch
        for word in name.split("."):
            found = getattr(found, word, None)
        if inspect.isclass(found):
            kinds.append(found)
    return kinds
