"""An error of the user's own code: whose it is, what is shown of it, and whether it may pass."""

from __future__ import annotations

import errno
import importlib
import itertools
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf.errors import (
    DataError,
    ResourceError,
    RlinfError,
    TransientUserCodeError,
    UserCodeError,
)
from rlinf.registry import import_user_attribute
from rlinf.user_code import to_user_code_error, translate_user_errors

NUMBERS = itertools.count()
SOURCE = """
import http.client
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from rlinf.errors import DataError, did_you_mean
from {helper} import Base


class Part(Base):
    def fail(self, error):
        raise error

    def fail_in_library(self):
        return did_you_mean(3, [1, 2])

    def fail_in_thread(self):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.fail, KeyError("answer")).result()

    def fail_after(self, first, error):
        try:
            raise first
        except Exception:
            raise error

    def leave(self, code):
        sys.exit(code)
"""
HELPER = """
class Base:
    def inherited(self):
        return {}["missing"]
"""


@pytest.fixture(params=["module", "package"])
def part(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """An object of a user's class, in a module of a folder or of a package."""
    name = f"own_part_{next(NUMBERS)}"
    folder = tmp_path
    if request.param == "package":
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    prefix = f"{name}." if request.param == "package" else ""
    module, helper = f"{name}_part", f"{name}_helper"
    (folder / f"{module}.py").write_text(SOURCE.format(helper=prefix + helper))
    (folder / f"{helper}.py").write_text(HELPER)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield import_user_attribute(prefix + module, "Part", "reward.name")()
    for loaded in [loaded for loaded in sys.modules if loaded.startswith(name)]:
        del sys.modules[loaded]


def caught(call: Any, *arguments: Any) -> RlinfError:
    """What the error of a call is reported as."""
    with pytest.raises(RlinfError) as found, translate_user_errors():
        call(*arguments)
    return found.value


def test_one_traceback_begins_at_the_users_line(part: Any) -> None:
    error = caught(part.fail, KeyError("answer"))
    assert isinstance(error, UserCodeError)
    assert error.exit_code == 65
    first, *lines = str(error).splitlines()
    assert first.startswith("reward.name: ")
    assert first.endswith(":Part raised KeyError: 'answer'")
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith("in fail")
    assert lines[-1] == "KeyError: 'answer'"
    assert str(error).count("Traceback") == 1
    assert error.__suppress_context__


def test_frames_of_the_product_are_kept_below_the_users_alone(part: Any) -> None:
    text = str(caught(part.fail_in_library))
    assert text.index("in fail_in_library") < text.index("errors.py")
    assert "test_user_code.py" not in text
    assert "in fail\n" in str(caught(part.fail_in_thread))


def test_an_inherited_method_of_another_module_is_the_users_too(part: Any) -> None:
    error = caught(part.inherited)
    assert ":Part raised KeyError: 'missing'" in str(error)
    assert "in inherited" in str(error)


def test_the_cause_is_one_line(part: Any) -> None:
    text = str(caught(part.fail_after, KeyError("x"), ValueError("no such row")))
    assert text.count("Traceback") == 1
    assert text.endswith("raised from KeyError: 'x'")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("peer"),
        TimeoutError(),
        OSError(errno.EIO, "input/output error"),
        OSError(errno.ESTALE, "stale file handle"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer"),
    ],
)
def test_what_may_pass_is_tried_again(part: Any, error: Exception) -> None:
    found = caught(part.fail, error)
    assert isinstance(found, TransientUserCodeError)
    assert found.exit_code == 1
    assert isinstance(caught(part.fail_after, error, RuntimeError("no")), TransientUserCodeError)


class Refused(Exception):
    """An error of a client that has the status of the answer."""

    def __init__(self, status: int, name: str = "status_code", nested: bool = False) -> None:
        super().__init__(f"status {status}")
        values = SimpleNamespace(**{name: status})
        self.__dict__ |= {"response": values} if nested else vars(values)


def of_client(module: str, *names: str) -> Exception:
    """An error as of an HTTP client: classes of these names, each the base of the next."""
    kind: type[Exception] = Exception
    for name in names:
        kind = type(name, (kind,), {"__module__": module})
    return kind("no answer")


def of_grpc(status: str) -> Exception:
    error = of_client("grpc._channel", "RpcError", "_InactiveRpcError")
    error.code = lambda: SimpleNamespace(name=status)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        *((Refused(status), True) for status in (408, 425, 429, 500, 503, 599)),
        *((Refused(status), False) for status in (400, 401, 404, 422)),
        (Refused(503, "status"), True),
        (Refused(503, nested=True), True),
        (Refused(404, nested=True), False),
        (of_client("httpx", "HTTPError", "NetworkError", "ReadError"), True),
        (of_client("httpcore", "ConnectTimeout"), True),
        (of_client("openai", "APIConnectionError"), True),
        (of_client("httpx", "InvalidURL"), False),
        (of_client("mylab.graphs", "ConnectivityError"), False),
        (of_grpc("UNAVAILABLE"), True),
        (of_grpc("INVALID_ARGUMENT"), False),
        (sqlite3.OperationalError("database is locked"), True),
        (sqlite3.OperationalError("no such table: rows"), False),
        (ExceptionGroup("some", [ConnectionResetError(), Refused(429)]), True),
        (ExceptionGroup("some", [ExceptionGroup("more", [TimeoutError()])]), True),
        (ExceptionGroup("some", [ConnectionResetError(), KeyError("x")]), False),
        (ExceptionGroup("some", [FileNotFoundError(errno.ENOENT, "no", "x")]), False),
    ],
    ids=repr,
)
def test_a_service_that_is_busy_or_out_of_reach_may_pass(
    part: Any, error: Exception, passes: bool
) -> None:
    kind = TransientUserCodeError if passes else UserCodeError
    assert isinstance(caught(part.fail, error), kind)
    assert isinstance(caught(part.fail_after, error, RuntimeError("no")), kind)


def test_errors_of_installed_clients_are_known(part: Any) -> None:
    httpx = pytest.importorskip("httpx")
    request = httpx.Request("GET", "http://judge")
    for status, kind in ((503, TransientUserCodeError), (404, UserCodeError)):
        error = httpx.HTTPStatusError("x", request=request, response=httpx.Response(status))
        assert isinstance(caught(part.fail, error), kind)
    assert isinstance(caught(part.fail, httpx.ReadTimeout("x")), TransientUserCodeError)


def test_memory_of_a_device_may_pass(part: Any) -> None:
    torch = pytest.importorskip("torch")
    error = torch.OutOfMemoryError("out of memory")
    assert isinstance(caught(part.fail, error), TransientUserCodeError)


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "no", "x"), PermissionError(), ValueError("x" * 9)]
)
def test_what_another_try_would_meet_again_is_not(part: Any, error: Exception) -> None:
    assert isinstance(caught(part.fail, error), UserCodeError)


def test_what_was_raised_on_purpose_stays(part: Any) -> None:
    assert isinstance(caught(part.fail, DataError("rows.jsonl: line 3")), DataError)
    full = OSError(errno.ENOSPC, "No space left on device")
    assert to_user_code_error(full) is None
    for error in (MemoryError(), full, KeyboardInterrupt()):
        with pytest.raises(type(error)), translate_user_errors():
            part.fail(error)


def test_code_that_ends_the_process_is_an_error_and_a_signal_is_not(part: Any) -> None:
    assert "raised SystemExit: 0" in str(caught(part.leave, 0))
    with pytest.raises(SystemExit), translate_user_errors():
        sys.exit(75)


def test_an_error_of_others_is_not_the_users(part: Any) -> None:
    with pytest.raises(KeyError), translate_user_errors():
        raise KeyError("ours")
    assert to_user_code_error(ResourceError("no files")) is None
