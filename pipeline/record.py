"""``run.json``: what a run's configuration was frozen as, to notice when its file is edited."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.facts import made_with
from pipeline.settings import settings_in_effect
from rlinf import __version__
from rlinf.artifacts import write_atomic
from rlinf.config import RunConfig, digest, semantic, validate
from rlinf.errors import ConfigError
from stages.identity import read_ledger
from stages.layout import CONFIG, RUN
from stages.runner import read_config


class Record(BaseModel):
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
    frozen: str | None = None
    """Digest of ``config``."""
    host: str = ""
    versions: dict[str, str] = {}
    commit: str = ""
    """Where and with what the run was begun; see :func:`pipeline.facts.made_with`."""
    kept: tuple[str, ...] = ()
    """When and why results were kept though something differs; see ``kept.json``."""
    seal: str | None = None
    """Digest of all the rest."""
    settings: dict[str, Any] | None = None
    """All settings in effect by section, defaults included; see :mod:`pipeline.settings`. They are
    for people, and no part of any identity."""
    changed: tuple[str, ...] | None = None
    """Dotted keys of ``settings`` whose values are not the defaults."""
    derived: tuple[str, ...] | None = None
    """Keys of ``config`` that nobody gave: the program chose their values at the first start."""
    was: str | None = None
    """That of ``config.yaml`` while it is being replaced."""


def read_record(folder: Path) -> Record | None:
    """The record of a run; None when there is none.

    Raises:
        ConfigError: damaged.
    """
    path = folder / RUN
    try:
        record = Record.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValidationError, OSError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise _damaged(path, problem) from None
    if record.config is not None and record.seal != _seal(record):
        raise _damaged(path, "its own checksum differs")
    return record


def recorded(folder: Path) -> bool:
    """Whether the record is there, whole, and has all that this program writes."""
    try:
        record = read_record(folder)
    except ConfigError:
        return False
    return record is not None and record.config is not None and record.settings is not None


def write_record(
    folder: Path,
    config: Mapping[str, Any],
    was: str | None = None,
    derived: Sequence[str] | None = None,
) -> None:
    """Note what ``config.yaml`` is, or is about to be, and all settings that are in effect.

    Args:
        config: all its values.
        was: digest of what it is now, if it is replaced next.
        derived: keys whose values the program chose; those noted before by default.

    Raises:
        ConfigError: a part is unknown or refuses a key; nothing was written.
    """
    kept = semantic(config)
    try:
        known = read_record(folder)
    except ConfigError:
        known = None
    if known is None:
        known = Record(
            name=folder.name,
            id=digest(kept),
            created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            version=__version__,
            **made_with(),
        )
    why = tuple(f"{e.when}: {'; '.join(e.why)}" for e in read_ledger(folder).kept)
    settings, changed = settings_in_effect(validate(RunConfig, config))
    news = {
        **{"config": kept, "frozen": digest(kept), "was": was, "kept": why},
        **{"settings": settings, "changed": changed},
    }
    if derived is not None:
        news["derived"] = tuple(derived)
    record = known.model_copy(update=news)
    record = record.model_copy(update={"seal": _seal(record)})
    write_atomic(folder / RUN, json.dumps(record.model_dump(exclude_none=True), indent=1))


def edited(folder: Path) -> list[str]:
    """How ``config.yaml`` differs from what it was frozen as; keys that never matter aside.

    Raises:
        ConfigError: it cannot be read.
    """
    now = semantic(read_config(folder / CONFIG))
    try:
        record = read_record(folder)
    except ConfigError as error:
        return [str(error)]
    if record is None:
        return []
    if record.config is None:
        same = digest(now) == record.id
        return [] if same else [f"{CONFIG}: edited since it was frozen"]
    if digest(now) in (record.frozen, record.was):
        return []
    return [f"{CONFIG}: {change}" for change in differences(record.config, now)]


def differences(old: Mapping[str, Any], new: Mapping[str, Any], where: str = "") -> list[str]:
    """``key: old -> new`` of every dotted key whose values differ, sorted."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        name = f"{where}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{name}.")
        elif a != b:
            found.append(f"{name}: {_shown(a)} -> {_shown(b)}")
    return found


def _seal(record: Record) -> str:
    return digest(record.model_dump(mode="json", exclude={"seal"}, exclude_none=True))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{path}: damaged ({problem})")
