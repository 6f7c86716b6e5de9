"""``run.json``: what a run's configuration was frozen as, to notice when its file is edited."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from socket import gethostname
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.job_executor import ClusterConfig
from rlinf import __version__, package_paths
from rlinf.artifacts import Manifest, write_atomic
from rlinf.config import RunConfig, json_digest, select_semantic, validate
from rlinf.errors import ConfigError
from rlinf.track import LogConfig
from stages.identity import CLASS_REGISTRIES, read_ledger
from stages.layout import CONFIG_FILE, RUN_FILE
from stages.runner import read_config_values


def effective_settings(config: RunConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return all settings of a run by section, and the dotted keys that differ from their defaults.

    The part that a section names (an algorithm, a trainer, ...) validates the keys of the section,
    so keys and defaults are those of its ``Config`` class. Values are plain JSON values.

    Raises:
        ConfigError: a part is unknown or refuses a key.
    """
    parts: dict[str, BaseModel] = {
        section: getattr(config, section).validate_options(
            registry.get(getattr(config, section).name).Config, section
        )
        for section, registry in CLASS_REGISTRIES.items()
    }
    parts["cluster"] = validate(ClusterConfig, config.cluster, "cluster")
    parts["log"] = validate(LogConfig, config.log, "log")
    whole, usual = _dump(config), _defaults(type(config))
    for section, options in parts.items():
        name = getattr(getattr(config, section), "name", None)
        own = {} if name is None else {"name": name}
        whole[section] = own | _dump(options)
        usual[section] = _defaults(type(options))
    defaults = dict(flatten(usual))
    changed = [
        key for key, value in flatten(whole) if key not in defaults or value != defaults[key]
    ]
    return whole, tuple(changed)


def flatten(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every leaf; an empty table is a leaf."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _defaults(section: type[BaseModel]) -> dict[str, Any]:
    """The defaults of a section; keys without one are left out."""
    return _dump(section.model_construct())


def _dump(section: BaseModel) -> dict[str, Any]:
    plain: dict[str, Any] = _finite(section.model_dump(mode="json", warnings=False))
    return plain


def _finite(value: Any) -> Any:
    """The same, with ``inf`` and ``nan`` as text, which JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


PACKAGES = ("torch", "transformers", "numpy")
GIT_TIMEOUT_S = 5.0
MAX_NAMES = 4


def collect_provenance() -> dict[str, Any]:
    """What ``run.json`` says of the process that made the run, besides name and identity."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version_of(package)
        except PackageNotFoundError:
            continue
    return {"host": gethostname(), "versions": versions, "commit": _commit()}


def _commit() -> str:
    """Of the checkout, with ``-dirty`` where it was changed; empty without one."""
    if not (package_paths.ROOT / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            [
                "git",
                "-C",
                str(package_paths.ROOT),
                "describe",
                "--always",
                "--dirty",
                "--abbrev=12",
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def provenance_rows(
    about: dict[str, Any], seed: int, manifests: Iterable[Manifest]
) -> list[tuple[str, str]]:
    """Labels and values for a person; what a run of an earlier version did not record is left out.

    Args:
        about: the content of ``run.json``.
    """
    versions = about.get("versions", {})
    found = {
        "started": str(about.get("created", "")),
        "started on": str(about.get("host", "")),
        "seed": str(seed),
        "identity": str(about.get("id", "")),
        "rlinf": str(about.get("version", "")),
        "commit": str(about.get("commit", "")),
        "kept though different": "; ".join(about.get("accepted_mismatches", ())),
        **{name: str(version) for name, version in versions.items()},
    }
    if __version__ != found["rlinf"]:
        found["report made by rlinf"] = __version__
    hosts, jobs = dict[str, None](), dict[str, None]()
    for manifest in manifests:
        hosts[manifest.host] = None
        if manifest.job:
            jobs[manifest.job] = None
    found |= {"hosts": _some(hosts), "Slurm jobs": _some(jobs)}
    return [(label, value) for label, value in found.items() if value]


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


class RunRecord(BaseModel):
    """The file. Trackers know the run by its first ``id``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    id: str
    """Digest of the semantic configuration at the first start; never changes."""
    created: str
    version: str
    config: dict[str, Any] | None = None
    """What of ``config.yaml`` changes results, as it is to be; runs of old programs have only the
    digest."""
    config_digest: str | None = None
    """Digest of ``config``."""
    host: str = ""
    versions: dict[str, str] = {}
    commit: str = ""
    """Where and with what the run was begun; see :func:`pipeline.run_record.collect_provenance`."""
    accepted_mismatches: tuple[str, ...] = ()
    """When and why results were kept though something differs; see ``kept.json``."""
    checksum: str | None = None
    """Digest of all the rest."""
    settings: dict[str, Any] | None = None
    """All effective settings by section, defaults included (:func:`effective_settings`). They are
    for people, and no part of any identity."""
    non_default: tuple[str, ...] | None = None
    """Dotted keys of ``settings`` whose values are not the defaults."""
    derived: tuple[str, ...] | None = None
    """Keys of ``config`` that nobody gave: the program chose their values at the first start."""
    previous_digest: str | None = None
    """That of ``config.yaml`` while it is being replaced."""


def read_run_record(folder: Path) -> RunRecord | None:
    """The record of a run; None when there is none.

    Raises:
        ConfigError: damaged.
    """
    path = folder / RUN_FILE
    try:
        record = RunRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValidationError, OSError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise _damaged(path, problem) from None
    if record.config is not None and record.checksum != _seal(record):
        raise _damaged(path, "its own checksum differs")
    return record


def is_record_complete(folder: Path) -> bool:
    """Whether the record is there, whole, and has all that this program writes."""
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
    """Note what ``config.yaml`` is, or is about to be, and all settings that are in effect.

    Args:
        config: all its values.
        was: digest of what it is now, if it is replaced next.
        derived: keys whose values the program chose; those noted before by default.

    Raises:
        ConfigError: a part is unknown or refuses a key; nothing was written.
    """
    kept = select_semantic(config)
    try:
        known = read_run_record(folder)
    except ConfigError:
        known = None
    if known is None:
        known = RunRecord(
            name=folder.name,
            id=json_digest(kept),
            created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            version=__version__,
            **collect_provenance(),
        )
    why = tuple(f"{e.recorded_at}: {'; '.join(e.differences)}" for e in read_ledger(folder).entries)
    settings, changed = effective_settings(validate(RunConfig, config))
    news = {
        **{
            "config": kept,
            "config_digest": json_digest(kept),
            "previous_digest": previous_digest,
            "accepted_mismatches": why,
        },
        **{"settings": settings, "non_default": changed},
    }
    if derived_keys is not None:
        news["derived"] = tuple(derived_keys)
    record = known.model_copy(update=news)
    record = record.model_copy(update={"checksum": _seal(record)})
    write_atomic(folder / RUN_FILE, json.dumps(record.model_dump(exclude_none=True), indent=1))


def config_edits(folder: Path) -> list[str]:
    """How ``config.yaml`` differs from what it was frozen as; keys that never matter aside.

    Raises:
        ConfigError: it cannot be read.
    """
    now = select_semantic(read_config_values(folder / CONFIG_FILE))
    try:
        record = read_run_record(folder)
    except ConfigError as error:
        return [str(error)]
    if record is None:
        return []
    if record.config is None:
        same = json_digest(now) == record.id
        return [] if same else [f"{CONFIG_FILE}: edited since it was frozen"]
    if json_digest(now) in (record.config_digest, record.previous_digest):
        return []
    return [f"{CONFIG_FILE}: {change}" for change in config_differences(record.config, now)]


def config_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], where: str = ""
) -> list[str]:
    """``key: old -> new`` of every dotted key whose values differ, sorted."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        name = f"{where}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += config_differences(a, b, f"{name}.")
        elif a != b:
            found.append(f"{name}: {_shown(a)} -> {_shown(b)}")
    return found


def _seal(record: RunRecord) -> str:
    return json_digest(record.model_dump(mode="json", exclude={"checksum"}, exclude_none=True))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{path}: damaged ({problem})")
