"""The Python interface: :func:`run` runs an experiment, and :func:`load` opens a run.

No other module of the product imports this one. PyTorch is loaded when a function is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlinf import package_paths, process_tuning
from rlinf.errors import translate_resource_errors
from rlinf.hydra_config import force_add, to_override_value
from rlinf.user_code import translate_user_errors

if TYPE_CHECKING:
    from pipeline.commands.results import RunResults


def run(
    experiment: str,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    config_dir: str | Path | None = None,
    on_mismatch: Literal["error", "recompute", "keep"] = "error",
) -> RunResults:
    """Run an experiment to its end, like ``rlinf run experiment=... key=value``.

    An existing run of that name is resumed. With ``cluster=slurm`` this process is the driver and
    waits for the jobs. If it is interrupted, committed results are kept.

    Args:
        experiment: name of a file in ``configs/experiment``, or in that folder of ``config_dir``.
        overrides: as on the command line (``["optimizer.lr=3e-4"]``), or values by dotted key.
        config_dir: a folder with further configuration files.
        on_mismatch: handling of results that this configuration or code would not reproduce.

    Raises:
        ConfigError, DataError, PlanError, MismatchError: the run is not valid; nothing was written.
        RlinfError: the run failed; the message says where.
    """
    package_paths.add_to_sys_path()
    process_tuning.tune_process()
    from pipeline.commands.experiment import compose, drive, prepare_run
    from pipeline.resume import OnMismatch

    if isinstance(overrides, Mapping):
        overrides = [f"{key}={to_override_value(value)}" for key, value in overrides.items()]
    arguments = [f"experiment={experiment}", *overrides]
    folders = [str(config_dir)] if config_dir else []
    values = compose([force_add(argument) for argument in arguments], folders)
    with translate_resource_errors(), translate_user_errors():
        prepared = prepare_run(values, OnMismatch(on_mismatch))
        drive(prepared)
    return load(prepared.folder)


def load(folder: str | Path) -> RunResults:
    """Return the results of a run directory, whether the run is finished, running or interrupted.

    Raises:
        ConfigError: the folder is not a run directory.
    """
    package_paths.add_to_sys_path()
    from pipeline.commands.results import RunResults

    return RunResults.open(folder)
