"""Overrides in Hydra's syntax, and Hydra's errors as short configuration errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf import package_paths
from rlinf.errors import ConfigError
from rlinf.renamed_keys import component_hint

MISSING_VALUES = {
    "model.path": (
        "FOLDER",
        "; FOLDER is a local checkpoint in the Hugging Face format, with config.json, tokenizer "
        "and *.safetensors",
    ),
    "task.train": ("FILE", "; FILE has one training problem per line (docs/howto/data.md)"),
    "task.test": ("FILE", "; FILE has one test problem per line (docs/howto/data.md)"),
}
"""Placeholder and explanation of keys that have no default, for the error if they are missing."""


def to_config_error(error: Exception) -> ConfigError:
    """Return the error to show for an error of Hydra or OmegaConf in composing a configuration."""
    from hydra.errors import MissingConfigException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if group and error.options:
            return ConfigError(
                f"{group}={name}: no such {group}{component_hint(group, name, error.options)}"
            )
        return ConfigError(f"{error.missing_cfg_file}: no such configuration file")
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    key = getattr(cause, "full_key", None)
    if isinstance(cause, MissingMandatoryValue) and key:
        value, meaning = MISSING_VALUES.get(key, ("...", ""))
        return ConfigError(f"{key}: must be given; add {key}={value} to the command line{meaning}")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(line for line in lines if not line.startswith(("See http", "object_type")))
    override = getattr(error, "override", None)
    if isinstance(override, str) and override not in text:
        text = f"{override.lstrip('+')}: {text}"
    return ConfigError(text[:400] or type(error).__name__)


def force_add(word: str) -> str:
    """Return ``a.b=1`` as ``++a.b=1``, which Hydra accepts whether or not the key is in a file.

    Raises:
        ConfigError: a group is set to nothing, so Hydra would ignore it.
    """
    key, separator, value = word.partition("=")
    is_plain_key = re.fullmatch(r"[a-z_]\w*(\.\w+)*", key) is not None
    is_group = (package_paths.ROOT / "configs" / key).is_dir()
    if is_group and separator and value.strip() in ("", "[]", "{}", "null"):
        names = sorted(path.stem for path in (package_paths.ROOT / "configs" / key).glob("*.yaml"))
        raise ConfigError(f"{word}: expected a name; valid: {', '.join(names)}")
    is_config_key = is_plain_key and not is_group and key.split(".")[0] != "hydra"
    return f"++{word}" if separator and is_config_key else word


def to_override_value(value: Any) -> str:
    """Return a value in the syntax of the command line.

    Raises:
        ConfigError: configurations do not have values of this type.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        # The repr of a numpy number would contain its type.
        return repr(float(value) if isinstance(value, float) else int(value))
    if isinstance(value, (str, Path)):
        # Hydra treats a backslash as an escape only before a quote.
        escaped = re.sub(r"(\\*)('|$)", lambda m: 2 * m[1] + (m[2] and r"\'"), str(value))
        return f"'{escaped}'"
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{key}: {to_override_value(item)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(to_override_value, value)) + "]"
    raise ConfigError(f"expected plain values, not {type(value).__name__}")
