"""The settings in effect: every key of a configuration, with its default where nobody gave it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from pipeline.launch import ClusterConfig
from rlinf.config import RunConfig, validate
from rlinf.track import LogConfig
from stages.code import REGISTRIES


def settings_in_effect(config: RunConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return all settings of a run by section, and the dotted keys that differ from their defaults.

    The part that a section names (an algorithm, a trainer, ...) validates the keys of the section,
    so keys and defaults are those of its ``Config`` class. Values are plain JSON values.

    Raises:
        ConfigError: a part is unknown or refuses a key.
    """
    parts: dict[str, BaseModel] = {
        section: getattr(config, section).options(
            registry.get(getattr(config, section).name).Config, section
        )
        for section, registry in REGISTRIES.items()
    }
    parts["cluster"] = validate(ClusterConfig, config.cluster, "cluster")
    parts["log"] = validate(LogConfig, config.log, "log")
    whole, usual = _dump(config), _defaults(type(config))
    for section, options in parts.items():
        name = getattr(getattr(config, section), "name", None)
        own = {} if name is None else {"name": name}
        whole[section] = own | _dump(options)
        usual[section] = _defaults(type(options))
    defaults = dict(flat(usual))
    changed = [key for key, value in flat(whole) if key not in defaults or value != defaults[key]]
    return whole, tuple(changed)


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every leaf; an empty table is a leaf."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{key}.")
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
