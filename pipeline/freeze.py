"""The configuration of a run, frozen once, and what a later start may change in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pipeline.committed import Committed, has_results
from pipeline.flow import Graph
from pipeline.record import differences, edited, read_record, write_record
from pipeline.run import Run, writing
from pipeline.settings import settings_in_effect
from pipeline.settle import Choice, settle
from rlinf.artifacts import write_atomic
from rlinf.config import TRANSIENT, RunConfig, digest, semantic
from rlinf.errors import ConfigError
from stages.layout import CONFIG, PLAN, RUN
from stages.runner import MEND, load_config, read_config

FREE = ("iterations", "retention", "evaluate.every")
"""Keys that change no result that is there; a later start may change them."""
SPAN = "optimizer.schedule_iterations"
log = logging.getLogger("rlinf")


def create_run(config: RunConfig, plan: dict[str, Any] | None, choice: Choice = Choice.ASK) -> Run:
    """Make the run directory, or open it when it holds the same experiment.

    More iterations than before are accepted: the run goes on. With fewer it ends earlier this
    time; what is frozen stays, unless ``choice`` is to make the run anew. A directory in which no
    stage was ever committed takes any configuration.

    Args:
        plan: content of ``plan.yaml``; that of an existing run stays unless ``config`` names one,
            or named one before under which nothing was finished. None: its plan stays.

    Raises:
        MismatchError: it holds results, or a configuration, that this start would not make.
        ConfigError: a part does not know a key, or iterations are beyond a schedule that ended at a
            learning rate of 0.
        RunLockedError: a driver is at work there.
        InputError: no permission to write there.
    """
    folder = config.run.folder
    settings_in_effect(config)  # refuses what no part knows, before anything is written
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with Run(folder, config).driven():
            if (folder / CONFIG).exists():
                return _reopened(folder, config, plan, choice)
            return _created(folder, config, plan or {})


def _created(folder: Path, config: RunConfig, plan: dict[str, Any]) -> Run:
    config, derived = _with_span(config, config.iterations)
    _say_beyond(config)
    folder.chmod(0o700)
    values = config.model_dump(mode="json")
    write_atomic(folder / PLAN, yaml.safe_dump(plan, sort_keys=False))
    # A start that was killed before it wrote its configuration lends its identity to no other.
    (folder / RUN).unlink(missing_ok=True)
    write_record(folder, values, derived=(*derived, *config.read_keys))
    write_atomic(folder / CONFIG, yaml.safe_dump(values, sort_keys=False))
    return Run(folder, load_config(folder / CONFIG))


def _reopened(folder: Path, config: RunConfig, plan: dict[str, Any] | None, choice: Choice) -> Run:
    fewer = None
    try:
        values, old = read_config(folder / CONFIG), load_config(folder / CONFIG)
        edits = edited(folder)
    except ConfigError as error:
        edits = [str(error).removesuffix(f"; {MEND}")]
        values = _remembered(folder, config)
        old = RunConfig.model_validate(values)
    # Where nothing is there, or all is made anew, this run is to be what a fresh one would be.
    empty = not has_results(folder)
    fresh = empty or choice is Choice.REDO
    span = config.iterations if fresh else _span_of(old, config)
    config, derived = _with_span(config, span)
    derived = (*derived, *_read_keys(folder, old, config))
    if config.iterations < old.iterations and not fresh:
        fewer = config.iterations
        config = config.model_copy(update={"iterations": old.iterations})
    before, after = old.model_dump(mode="json"), config.model_dump(mode="json")
    frozen = _replaced(values, before, after)
    found = differences(semantic(before), semantic(after))
    changes = [change for change in found if not change.startswith(FREE)]
    _say_beyond(config)
    run = Run(folder, RunConfig.model_validate(frozen))
    committed = Committed(run, Graph(run.config))
    settle(committed, choice, changes, edits)
    changes += edits
    replaced = empty and bool(changes)
    # The plan of a start that failed is not that of a corrected one which names none.
    failed = replaced or (empty and old.plan is not None)
    wanted = config.plan is not None or failed or not (folder / PLAN).exists()
    if plan is not None and wanted:
        write_atomic(folder / PLAN, yaml.safe_dump(plan, sort_keys=False))
    same = not changes and frozen == values
    if replaced:
        # Its identity and date are those of this start.
        (folder / RUN).unlink(missing_ok=True)
    if not same:
        write_record(folder, frozen, digest(semantic(values)), derived)
        write_atomic(folder / CONFIG, yaml.safe_dump(frozen, sort_keys=False))
    if not same or choice is not Choice.ASK:
        write_record(folder, frozen, derived=derived)
    if fewer is None:
        return run
    log.info(
        "ends after %d iterations this time; the run stays one of %d, and what is finished stays",
        fewer,
        run.config.iterations,
    )
    return Run(folder, run.config.model_copy(update={"iterations": fewer}))


def _read_keys(folder: Path, old: RunConfig, config: RunConfig) -> tuple[str, ...]:
    """Return the keys of the task that were read from its environment, now or at an earlier start.

    Those of an earlier start count while the task is the same.
    """
    if config.read_keys or old.task.model_dump(mode="json") != config.task.model_dump(mode="json"):
        return config.read_keys
    try:
        record = read_record(folder)
    except ConfigError:
        return ()
    known = record.derived if record is not None else None
    return tuple(key for key in known or () if key.startswith("task."))


def _remembered(folder: Path, config: RunConfig) -> dict[str, Any]:
    """What a configuration that cannot be read was frozen as, by ``run.json``; else ``config``."""
    whole = config.model_dump(mode="json")
    try:
        record = read_record(folder)
    except ConfigError:
        record = None
    if record is None or record.config is None:
        return whole
    return {**{key: whole[key] for key in TRANSIENT}, **record.config}


def _replaced(
    values: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """What is frozen, with what changed; a key that it lacks stays away while its default holds.

    Such a key came with a later version of the program, and would change identities.

    Args:
        values: as they are frozen.
        before, after: whole configurations.
    """
    made: dict[str, Any] = {}
    for key, new in after.items():
        old = before.get(key)
        if key in values and isinstance(values[key], Mapping) and isinstance(new, Mapping):
            made[key] = _replaced(values[key], old if isinstance(old, Mapping) else {}, new)
        elif key in values or new != old:
            made[key] = new
    return made


def _with_span(config: RunConfig, iterations: int) -> tuple[RunConfig, tuple[str, ...]]:
    """The configuration with the span of its learning-rate schedule, if it has one.

    Also returns the key of the span where it was not given.
    """
    settings = config.optimizer
    known = settings.schedule == "constant" or settings.schedule_iterations is not None
    if known or not iterations:
        # A run without iterations has none to take a span from, until it is given some.
        return config, ()
    made = settings.model_copy(update={"schedule_iterations": iterations})
    return config.model_copy(update={"optimizer": made}), (SPAN,)


def _span_of(old: RunConfig, new: RunConfig) -> int:
    """The span that a run was started with; that of ``new`` where it had no such schedule."""
    before, after = old.optimizer, new.optimizer
    if before.schedule_iterations is not None:
        return before.schedule_iterations
    return old.iterations if before.schedule == after.schedule else new.iterations


def _say_beyond(config: RunConfig) -> None:
    """Say at which learning rate iterations beyond the schedule run.

    Raises:
        ConfigError: at 0.
    """
    span = config.optimizer.schedule_iterations
    if config.optimizer.schedule == "constant" or span is None or config.iterations <= span:
        return
    last = config.optimizer.rate(config.iterations - 1, span)
    if not last:
        raise ConfigError(
            f"iterations: the schedule of the learning rate ends at 0 after {span} iterations "
            f"(optimizer.lr_final: 0), so {config.iterations - span} more would change nothing; "
            "start another run with more iterations, or with optimizer.lr_final above 0"
        )
    log.info("iterations beyond the %d of the schedule run at its last rate, %g", span, last)
