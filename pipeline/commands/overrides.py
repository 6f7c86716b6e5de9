"""Overrides for a run that is there: ``rlinf resume RUN key=value``, ``rlinf submit RUN ...``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.commands.driver_job import starting
from pipeline.commands.experiment import checked, compose_in
from pipeline.plan import Plan
from pipeline.record import read_record
from pipeline.run import Run
from pipeline.settle import Choice
from rlinf import tree
from rlinf.composing import forced
from rlinf.config import RunConfig
from rlinf.errors import ConfigError
from slurm.jobs import Resources, own_job
from stages.layout import CONFIG, PLAN
from stages.runner import read_config


def reopen(folder: Path, words: Sequence[str], choice: Choice = Choice.ASK) -> Run:
    """Open a run with another configuration, as ``rlinf run`` would with the run's first command.

    Args:
        words: overrides of what is frozen.

    Raises:
        ConfigError, DataError, PlanError, MismatchError: nothing was written.
        RunLockedError: a driver is at work there, or another process starts the run.
    """
    from pipeline.freeze import create_run  # it loads algorithms, as the checks do

    config, plan, chosen = checked_with(folder, words, own_job())
    with starting(Run(config.run.folder, config)):
        return create_run(config, plan.dump() if chosen else None, choice)


def checked_with(
    folder: Path, words: Sequence[str], driver: Resources | None = None
) -> tuple[RunConfig, Plan, bool]:
    """Return the checked configuration and plan of a run with overrides; nothing is written.

    The plan is that of the run, unless an override names another one; the last value says so.

    Args:
        driver: see :func:`pipeline.commands.experiment.checked`.

    Raises:
        ConfigError, DataError, PlanError: they cannot be used.
    """
    values = changed(folder, words)
    chosen = any(_key(word) == "plan" for word in words)
    file = Run.open(folder).folder / PLAN
    if chosen or not file.exists():
        return *checked(values, driver), True
    own = values.get("plan")
    config, plan = checked({**values, "plan": yaml.safe_load(file.read_text("utf-8"))}, driver)
    return config.model_copy(update={"plan": own}), plan, False


def changed(folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """Return the frozen values of a run with overrides.

    ``SECTION=NAME`` puts the file of that name in the place of the whole section.

    Raises:
        ConfigError: an override cannot be composed, or is about which run this is.
    """
    folder = Run.open(folder).folder
    for word in words:
        if _key(word) == "experiment" or _key(word).split(".")[0] in ("run", "hydra"):
            raise ConfigError(
                f"{word}: this goes on with the run in {folder}; leave it out, or start another "
                "run with rlinf run"
            )
    values = read_config(folder / CONFIG)
    record = read_record(folder)
    for key in (record.derived if record is not None else None) or ():
        section, _, name = key.partition(".")
        # What was read from the task's environment stays while the task does: it may not be here.
        if section != "task" or any(_key(word).split(".")[0] == "task" for word in words):
            values[section][name] = None
    values["run"] = {"name": folder.name, "root": str(folder.parent)}
    groups = [word for word in words if _is_group(word)]
    base = {key: value for key, value in values.items() if key not in map(_key, groups)}
    rest = [forced(word) for word in words if word not in groups]
    with tempfile.TemporaryDirectory() as place:
        text = yaml.safe_dump({"defaults": ["_self_"], **_literal(base)}, sort_keys=False)
        Path(place, "frozen.yaml").write_text(text, encoding="utf-8")
        further = [*(f"+{word}" for word in groups), *rest]
        return compose_in(Path(place), "frozen", further, [str(tree.ROOT / "configs")])


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _is_group(word: str) -> bool:
    return forced(word) == word and (tree.ROOT / "configs" / _key(word)).is_dir()


def _literal(value: Any) -> Any:
    """Values in which nothing is an interpolation: they were resolved when they were frozen."""
    if isinstance(value, Mapping):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
