"""Errors that a user can meet, each with the exit code of its process.

Exit codes are a contract between a stage and its launcher: 0 done, 75 requeue, 65 bad input or
an error of the user's own code (never retried), 66 an input artifact is damaged (rebuild it), 70 no
progress (retried). Processes with any other exit code are retried as configured.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import shutil
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

NO_SPACE = (
    "no space left on the disk of the run; incomplete output is ignored. "
    "Free some space (or lower checkpoint.keep_last) and resume"
)
READ_ONLY = (
    "its filesystem is read-only, often after a fault of its disk or server; what was committed "
    "is complete. Make it writable and resume"
)
FILE_TOO_LARGE = (
    "a file reached the largest size that this process may write (ulimit -f, or RLIMIT_FSIZE of "
    "the job); incomplete output is ignored. Raise that limit and resume"
)
NO_FILES = (
    "no more files can be opened: this process or its node is at the limit (ulimit -n, or "
    "fs.file-max for all processes). Raise the limit, or end processes with open files, and resume"
)
NO_MEMORY = (
    "no memory left: the node, its cgroup or a limit (ulimit -v) is exhausted. Give this process "
    "more (mem_mb in the plan) or compute less at once (rollout.batch_size, more minibatches), "
    "and resume"
)
TRACEBACK = "Traceback (most recent call last):"
MIN_FREE_BYTES = 1 << 19
"""A disk with less free space counts as full."""
EXIT_BAD_INPUT = 65
EXIT_BAD_ARTIFACT = 66
EXIT_NO_PROGRESS = 70
EXIT_REQUEUE = 75
EXIT_INTERRUPTED = 130
"""Exit code that a shell reports for a program ended by an interrupt."""


class RlinfError(Exception):
    """Base of all errors raised on purpose; the message says what, where and how to fix it."""

    exit_code = 1


class InputError(RlinfError):
    """The user's input cannot be used; nothing was written."""

    exit_code = EXIT_BAD_INPUT


class ConfigError(InputError):
    """A configuration key is unknown, of the wrong type, or incompatible with another key."""


class DataError(InputError):
    """A data, tokenizer or model file is missing or malformed."""


class PlanError(InputError):
    """The plan requests something that the cluster or the stage does not have."""


class ResourceError(InputError):
    """A limit of the node or process is reached; retrying cannot help, raising the limit can."""


class StorageError(ResourceError):
    """The disk is full or read-only, the quota is used up, or a file is too large."""


class CodeIdentityError(InputError):
    """The code behind a result cannot be identified, or differs from that of the run."""


class MismatchError(InputError):
    """Results of a run come from a configuration or code other than the current one."""


class ConflictingOutputError(InputError):
    """The committed output comes from another configuration or other code; it is not replaced."""


class RunLockedError(InputError):
    """Another driver owns the run."""


class MissingPackageError(InputError):
    """An optional package is not installed; the message names the extra to install."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed; "
            f"install it with: pip install 'rlinf-slurm[{extra}]'"
        )


def require_package(package: str, extra: str, purpose: str) -> None:
    """Check that an optional package is installed, without importing it.

    Raises:
        MissingPackageError: the package is not installed.
    """
    spec = importlib.util.find_spec(package)
    # Namespace packages have no origin. One in the working directory is merely a folder of that
    # name; one elsewhere is a package of several distributions (megatron).
    if spec is None or (
        spec.origin is None
        and all(Path(p).parent == Path.cwd() for p in spec.submodule_search_locations or ())
    ):
        raise MissingPackageError(package, extra, purpose)


class ArtifactError(RlinfError):
    """A committed artifact is missing, truncated or altered on disk.

    ``manifest`` is the manifest of the damaged artifact, so that its stage can be run again;
    ``data`` names its data folder, if known, because another attempt may have committed since.
    """

    exit_code = EXIT_BAD_ARTIFACT

    def __init__(self, message: str, manifest: Path, data: str | None = None) -> None:
        super().__init__(message)
        self.manifest, self.data = manifest, data


class WeightTransferError(RlinfError):
    """Weights arrived incomplete or do not match the network; none of them are used."""


class StageError(RlinfError):
    """A stage failed for a reason that is neither bad input nor damage (for example a NaN loss)."""


class NoProgressError(StageError):
    """A stage was alive but completed no step until its deadline. It is retried."""

    exit_code = EXIT_NO_PROGRESS


class UserCodeError(InputError):
    """User code raised an error; the message has the traceback from the user's line on.

    It is not retried, because another attempt would raise the same error.
    """


class TransientUserCodeError(StageError):
    """User code raised an error that may pass: a connection, device memory, a lost process."""


class SlurmError(RlinfError):
    """Slurm rejected a request or failed; the message is Slurm's own."""


class SlurmUnresponsiveError(SlurmError):
    """Slurm did not answer, for example while its controller restarts. The request may have
    succeeded."""


class RequeueRequested(RlinfError):
    """The allocation is about to end; the stage stored its work so that it can resume."""

    exit_code = EXIT_REQUEUE


class InterruptedByUser(RlinfError):
    """The user ended the driver by Ctrl-C; committed work stays."""

    exit_code = EXIT_INTERRUPTED


class RunStopped(RlinfError):
    """``rlinf stop`` ended the run; it can be resumed."""


class UpstreamFailed(RlinfError):
    """The producer of the awaited input will not send it; run the stage again."""

    exit_code = EXIT_REQUEUE


_RESOURCE_MESSAGES = {
    errno.ENOSPC: NO_SPACE,
    errno.EDQUOT: NO_SPACE,
    errno.EROFS: READ_ONLY,
    errno.EFBIG: FILE_TOO_LARGE,
    errno.EMFILE: NO_FILES,
    errno.ENFILE: NO_FILES,
    errno.ENOMEM: NO_MEMORY,
}
_MAP_FAILED = "failed to map segment from shared object"
"""Message of the dynamic loader if there is not enough memory for a library."""
_STORAGE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})


def to_resource_error(error: BaseException, folder: Path | None = None) -> ResourceError | None:
    """Return the error to show if ``error`` came from a full disk or an exhausted limit, else None.

    Libraries wrap the system's error, only quote it, or fail later because data was not written.
    Therefore this also checks the text, and whether ``folder`` has free space.
    """
    has_folder = folder is not None and folder.exists()
    if has_folder and shutil.disk_usage(folder or ".").free < MIN_FREE_BYTES:
        return StorageError(NO_SPACE)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ResourceError):
            return cause
        if isinstance(cause, MemoryError):
            return ResourceError(NO_MEMORY)
        text = str(cause)
        for code, message in _RESOURCE_MESSAGES.items():
            has_errno = isinstance(cause, OSError) and cause.errno == code
            if has_errno or os.strerror(code) in text:
                path = getattr(cause, "filename", None)
                location = f"{path}: " if isinstance(path, str) else ""
                if code in _STORAGE_ERRNOS:
                    return StorageError(location + message)
                return ResourceError(message)
        # With EPERM, a permission is missing (as on a noexec mount), not memory.
        map_failed = _MAP_FAILED in text and os.strerror(errno.EPERM) not in text
        if map_failed or "std::bad_alloc" in text:
            return ResourceError(NO_MEMORY)
        cause = cause.__cause__ or cause.__context__
    return None


@contextlib.contextmanager
def translate_resource_errors() -> Iterator[None]:
    """Replace errors that :func:`to_resource_error` recognises by its result."""
    try:
        yield
    except Exception as error:
        exhausted = None if isinstance(error, RlinfError) else to_resource_error(error)
        if exhausted is not None:
            raise exhausted from error
        raise


@contextlib.contextmanager
def name_key_in_memory_errors(key: str) -> Iterator[None]:
    """Add the configuration key to errors about exhausted memory.

    Raises:
        ResourceError: the file or settings under ``key`` need more memory than there is.
    """
    try:
        yield
    except MemoryError as error:
        raise ResourceError(f"{key}: while it was read: {NO_MEMORY}") from error


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return a hint for a misspelt name: ``"; did you mean 'lr'?"``, or the list of valid names."""
    names = sorted(valid)
    matches = get_close_matches(name, names, n=1)
    if matches:
        return f"; did you mean {matches[0]!r}?"
    return f"; valid: {', '.join(names)}" if names else ""


def short_reason(reason: str) -> str:
    """Return a failure's reason without its traceback, or the last line of the traceback."""
    prefix, separator, _ = reason.partition(TRACEBACK)
    prefix = prefix.strip()
    if not separator:
        return reason
    return (
        prefix
        if prefix and not prefix.endswith(":")
        else f"{prefix} {exception_line(reason)}".strip()
    )


def exception_line(traceback: str) -> str:
    """Return the last line of a traceback, which names the exception."""
    return traceback.strip().splitlines()[-1]
