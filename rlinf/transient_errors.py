"""Transient errors: those after which another attempt may succeed.

They are errors of connections and files (``OSError``, except a missing or forbidden path), of HTTP
and of services that are busy or unreachable, of a locked database, of device memory and
collectives, and of worker processes that died. An error is also transient if an error in its chain
of causes is. In an exception group, each error must be transient.

Simulator processes also load this module, with Python 3.9 or newer and only its standard library.
"""

from __future__ import annotations

import builtins
import inspect
import re
import subprocess
import sys
from concurrent.futures import BrokenExecutor
from http.client import HTTPException
from types import ModuleType

TRANSIENT_ERRORS = (OSError, HTTPException, subprocess.TimeoutExpired, BrokenExecutor)
PERMANENT_ERRORS = (
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)
"""Errors of files that another attempt would raise again, because the path is wrong."""
TRANSIENT_HTTP_STATUSES = frozenset({408, 425, 429, *range(500, 600)})
"""HTTP statuses that may not recur (RFC 9110, 6585 and 8470)."""
TRANSIENT_GRPC_CODES = frozenset(
    {"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED"}
)
SERVICE_CLIENTS = frozenset(
    {"aiohttp", "anthropic", "grpc", "httpcore", "httpx", "openai", "redis", "requests", "urllib3"}
)
"""Packages of service clients, whose errors need not be an ``OSError``."""
CONNECTION_ERROR_NAMES = re.compile(r"Timeout|Connect|Network|RemoteProtocol")
"""Pattern for the class names of these packages' connection errors."""
TRANSIENT_TORCH_ERRORS = ("OutOfMemoryError", "AcceleratorError", "distributed.DistError")
TRANSIENT_TEXTS = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "NCCL", "gloo/transport")
"""Parts of the messages of device and network errors that PyTorch raises as RuntimeError."""


def cause_of(error: BaseException) -> BaseException | None:
    """Return the error that caused ``error``, as a traceback shows it."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def is_transient(error: BaseException | None) -> bool:
    """Return whether another attempt may succeed."""
    visited: set[int] = set()
    groups = getattr(builtins, "BaseExceptionGroup", ())  # from Python 3.11 on
    while error is not None and id(error) not in visited:
        if isinstance(error, PERMANENT_ERRORS):
            return False
        if isinstance(error, groups) and all(map(is_transient, error.exceptions)):
            return True
        is_known = isinstance(error, TRANSIENT_ERRORS)
        if is_known or _is_device_error(error) or _is_service_error(error):
            return True
        visited.add(id(error))
        error = cause_of(error)
    return False


def _is_service_error(error: BaseException) -> bool:
    """Return whether a service was busy or unreachable, or a database locked."""
    sources = (error, getattr(error, "response", None))
    names = ("status_code", "status")
    statuses = [getattr(source, name, None) for source in sources for name in names]
    if any(isinstance(status, int) and status in TRANSIENT_HTTP_STATUSES for status in statuses):
        return True
    if isinstance(error, getattr(sys.modules.get("sqlite3"), "OperationalError", ())):
        return "is locked" in str(error)
    classes = type(error).__mro__
    client_classes = [c for c in classes if c.__module__.partition(".")[0] in SERVICE_CLIENTS]
    if any(CONNECTION_ERROR_NAMES.search(cls.__name__) for cls in client_classes):
        return True
    code = getattr(error, "code", None) if client_classes else None
    return callable(code) and getattr(code(), "name", "") in TRANSIENT_GRPC_CODES


def _is_device_error(error: BaseException) -> bool:
    """Return whether PyTorch raised the error because of device memory, a device or a lost peer."""
    if isinstance(error, RuntimeError) and any(text in str(error) for text in TRANSIENT_TEXTS):
        return True
    torch = sys.modules.get("torch")
    return any(isinstance(error, cls) for cls in _torch_errors(torch))


def _torch_errors(torch: ModuleType | None) -> list[type]:
    """Return the classes of :data:`TRANSIENT_TORCH_ERRORS` in PyTorch; none before its import."""
    classes = []
    for name in TRANSIENT_TORCH_ERRORS:
        attribute: object = torch
        for part in name.split("."):
            attribute = getattr(attribute, part, None)
        if inspect.isclass(attribute):
            classes.append(attribute)
    return classes
