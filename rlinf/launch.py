"""``python -m rlinf.launch experiment=... key=value``: compose a configuration and run it.

With ``-m`` Hydra runs a sweep, one run per point, in this process or as jobs through
``hydra/launcher=submitit_local`` or ``hydra/launcher=submitit_slurm``.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from rlinf import package_paths, process_tuning
from rlinf.errors import EXIT_INTERRUPTED, ConfigError, RlinfError, translate_resource_errors
from rlinf.hydra_config import force_add, to_config_error
from rlinf.user_code import translate_user_errors

FULL_ERROR_VARIABLE = "HYDRA_FULL_ERROR"
MISMATCH_FLAGS = {"--redo": "recompute", "--keep": "keep"}
"""The value of ``on_mismatch`` (:func:`run_point`) by flag."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    # Importing PyTorch takes seconds, so print at once that the command was understood.
    print("rlinf: reading the configuration", file=sys.stderr, flush=True)
    package_paths.add_to_sys_path()
    process_tuning.tune_process()
    words = list(sys.argv[1:] if argv is None else argv)
    # Overrides may set keys that no YAML file mentions; validation rejects unknown keys later and
    # suggests similar ones. Hydra wants its options before the overrides.
    try:
        words, on_mismatch = split_mismatch_flag(words)
        words = sorted([*map(force_add, words), *sweep_suffix_override(words)], key=_is_override)
        reject_launcher_without_multirun(words)
        with translate_resource_errors(), translate_user_errors():
            points = sweep_points(words)
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    try:
        return _compose_and_run(words, on_mismatch)
    except KeyboardInterrupt:
        print("error: interrupted before anything ran", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        if points:
            from pipeline.commands.sweep import show_sweep

            show_sweep(points)


def _compose_and_run(words: Sequence[str], on_mismatch: str) -> int:
    """Pass the command line to Hydra; returns the exit code of the first failed point."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    sys.argv = ["rlinf.launch", *words]
    failures: list[int] = []

    @hydra.main(
        config_path=str(package_paths.ROOT / "configs"), config_name="config", version_base="1.3"
    )
    def run(values: Any) -> None:
        code = run_point(values, on_mismatch)
        if code:
            failures.append(code)
            if is_sweep():
                # A sweep's launcher reports a point as failed only if it raises.
                raise SystemExit(code)

    if any(word in ("-m", "--multirun") for word in words):
        from launchers.sbatch import patched_slurm_executor

        patched_slurm_executor()
    # With this variable Hydra raises its errors, instead of printing them and exiting with 1.
    old_value = os.environ.get(FULL_ERROR_VARIABLE)
    os.environ[FULL_ERROR_VARIABLE] = "1"
    try:
        run()
    except (HydraException, OmegaConfBaseException) as error:
        config_error = to_config_error(error)
        print(f"error: {config_error}", file=sys.stderr)
        return config_error.exit_code
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        if old_value is None:
            del os.environ[FULL_ERROR_VARIABLE]
        else:
            os.environ[FULL_ERROR_VARIABLE] = old_value
    return failures[0] if failures else 0


def sweep_points(words: Sequence[str]) -> list[Any]:
    """Return the validated points of a sweep; none for a single run, or if the sweeper chooses the
    points itself.

    Raises:
        ConfigError, DataError, PlanError: a point cannot be run; nothing was submitted.
    """
    from hydra._internal.utils import get_args_parser

    options = get_args_parser().parse_args(list(words))
    overrides = [word.lstrip("+") for word in options.overrides]
    has_own_search = any(word.startswith("hydra/sweeper=") for word in overrides)
    if not options.multirun or options.cfg or options.help or options.hydra_help or has_own_search:
        return []
    from pipeline.commands import sweep

    folders = [options.config_dir] if options.config_dir else []
    return list(sweep.sweep_points(options.overrides, folders))


def split_mismatch_flag(words: Sequence[str]) -> tuple[list[str], str]:
    """Return the words for Hydra, and the mismatch handling that ``--redo`` or ``--keep`` selects.

    Raises:
        ConfigError: both flags are given.
    """
    flags = {word for word in words if word in MISMATCH_FLAGS}
    if len(flags) > 1:
        raise ConfigError("--redo and --keep exclude each other: give one of them")
    other_words = [word for word in words if word not in flags]
    return other_words, next((MISMATCH_FLAGS[flag] for flag in flags), "error")


def sweep_suffix_override(words: Sequence[str]) -> list[str]:
    """Return, for a sweep, the override that names each run after the keys that vary."""
    if not any(word in ("-m", "--multirun") for word in words):
        return []
    naming = [word for word in words if word.lstrip("+").startswith(("run.name=", "run.suffix="))]
    if any("run.suffix=" in word or "${" in word or _varies(word) for word in naming):
        return []
    varying = [word.lstrip("+").split("=")[0] for word in words if _varies(word)]
    parts = [
        f"-{key.rsplit('.', 1)[-1]}-${{{_interpolation(key)}}}" for key in varying if "/" not in key
    ]
    return [f"++run.suffix='{''.join(parts)}'"] if parts else []


def _interpolation(key: str) -> str:
    """Return Hydra's interpolation for the value of a key; for a group, the chosen file's name."""
    is_group = "." not in key and (package_paths.ROOT / "configs" / key).is_dir()
    return f"hydra:runtime.choices.{key}" if is_group else key


def _is_override(word: str) -> bool:
    return word.startswith("~") or ("=" in word and not word.startswith("-"))


def _varies(word: str) -> bool:
    """Return whether an override has several values: a comma outside brackets, or a function."""
    _, _, value = word.partition("=")
    bare = re.sub(r"\[[^\]]*\]|\{[^}]*\}|'[^']*'|\"[^\"]*\"", "", value)
    return "," in bare or re.match(r"(choice|range|interval|glob)\(", value) is not None


def is_sweep() -> bool:
    """Return whether this point belongs to a sweep."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def run_point(values: Any, on_mismatch: str = "error") -> int:
    """Run one composed configuration to its end; returns its exit code.

    Args:
        on_mismatch: handling of results that this configuration or code would not reproduce:
            ``error``, ``recompute`` or ``keep``.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from pipeline.commands.experiment import run_experiment
    from pipeline.resume import OnMismatch

    logging.getLogger("rlinf").setLevel(logging.INFO)
    try:
        plain = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
        assert isinstance(plain, dict)
        report = run_experiment(
            {str(key): value for key, value in plain.items()}, OnMismatch(on_mismatch)
        )
        print(f"report: {report}")
    except OmegaConfBaseException as error:
        print(f"error: {to_config_error(error)}", file=sys.stderr)
        return ConfigError.exit_code
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def reject_launcher_without_multirun(words: Sequence[str]) -> None:
    """Raise if a launcher is set without ``-m``: Hydra would ignore it and train on the login node.

    Raises:
        ConfigError: a launcher is set; the message suggests the intended command.
    """
    is_multirun = any(word in ("-m", "--multirun") for word in words)
    launchers = [word for word in words if word.lstrip("+").startswith("hydra/launcher=")]
    if launchers and not is_multirun and not launchers[0].endswith("=basic"):
        raise ConfigError(
            f"{launchers[0]} only works for sweeps, and Hydra would ignore it here. Either add -m:"
            f"\n  python -m rlinf.launch -m {' '.join(words)}\n"
            "or run this one experiment's stages as jobs: replace it by cluster=slurm"
        )


if __name__ == "__main__":
    sys.exit(main())
