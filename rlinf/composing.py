"""What Hydra and OmegaConf complain of, as one short error of ours."""

from __future__ import annotations

from rlinf.errors import ConfigError, nearest


def explained(error: Exception) -> ConfigError:
    """The error to show for one that composing a configuration raised.

    Args:
        error: of Hydra or OmegaConf.
    """
    from hydra.errors import MissingConfigException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if group and error.options:
            return ConfigError(f"{group}={name}: no such {group}{nearest(name, error.options)}")
        return ConfigError(f"{error.missing_cfg_file}: no such configuration file")
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    key = getattr(cause, "full_key", None)
    if isinstance(cause, MissingMandatoryValue) and key:
        return ConfigError(f"{key}: must be given; add {key}=... to the command line")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(line for line in lines if not line.startswith(("See http", "object_type")))
    override = getattr(error, "override", None)
    if isinstance(override, str) and override not in text:
        text = f"{override.lstrip('+')}: {text}"
    return ConfigError(text[:400] or type(error).__name__)
