"""Whether a start and what a run holds belong together; if not, what is to become of the results.

Nothing that is committed is removed because it no longer matches. A start that differs is refused
before anything is touched, unless it says ``--redo`` or ``--keep``. With ``--redo`` the run becomes
what a fresh one of the configuration would be: only results that are the same in both stay, and the
others are set aside in the run, with the ledger of what was kept earlier. With ``--keep`` the old
results count, and the ledger ``kept.json`` says what differed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from pipeline.graph import Graph, StageNode
from pipeline.run import Run, explain_write_errors
from pipeline.run_record import (
    config_differences,
    config_edits,
    effective_settings,
    is_record_complete,
    read_run_record,
    write_run_record,
)
from pipeline.run_state import RunState, has_results
from rlinf.artifacts import write_atomic
from rlinf.config import NON_SEMANTIC_KEYS, RunConfig, json_digest, select_semantic
from rlinf.errors import CodeIdentityError, ConfigError, MismatchError
from stages.flow import EVALUATE, Flow
from stages.identity import CodeSnapshot, LedgerEntry, read_code_snapshot
from stages.layout import (
    CODE_FILE,
    CONFIG_FILE,
    LEDGER_FILE,
    PLAN_FILE,
    REWARD_CACHE_FOLDER,
    RUN_FILE,
)
from stages.runner import REPAIR_HINT, load_config, read_config_values

MAX_SHOWN = 6
"""Differences that a message names."""
INCOMPATIBLE_KEYS = {
    "model.": "weights of another model",
    "flow:": "weights of another model",
    "trainer.lora": "state of other adapters",
    "optimizer.name": "moments of another optimizer",
}
"""What a run cannot go on from, by how the changed keys begin: no trainer reads it."""
log = logging.getLogger("rlinf")


class OnMismatch(StrEnum):
    """What to do about results that a start would not make the same."""

    ERROR = "ask"
    RECOMPUTE = "redo"
    KEEP = "keep"

    @classmethod
    def from_flags(cls, *, redo: bool, keep: bool) -> OnMismatch:
        """
        Raises:
            ConfigError: both.
        """
        if redo and keep:
            raise ConfigError("--redo makes results anew and --keep keeps them: give one of them")
        return cls.RECOMPUTE if redo else cls.KEEP if keep else cls.ERROR


def check_resumable(committed: RunState, on_mismatch: OnMismatch = OnMismatch.ERROR) -> None:
    """:func:`settle` for a run as it is on disk; an edited ``config.yaml`` is noticed.

    Raises:
        MismatchError: it was edited, or see there.
        ConfigError: it cannot be read.
    """
    folder = committed.run.folder
    changes = config_edits(folder)
    resolve_mismatches(committed, on_mismatch, edits=changes)
    if changes or on_mismatch is not OnMismatch.ERROR or not is_record_complete(folder):
        write_run_record(folder, read_config_values(folder / CONFIG_FILE))


def resolve_mismatches(
    committed: RunState,
    on_mismatch: OnMismatch,
    changes: Sequence[str] = (),
    edits: Sequence[str] = (),
) -> None:
    """Find what is done; see that all of it is what this start would make.

    Args:
        changes: how the configuration of this start differs from that of the run.
        edits: how ``config.yaml`` of the run was edited or damaged.

    Raises:
        MismatchError: something is not, and nobody said what to do; nothing was touched.
    """
    folder = committed.run.folder
    before = _code_before(folder)
    committed.scan()
    why = changes = [*edits, *changes]
    if committed.mismatched:
        why = why + _code_differences(before, committed.code)
    if on_mismatch is OnMismatch.RECOMPUTE:
        _redo(committed)
        committed.scan()
    elif committed.mismatched or changes:
        if on_mismatch is OnMismatch.ERROR:
            _refuse_other_results(committed, why, edits)
        else:
            _keep(committed, why, changes)
        committed.scan()
    if before != committed.code:
        write_atomic(folder / CODE_FILE, committed.code.to_json())


def _refuse_other_results(committed: RunState, why: Sequence[str], edits: Sequence[str]) -> None:
    """Accept another configuration where no result that is there depends on what differs.

    Raises:
        MismatchError: some do, or the configuration of a run with results was edited.
    """
    folder = committed.run.folder
    committed.scan(accept_mismatches=False)
    results = has_results(folder)
    if committed.mismatched or committed.outputs_outside_graph() or (edits and results):
        affected = committed.dependents(committed.nodes_to_redo())
        raise MismatchError(_message(folder, why, affected, committed.graph.flow))
    there = "what is finished there is not affected" if results else "nothing was finished there"
    log.warning(
        "%s: %s, so this start replaces the frozen configuration; it differs: %s",
        folder,
        there,
        "; ".join(_short(why)),
    )


def _redo(committed: RunState) -> None:
    """Set aside all that a fresh run of the configuration would not have."""
    ledger = committed.run.folder / LEDGER_FILE
    if ledger.exists():
        committed.archive_path(ledger)
    committed.scan(accept_mismatches=False)
    gone, leftovers = committed.nodes_to_redo(), committed.outputs_outside_graph()
    affected = committed.dependents(gone)
    _set_answers_aside(committed, affected)
    for node in gone:
        committed.archive(node)
    for folder in leftovers:
        committed.archive_path(folder)
    if gone:
        flow = committed.graph.flow
        log.info("%s made anew; the old is in %s", _named(affected, flow), committed.archive_folder)
    if leftovers:
        names = ", ".join(
            str(path.relative_to(committed.run.folder)) for path in leftovers[:MAX_SHOWN]
        )
        more = f" and {len(leftovers) - MAX_SHOWN} more" if len(leftovers) > MAX_SHOWN else ""
        log.info(
            "not part of the run any more, now in %s: %s%s", committed.archive_folder, names, more
        )


def _set_answers_aside(committed: RunState, affected: Sequence[StageNode]) -> None:
    """Set a judge's answers aside, and what they cost, where all rewards are made anew.

    Where some rewards stay, so do the answers: they are of these, and count against one budget.
    """
    judging = {
        name
        for name, stage in committed.graph.flow.all_stages.items()
        if "reward" in stage.config_sections
    }
    there = {*committed.done, *committed.unverified, *committed.mismatched}
    rewards = {node for node in there if node.stage in judging}
    answers = committed.run.folder / REWARD_CACHE_FOLDER
    if rewards and rewards <= set(affected) and answers.exists():
        committed.archive_path(answers)


def _keep(committed: RunState, why: Sequence[str], changes: Sequence[str]) -> None:
    """
    Raises:
        MismatchError: what is there cannot be gone on with.
    """
    folder = committed.run.folder
    keys = [change.removeprefix(f"{CONFIG_FILE}: ") for change in changes]
    fixed = [
        (what, key) for key in keys for of, what in INCOMPATIBLE_KEYS.items() if key.startswith(of)
    ]
    if fixed and committed.mismatched:
        what, key = fixed[0]
        raise MismatchError(
            f"{folder}: --keep cannot go on with the {what} ({key}); "
            "--redo makes everything anew, another run.name starts another run"
        )
    entry = LedgerEntry(
        recorded_at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        differences=tuple(why),
        outputs=dict(committed.manifest_keys(committed.mismatched)),
    )
    ledger = committed.ledger.model_copy(update={"entries": (*committed.ledger.entries, entry)})
    write_atomic(folder / LEDGER_FILE, ledger.model_dump_json(indent=1))
    log.info(
        "kept: %s, though different: %s",
        _named(committed.mismatched, committed.graph.flow),
        "; ".join(_short(why)),
    )


def _message(folder: Path, why: Sequence[str], affected: Sequence[StageNode], flow: Flow) -> str:
    return (
        f"{folder}: this start would not make what the run holds; {_named(affected, flow)} would "
        "be made anew.\n"
        f"differs: {'; '.join(_short(why))}\n"
        "--redo makes it anew and sets the old results aside, --keep goes on with what is there "
        "and notes it in the run\n"
        "(Snakemake: --config redo=1 or keep=1); another run.name starts another run"
    )


def _short(why: Sequence[str]) -> list[str]:
    rest = len(why) - MAX_SHOWN
    return [*why[:MAX_SHOWN], *([f"and {rest} more"] if rest > 0 else [])]


def _named(nodes: Sequence[StageNode], flow: Flow) -> str:
    """``the warm start, 3 iterations (0 to 2), 1 evaluation``."""
    iterations = sorted({node.iteration for node in nodes if node.stage in flow.stages})
    evaluations = sum(node.stage == EVALUATE for node in nodes)
    parts = ["the warm start"] if any(node.stage in flow.offline for node in nodes) else []
    if iterations:
        span = (
            f" ({iterations[0]} to {iterations[-1]})"
            if len(iterations) > 1
            else f" ({iterations[0]})"
        )
        parts.append(f"{len(iterations)} iteration{'s' * (len(iterations) > 1)}{span}")
    if evaluations:
        parts.append(f"{evaluations} evaluation{'s' * (evaluations > 1)}")
    return ", ".join(parts) or "nothing"


def _code_before(folder: Path) -> CodeSnapshot | None:
    try:
        return read_code_snapshot(folder)
    except CodeIdentityError as error:
        log.warning("%s", error)
        return None


def _code_differences(before: CodeSnapshot | None, now: CodeSnapshot) -> list[str]:
    if before is None:
        return ["code: the program that made it did not record its modules"]
    return [f"code: {name}" for name in before.changed_names(now)]


CHANGEABLE_KEYS = ("iterations", "retention", "evaluate.every")
"""Keys that change no result that is there; a later start may change them."""
SCHEDULE_LENGTH_KEY = "optimizer.lr_decay_iterations"


def create_run(
    config: RunConfig, plan: dict[str, Any] | None, on_mismatch: OnMismatch = OnMismatch.ERROR
) -> Run:
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
    effective_settings(config)  # refuses what no part knows, before anything is written
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with Run(folder, config).lock():
            if (folder / CONFIG_FILE).exists():
                return _reopened(folder, config, plan, on_mismatch)
            return _created(folder, config, plan or {})


def _created(folder: Path, config: RunConfig, plan: dict[str, Any]) -> Run:
    config, derived = _with_span(config, config.iterations)
    _say_beyond(config)
    folder.chmod(0o700)
    values = config.model_dump(mode="json")
    write_atomic(folder / PLAN_FILE, yaml.safe_dump(plan, sort_keys=False))
    # A start that was killed before it wrote its configuration lends its identity to no other.
    (folder / RUN_FILE).unlink(missing_ok=True)
    write_run_record(folder, values, derived_keys=(*derived, *config.environment_keys))
    write_atomic(folder / CONFIG_FILE, yaml.safe_dump(values, sort_keys=False))
    return Run(folder, load_config(folder / CONFIG_FILE))


def _reopened(
    folder: Path, config: RunConfig, plan: dict[str, Any] | None, choice: OnMismatch
) -> Run:
    fewer = None
    try:
        values, old = read_config_values(folder / CONFIG_FILE), load_config(folder / CONFIG_FILE)
        edits = config_edits(folder)
    except ConfigError as error:
        edits = [str(error).removesuffix(f"; {REPAIR_HINT}")]
        values = _remembered(folder, config)
        old = RunConfig.model_validate(values)
    # Where nothing is there, or all is made anew, this run is to be what a fresh one would be.
    empty = not has_results(folder)
    fresh = empty or choice is OnMismatch.RECOMPUTE
    span = config.iterations if fresh else _span_of(old, config)
    config, derived = _with_span(config, span)
    derived = (*derived, *_read_keys(folder, old, config))
    if config.iterations < old.iterations and not fresh:
        fewer = config.iterations
        config = config.model_copy(update={"iterations": old.iterations})
    before, after = old.model_dump(mode="json"), config.model_dump(mode="json")
    frozen = _replaced(values, before, after)
    found = config_differences(select_semantic(before), select_semantic(after))
    changes = [change for change in found if not change.startswith(CHANGEABLE_KEYS)]
    _say_beyond(config)
    run = Run(folder, RunConfig.model_validate(frozen))
    committed = RunState(run, Graph(run.config))
    resolve_mismatches(committed, choice, changes, edits)
    changes += edits
    replaced = empty and bool(changes)
    # The plan of a start that failed is not that of a corrected one which names none.
    failed = replaced or (empty and old.plan is not None)
    wanted = config.plan is not None or failed or not (folder / PLAN_FILE).exists()
    if plan is not None and wanted:
        write_atomic(folder / PLAN_FILE, yaml.safe_dump(plan, sort_keys=False))
    same = not changes and frozen == values
    if replaced:
        # Its identity and date are those of this start.
        (folder / RUN_FILE).unlink(missing_ok=True)
    if not same:
        write_run_record(folder, frozen, json_digest(select_semantic(values)), derived)
        write_atomic(folder / CONFIG_FILE, yaml.safe_dump(frozen, sort_keys=False))
    if not same or choice is not OnMismatch.ERROR:
        write_run_record(folder, frozen, derived_keys=derived)
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
    if config.environment_keys or old.task.model_dump(mode="json") != config.task.model_dump(
        mode="json"
    ):
        return config.environment_keys
    try:
        record = read_run_record(folder)
    except ConfigError:
        return ()
    known = record.derived if record is not None else None
    return tuple(key for key in known or () if key.startswith("task."))


def _remembered(folder: Path, config: RunConfig) -> dict[str, Any]:
    """What a configuration that cannot be read was frozen as, by ``run.json``; else ``config``."""
    whole = config.model_dump(mode="json")
    try:
        record = read_run_record(folder)
    except ConfigError:
        record = None
    if record is None or record.config is None:
        return whole
    return {**{key: whole[key] for key in NON_SEMANTIC_KEYS}, **record.config}


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
    known = settings.lr_scheduler_type == "constant" or settings.lr_decay_iterations is not None
    if known or not iterations:
        # A run without iterations has none to take a span from, until it is given some.
        return config, ()
    made = settings.model_copy(update={"lr_decay_iterations": iterations})
    return config.model_copy(update={"optimizer": made}), (SCHEDULE_LENGTH_KEY,)


def _span_of(old: RunConfig, new: RunConfig) -> int:
    """The span that a run was started with; that of ``new`` where it had no such schedule."""
    before, after = old.optimizer, new.optimizer
    if before.lr_decay_iterations is not None:
        return before.lr_decay_iterations
    return old.iterations if before.lr_scheduler_type == after.lr_scheduler_type else new.iterations


def _say_beyond(config: RunConfig) -> None:
    """Say at which learning rate iterations beyond the schedule run.

    Raises:
        ConfigError: at 0.
    """
    span = config.optimizer.lr_decay_iterations
    if (
        config.optimizer.lr_scheduler_type == "constant"
        or span is None
        or config.iterations <= span
    ):
        return
    last = config.optimizer.learning_rate(config.iterations - 1, span)
    if not last:
        raise ConfigError(
            f"iterations: the schedule of the learning rate ends at 0 after {span} iterations "
            f"(optimizer.min_lr_ratio: 0), so {config.iterations - span} more would change "
            "nothing; start another run with more iterations, or with optimizer.min_lr_ratio "
            "above 0"
        )
    log.info("iterations beyond the %d of the schedule run at its last rate, %g", span, last)
