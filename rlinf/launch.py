"""``python -m rlinf.launch experiment=... key=value``: compose a configuration and run it.

With ``-m`` Hydra runs a sweep, one run per point, in this process or as jobs through
``hydra/launcher=submitit_local`` or ``hydra/launcher=submitit_slurm``.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlinf import machine, tree
from rlinf.composing import explained, forced, in_words
from rlinf.errors import EXIT_INTERRUPTED, ConfigError, RlinfError, told_of_exhaustion
from rlinf.user_code import reporting_user_errors

if TYPE_CHECKING:
    from pipeline.commands.results import Results

BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
FULL_ERROR = "HYDRA_FULL_ERROR"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    # Importing PyTorch takes seconds: say at once that the command was understood.
    print("rlinf: reading the configuration", file=sys.stderr, flush=True)
    tree.activate()
    machine.apply()
    words = list(sys.argv[1:] if argv is None else argv)
    # Keys of a part that its YAML file does not mention are overrides too; our own validation,
    # which knows them all, judges them and hints at the nearest.
    # Hydra wants its options before the overrides.
    try:
        words, choice = chosen(words)
        words = sorted([*map(forced, words), *suffix(words)], key=_is_override)
        refuse_lone_launcher(words)
        with told_of_exhaustion(), reporting_user_errors():
            swept = sweep_of(words)
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    try:
        return _compose_and_run(words, choice)
    except KeyboardInterrupt:
        print("error: interrupted before anything ran", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        if swept:
            from pipeline.commands.sweep import show

            show(swept)


def run(
    experiment: str,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    config_dir: str | Path | None = None,
    choice: Literal["ask", "redo", "keep"] = "ask",
) -> Results:
    """Run an experiment to its end, as ``rlinf run experiment=... key=value`` does; returns it.

    A run of that name that is there goes on. With ``cluster=slurm`` this process is the driver, and
    waits; what was committed stays when it is interrupted.

    Args:
        experiment: name of a file in ``configs/experiment``, or in that folder of ``config_dir``.
        overrides: as on the command line (``["optimizer.lr=3e-4"]``), or values by dotted key.
        config_dir: a folder of further configuration files.
        choice: what to do with results that this configuration or code would not make the same.

    Raises:
        ConfigError, DataError, PlanError, MismatchError: it cannot be run; nothing was written.
        RlinfError: it failed; the message says where.
    """
    tree.activate()
    machine.apply()
    from pipeline.commands.experiment import compose, drive, prepare
    from pipeline.settle import Choice

    if isinstance(overrides, Mapping):
        overrides = [f"{key}={in_words(value)}" for key, value in overrides.items()]
    words = [f"experiment={experiment}", *overrides]
    values = compose([forced(word) for word in words], [str(config_dir)] if config_dir else [])
    with told_of_exhaustion(), reporting_user_errors():
        made = prepare(values, Choice(choice))
        drive(made)
    return load(made.folder)


def load(folder: str | Path) -> Results:
    """The results of a run directory: of one that is finished, goes on, or was interrupted.

    Raises:
        ConfigError: it is no run directory.
    """
    tree.activate()
    from pipeline.commands.results import Results

    return Results.of(folder)


def cli() -> Any:
    """Entry point of the ``rlinf`` command."""
    tree.activate()
    from pipeline.commands.cli import main as command

    return command()


def _compose_and_run(words: Sequence[str], choice: str) -> int:
    """Hand the command line to Hydra; returns the exit code of the first point that failed."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    sys.argv = ["rlinf.launch", *words]
    failures: list[int] = []

    @hydra.main(config_path=str(tree.ROOT / "configs"), config_name="config", version_base="1.3")
    def run(values: Any) -> None:
        code = run_point(values, choice)
        if code:
            failures.append(code)
            if is_sweep():
                # A sweep's launcher reports a point as failed only when it raises.
                raise SystemExit(code)

    if any(word in ("-m", "--multirun") for word in words):
        from launchers.sbatch import slurm_executor

        slurm_executor()
    # Hydra prints what it cannot compose, and ends with 1; so it hands its errors on instead.
    shown = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    try:
        run()
    except (HydraException, OmegaConfBaseException) as error:
        told = explained(error)
        print(f"error: {told}", file=sys.stderr)
        return told.exit_code
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        if shown is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = shown
    return failures[0] if failures else 0


def sweep_of(words: Sequence[str]) -> list[Any]:
    """The points of a sweep, each checked; none for a single run or a sweeper with its own search.

    Raises:
        ConfigError, DataError, PlanError: a point cannot be run; nothing was submitted.
    """
    from hydra._internal.utils import get_args_parser

    options = get_args_parser().parse_args(list(words))
    searches = any(word.lstrip("+").startswith("hydra/sweeper=") for word in options.overrides)
    if not options.multirun or options.cfg or options.help or options.hydra_help or searches:
        return []
    from pipeline.commands.sweep import points

    return list(points(options.overrides, [options.config_dir] if options.config_dir else []))


def chosen(words: Sequence[str]) -> tuple[list[str], str]:
    """The words for Hydra, and which of ``--redo`` and ``--keep`` was among them.

    Raises:
        ConfigError: both.
    """
    flags = {word for word in words if word in ("--redo", "--keep")}
    if len(flags) > 1:
        raise ConfigError("--redo makes results anew and --keep keeps them: give one of them")
    rest = [word for word in words if word not in flags]
    return rest, next(iter(flags), "--ask").removeprefix("--")


def suffix(words: Sequence[str]) -> list[str]:
    """For a sweep, the override that names each point's run after the keys that vary."""
    if not any(word in ("-m", "--multirun") for word in words):
        return []
    named = [word for word in words if word.lstrip("+").startswith(("run.name=", "run.suffix="))]
    if any("run.suffix=" in word or "${" in word or _varies(word) for word in named):
        return []
    varying = [word.lstrip("+").split("=")[0] for word in words if _varies(word)]
    parts = [f"-{key.rsplit('.', 1)[-1]}-${{{_value(key)}}}" for key in varying if "/" not in key]
    return [f"++run.suffix='{''.join(parts)}'"] if parts else []


def _value(key: str) -> str:
    """What is interpolated for a key: of a folder of files (``experiment``) the file's name."""
    group = "." not in key and (tree.ROOT / "configs" / key).is_dir()
    return f"hydra:runtime.choices.{key}" if group else key


def _is_override(word: str) -> bool:
    return word.startswith("~") or ("=" in word and not word.startswith("-"))


def _varies(word: str) -> bool:
    """Whether an override has several values: a comma outside brackets, or a function."""
    _, _, value = word.partition("=")
    bare = re.sub(r"\[[^\]]*\]|\{[^}]*\}|'[^']*'|\"[^\"]*\"", "", value)
    return "," in bare or re.match(r"(choice|range|interval|glob)\(", value) is not None


def is_sweep() -> bool:
    """Whether this point belongs to a sweep."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def run_point(values: Any, choice: str = "ask") -> int:
    """Run one composed configuration to its end; returns its exit code.

    Args:
        choice: ``redo`` or ``keep`` for results that it would not make the same.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from pipeline.commands.experiment import execute
    from pipeline.settle import Choice

    logging.getLogger("rlinf").setLevel(logging.INFO)
    try:
        plain = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
        assert isinstance(plain, dict)
        report = execute({str(key): value for key, value in plain.items()}, Choice(choice))
        print(f"report: {report}")
    except OmegaConfBaseException as error:
        print(f"error: {explained(error)}", file=sys.stderr)
        return ConfigError.exit_code
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def refuse_lone_launcher(words: Sequence[str]) -> None:
    """Hydra ignores a launcher given without ``-m``, and would train on the login node.

    Raises:
        ConfigError: says the command that was meant.
    """
    sweep = any(word in ("-m", "--multirun") for word in words)
    launchers = [word for word in words if word.lstrip("+").startswith("hydra/launcher=")]
    if launchers and not sweep and not launchers[0].endswith("=basic"):
        raise ConfigError(
            f"{launchers[0]} only works for sweeps, and Hydra would ignore it here. Either add -m:"
            f"\n  python -m rlinf.launch -m {' '.join(words)}\n"
            "or run this one experiment's stages as jobs: replace it by cluster=slurm"
        )


if __name__ == "__main__":
    sys.exit(main())
