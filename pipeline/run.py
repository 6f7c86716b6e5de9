"""The run directory and ``run.json``: frozen configuration, effective settings, provenance."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from socket import gethostname
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from pipeline.lock import LOCK_FILE, RunLock
from pipeline.resources import ClusterConfig
from rlinf import __version__, package_paths
from rlinf.artifacts import Manifest, write_atomic
from rlinf.config import RunConfig, json_digest, select_semantic, validate
from rlinf.envs.base import ProblemSetSize
from rlinf.errors import ConfigError, InputError
from rlinf.track import LogConfig
from stages.context import COMPUTE
from stages.identity import CLASS_REGISTRIES, read_accepted_mismatches
from stages.layout import CONFIG_FILE, DATA_FILE, RUN_FILE
from stages.runner import load_config, read_config_values

_PROBLEM_SETS = TypeAdapter(list[ProblemSetSize])


@dataclass(frozen=True)
class Run:
    """An existing run directory and its frozen configuration."""

    folder: Path
    config: RunConfig

    @classmethod
    def open(cls, folder: Path) -> Run:
        """Open an existing run.

        Raises:
            ConfigError: not a run directory, or its configuration cannot be read.
        """
        folder = folder.expanduser().absolute()
        return cls(folder, load_config(folder / CONFIG_FILE))

    @contextlib.contextmanager
    def lock(self) -> Iterator[RunLock]:
        """Own the run as its only driver.

        Another process may replace an owner that is dead (:mod:`pipeline.lock`).

        Raises:
            RunLockedError: another driver owns the run.
        """
        lock = RunLock(self.folder / LOCK_FILE)
        try:
            yield lock
        finally:
            lock.release()


@contextlib.contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Turn write errors in a run directory into an error that names ``run.root``.

    Raises:
        InputError: an ``OSError`` was raised within.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"run.root: cannot write {error.filename or folder}: {error.strerror}; "
            "choose another run.root"
        ) from None


PACKAGES = ("torch", "transformers", "numpy")
"""Packages whose versions are recorded in ``run.json``."""
GIT_TIMEOUT_S = 5.0
MAX_NAMES = 4
"""Maximum number of hosts, and of Slurm jobs, that the report lists."""


class RunRecord(BaseModel):
    """The content of ``run.json``. Trackers identify the run by ``id``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    id: str
    """Digest of the keys that change results, with which the run was created. It never changes."""
    created: str
    """Local time, ISO 8601."""
    version: str
    """Version of rlinf that created the run."""
    config: dict[str, Any] | None = None
    """The keys of ``config.yaml`` that change results (``select_semantic``), as frozen. None in old
    runs, which have only :attr:`id`."""
    config_digest: str | None = None
    """Digest of ``config``."""
    host: str = ""
    versions: dict[str, str] = {}
    commit: str = ""
    """Host, versions and commit of the process that created the run
    (:func:`collect_provenance`)."""
    accepted_mismatches: tuple[str, ...] = ()
    """One ``time: differences`` for each ``--keep`` that accepted results of another configuration
    or code."""
    checksum: str | None = None
    """Digest of all other fields."""
    settings: dict[str, Any] | None = None
    """All effective settings by section, defaults included (:func:`effective_settings`). They are
    for readers only and not part of any identity."""
    non_default: tuple[str, ...] | None = None
    """Dotted keys of ``settings`` whose values are not the defaults."""
    derived: tuple[str, ...] | None = None
    """Keys of ``config`` whose values the program chose, not the user."""
    previous_digest: str | None = None
    """Digest of ``config`` before its last change. Because ``config.yaml`` is rewritten after this
    record, it may still have the old content."""


def read_run_record(folder: Path) -> RunRecord | None:
    """Read the record of a run; returns None if there is none.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / RUN_FILE
    try:
        record = RunRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValidationError, OSError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise _damage_error(path, problem) from None
    if record.config is not None and record.checksum != _checksum(record):
        raise _damage_error(path, "its own checksum differs")
    return record


def is_record_complete(folder: Path) -> bool:
    """Return whether the record exists, is intact, and has all fields that this version writes."""
    try:
        record = read_run_record(folder)
    except ConfigError:
        return False
    return record is not None and record.config is not None and record.settings is not None


def write_run_record(
    folder: Path,
    config: Mapping[str, Any],
    previous_digest: str | None = None,
    derived_keys: Sequence[str] | None = None,
) -> None:
    """Write the frozen configuration and all effective settings to ``run.json``.

    Args:
        config: all values of ``config.yaml``, which is written or about to be written.
        previous_digest: digest of the present ``config.yaml``, if the caller replaces it next.
        derived_keys: keys whose values the program chose. None keeps those of the previous record.

    Raises:
        ConfigError: a component is unknown or rejects a key. Nothing was written.
    """
    frozen = select_semantic(config)
    try:
        previous = read_run_record(folder)
    except ConfigError:
        previous = None
    if previous is None:
        previous = RunRecord(
            name=folder.name,
            id=json_digest(frozen),
            created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            version=__version__,
            **collect_provenance(),
        )
    entries = read_accepted_mismatches(folder).entries
    settings, non_default = effective_settings(validate(RunConfig, config))
    update = {
        "config": frozen,
        "config_digest": json_digest(frozen),
        "previous_digest": previous_digest,
        "accepted_mismatches": tuple(
            f"{e.recorded_at}: {'; '.join(e.differences)}" for e in entries
        ),
        "settings": settings,
        "non_default": non_default,
    }
    if derived_keys is not None:
        update["derived"] = tuple(derived_keys)
    record = previous.model_copy(update=update)
    record = record.model_copy(update={"checksum": _checksum(record)})
    write_atomic(folder / RUN_FILE, json.dumps(record.model_dump(exclude_none=True), indent=1))


def write_problem_sets(folder: Path, sets: Sequence[ProblemSetSize]) -> None:
    """Write the sizes of the sets of problems to ``data.json``, if there are any."""
    if sets:
        write_atomic(folder / DATA_FILE, json.dumps([asdict(part) for part in sets], indent=1))


def read_problem_sets(folder: Path) -> list[ProblemSetSize]:
    """Read the sizes of the sets of problems of a run; empty if none were recorded.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / DATA_FILE
    try:
        return _PROBLEM_SETS.validate_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except ValidationError as error:
        raise _damage_error(path, error.errors()[0]["msg"]) from None


def config_edits(folder: Path) -> list[str]:
    """Return edits of ``config.yaml``, in keys that change results: ``key: frozen -> current``.

    Raises:
        ConfigError: the file cannot be read.
    """
    current = select_semantic(read_config_values(folder / CONFIG_FILE))
    try:
        record = read_run_record(folder)
    except ConfigError as error:
        return [str(error)]
    if record is None:
        return []
    if record.config is None:
        is_unchanged = json_digest(current) == record.id
        return [] if is_unchanged else [f"{CONFIG_FILE}: edited since it was frozen"]
    if json_digest(current) in (record.config_digest, record.previous_digest):
        return []
    return [f"{CONFIG_FILE}: {change}" for change in config_differences(record.config, current)]


def config_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> list[str]:
    """Return ``key: old -> new`` for every dotted key whose values differ, sorted."""
    changes = []
    for key in sorted(old.keys() | new.keys()):
        old_value, new_value = old.get(key), new.get(key)
        name = f"{prefix}{key}"
        if isinstance(old_value, Mapping) and isinstance(new_value, Mapping):
            changes += config_differences(old_value, new_value, f"{name}.")
        elif old_value != new_value:
            changes.append(f"{name}: {_format(old_value)} -> {_format(new_value)}")
    return changes


def _checksum(record: RunRecord) -> str:
    return json_digest(record.model_dump(mode="json", exclude={"checksum"}, exclude_none=True))


def _format(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _damage_error(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{path}: damaged ({problem})")


def effective_settings(config: RunConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return all settings of a run by section, and the dotted keys that differ from their defaults.

    The component that a section names (an algorithm, a trainer, ...) validates the section, so
    keys and defaults come from the component's ``Config`` class. Values are plain JSON values.

    Raises:
        ConfigError: a component is unknown or rejects a key.
    """
    components: dict[str, BaseModel] = {
        section: getattr(config, section).validate_options(
            registry.get(getattr(config, section).name).Config, section
        )
        for section, registry in CLASS_REGISTRIES.items()
    }
    components["cluster"] = validate(ClusterConfig, config.cluster, "cluster")
    components["log"] = validate(LogConfig, config.log, "log")
    settings, default_settings = _dump(config), _defaults(type(config))
    for section, options in components.items():
        name = getattr(getattr(config, section), "name", None)
        selected = {} if name is None else {"name": name}
        settings[section] = selected | _dump(options)
        default_settings[section] = _defaults(type(options))
    defaults = dict(flatten(default_settings))
    non_default = [
        key for key, value in flatten(settings) if key not in defaults or value != defaults[key]
    ]
    return settings, tuple(non_default)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every leaf; an empty table is a leaf."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _defaults(section: type[BaseModel]) -> dict[str, Any]:
    """Return the defaults of a section, without the keys that have none."""
    return _dump(section.model_construct())


def _dump(section: BaseModel) -> dict[str, Any]:
    plain: dict[str, Any] = _finite(section.model_dump(mode="json", warnings=False))
    return plain


def _finite(value: Any) -> Any:
    """Return the value with ``inf`` and ``nan`` as text, because JSON has neither."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def collect_provenance() -> dict[str, Any]:
    """Return host, package versions and commit of this process, for ``run.json``."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version_of(package)
        except PackageNotFoundError:
            continue
    return {"host": gethostname(), "versions": versions, "commit": _commit()}


def _commit() -> str:
    """Return the commit of the checkout (``-dirty`` if modified), or an empty text without one."""
    if not (package_paths.ROOT / ".git").exists():
        return ""
    try:
        command = ["git", "-C", str(package_paths.ROOT), "describe", "--always", "--dirty"]
        process = subprocess.run(
            [*command, "--abbrev=12"],
            capture_output=True,
            text=True,
            check=True,
            timeout=GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout.strip()


def provenance_rows(
    record: dict[str, Any], seed: int, manifests: Sequence[Manifest]
) -> list[tuple[str, str]]:
    """Return labels and values for the report; values that the run did not record are left out.

    Args:
        record: content of ``run.json``.
        seed: seed of the run.
        manifests: manifests of committed outputs, from which hosts and Slurm jobs are collected.
    """
    versions = record.get("versions", {})
    rows = {
        "started": str(record.get("created", "")),
        "started on": str(record.get("host", "")),
        "seed": str(seed),
        "run id": str(record.get("id", "")),
        "rlinf": str(record.get("version", "")),
        "commit": str(record.get("commit", "")),
        "accepted mismatches": "; ".join(record.get("accepted_mismatches", ())),
        **{name: str(version) for name, version in versions.items()},
    }
    if __version__ != rows["rlinf"]:
        rows["report made by rlinf"] = __version__
    hosts, jobs = dict[str, None](), dict[str, None]()
    for manifest in manifests:
        hosts[manifest.host] = None
        if manifest.job:
            jobs[manifest.job] = None
    rows |= {f"{part} computes in": text for part, text in compute_texts(manifests).items()}
    rows |= {"hosts": _shorten(hosts), "Slurm jobs": _shorten(jobs)}
    return [(label, value) for label, value in rows.items() if value]


def compute_texts(manifests: Iterable[Manifest]) -> dict[str, str]:
    """Return data types and devices of engine and trainer, such as ``bfloat16 on NVIDIA H100``."""
    texts: dict[str, dict[str, None]] = {}
    for manifest in manifests:
        for part, values in manifest.extra.get(COMPUTE, {}).items():
            texts.setdefault(part, {})[f"{values['dtype']} on {values['device']}"] = None
    return {part: _shorten(found) for part, found in sorted(texts.items())}


def _shorten(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
