"""Creation and resumption of runs, and the handling of results that no longer match.

Committed results that no longer match are never deleted. A command (``rlinf run``, ``resume`` or
``submit``) that would not reproduce them fails before anything changes, unless it has ``--redo`` or
``--keep``. ``--redo`` turns the run into what a fresh run of the configuration would be: matching
results stay; all others are archived, as is the record of accepted mismatches. ``--keep`` accepts
the old results and records the differences in ``accepted_mismatches.json``.
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
from pipeline.run import (
    Run,
    config_differences,
    config_edits,
    effective_settings,
    explain_write_errors,
    is_record_complete,
    read_run_record,
    write_run_record,
)
from pipeline.run_state import RunState, ever_had_results
from rlinf.artifacts import write_atomic
from rlinf.config import NON_SEMANTIC_KEYS, RunConfig, json_digest, select_semantic
from rlinf.errors import CodeIdentityError, ConfigError, MismatchError
from stages.flow import EVALUATE, Flow
from stages.identity import AcceptedMismatch, CodeSnapshot, read_code_snapshot
from stages.layout import (
    ACCEPTED_FILE,
    CODE_FILE,
    CONFIG_FILE,
    PLAN_FILE,
    REWARD_CACHE_FOLDER,
    RUN_FILE,
)
from stages.runner import REPAIR_HINT, load_config, read_config_values

MAX_SHOWN = 6
"""Maximum number of differences, or of folders, that a message lists."""
INCOMPATIBLE_KEYS = {
    "model.": "weights of another model",
    "flow:": "weights of another model",
    "trainer.lora": "state of other adapters",
    "optimizer.name": "moments of another optimizer",
}
"""State that no trainer can load after a change, by prefix of the changed key."""
log = logging.getLogger("rlinf")


class OnMismatch(StrEnum):
    """Handling of results that a command would not reproduce: fail, ``--redo`` or ``--keep``."""

    ERROR = "error"
    RECOMPUTE = "recompute"
    KEEP = "keep"

    @classmethod
    def from_flags(cls, *, redo: bool, keep: bool) -> OnMismatch:
        """Return the value for the command-line flags ``--redo`` and ``--keep``.

        Raises:
            ConfigError: both flags are set.
        """
        if redo and keep:
            raise ConfigError("--redo and --keep exclude each other: give one of them")
        return cls.RECOMPUTE if redo else cls.KEEP if keep else cls.ERROR


def check_resumable(state: RunState, on_mismatch: OnMismatch = OnMismatch.ERROR) -> None:
    """Check that the results of a run match its configuration and the code, and apply
    ``on_mismatch`` if they do not.

    Raises:
        MismatchError: ``config.yaml`` was edited, or results do not match.
        ConfigError: ``config.yaml`` cannot be read.
    """
    folder = state.run.folder
    changes = config_edits(folder)
    resolve_mismatches(state, on_mismatch, edits=changes)
    if changes or on_mismatch is not OnMismatch.ERROR or not is_record_complete(folder):
        write_run_record(folder, read_config_values(folder / CONFIG_FILE))


def resolve_mismatches(
    state: RunState,
    on_mismatch: OnMismatch,
    changes: Sequence[str] = (),
    edits: Sequence[str] = (),
) -> None:
    """Find all finished nodes and handle results that this command would not reproduce.

    Args:
        changes: differences between the configuration of this command and that of the run.
        edits: how ``config.yaml`` of the run was edited or damaged.

    Raises:
        MismatchError: some results do not match and ``on_mismatch`` is ERROR; nothing was changed.
    """
    folder = state.run.folder
    previous_code = _read_previous_code(folder)
    state.scan()
    differences = changes = [*edits, *changes]
    if state.mismatched:
        differences = differences + _code_differences(previous_code, state.code)
    if on_mismatch is OnMismatch.RECOMPUTE:
        _recompute(state)
        state.scan()
    elif state.mismatched or changes:
        if on_mismatch is OnMismatch.ERROR:
            _check_results_unaffected(state, differences, edits)
        else:
            _accept_mismatches(state, differences, changes)
        state.scan()
    if previous_code != state.code:
        write_atomic(folder / CODE_FILE, state.code.to_json())


def _check_results_unaffected(
    state: RunState, differences: Sequence[str], edits: Sequence[str]
) -> None:
    """Check that no existing result depends on the differences, and log the differences.

    Raises:
        MismatchError: a result depends on a difference, or the configuration of a run with results
            was edited.
    """
    folder = state.run.folder
    state.scan(accept_mismatches=False)
    has_results = ever_had_results(folder)
    if state.mismatched or state.outputs_outside_graph() or (edits and has_results):
        affected = state.affected_nodes(state.nodes_to_redo())
        raise MismatchError(_mismatch_message(folder, differences, affected, state.graph.flow))
    reason = "no finished result is affected" if has_results else "nothing was finished there"
    log.warning(
        "%s: %s, so the frozen configuration is replaced; differences: %s",
        folder,
        reason,
        "; ".join(_shorten_list(differences)),
    )


def _recompute(state: RunState) -> None:
    """Archive everything that a fresh run of the configuration would not have."""
    accepted = state.run.folder / ACCEPTED_FILE
    if accepted.exists():
        state.archive_path(accepted)
    state.scan(accept_mismatches=False)
    to_redo, outside = state.nodes_to_redo(), state.outputs_outside_graph()
    affected = state.affected_nodes(to_redo)
    _archive_cached_answers(state, affected)
    for node in to_redo:
        state.archive(node)
    for folder in outside:
        state.archive_path(folder)
    if to_redo:
        flow = state.graph.flow
        log.info(
            "recomputing %s; the old results are in %s",
            _summarize(affected, flow),
            state.archive_folder,
        )
    if outside:
        names = ", ".join(str(path.relative_to(state.run.folder)) for path in outside[:MAX_SHOWN])
        more = f" and {len(outside) - MAX_SHOWN} more" if len(outside) > MAX_SHOWN else ""
        log.info("no longer part of the run, now in %s: %s%s", state.archive_folder, names, more)


def _archive_cached_answers(state: RunState, affected: Sequence[StageNode]) -> None:
    """Archive the cached answers of a judge, with their cost, if all rewards are recomputed.

    If some rewards stay, all cached answers stay, because their cost counts against one budget.
    """
    reward_stages = {
        name
        for name, stage in state.graph.flow.all_stages.items()
        if "reward" in stage.config_sections
    }
    existing = {*state.done, *state.unverified, *state.mismatched}
    rewards = {node for node in existing if node.stage in reward_stages}
    cache = state.run.folder / REWARD_CACHE_FOLDER
    if rewards and rewards <= set(affected) and cache.exists():
        state.archive_path(cache)


def _accept_mismatches(state: RunState, differences: Sequence[str], changes: Sequence[str]) -> None:
    """Accept the mismatched results and record the ``differences``, of which ``changes`` concern
    the configuration.

    Raises:
        MismatchError: the run cannot continue from its old state.
    """
    folder = state.run.folder
    keys = [change.removeprefix(f"{CONFIG_FILE}: ") for change in changes]
    incompatible = [
        (description, key)
        for key in keys
        for prefix, description in INCOMPATIBLE_KEYS.items()
        if key.startswith(prefix)
    ]
    if incompatible and state.mismatched:
        description, key = incompatible[0]
        raise MismatchError(
            f"{folder}: --keep cannot continue from the {description} ({key}); "
            "--redo recomputes everything, another run.name starts another run"
        )
    entry = AcceptedMismatch(
        recorded_at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        differences=tuple(differences),
        outputs=dict(state.manifest_keys(state.mismatched)),
    )
    entries = (*state.accepted.entries, entry)
    accepted = state.accepted.model_copy(update={"entries": entries})
    write_atomic(folder / ACCEPTED_FILE, accepted.model_dump_json(indent=1))
    log.info(
        "accepted %s despite differences: %s",
        _summarize(state.mismatched, state.graph.flow),
        "; ".join(_shorten_list(differences)),
    )


def _mismatch_message(
    folder: Path, differences: Sequence[str], affected: Sequence[StageNode], flow: Flow
) -> str:
    return (
        f"{folder}: this command would not reproduce the results of the run; "
        f"{_summarize(affected, flow)} would be recomputed.\n"
        f"differs: {'; '.join(_shorten_list(differences))}\n"
        "--redo recomputes them and archives the old results, --keep continues with the old "
        "results and records the differences in the run\n"
        "(Snakemake: --config redo=1 or keep=1); another run.name starts another run"
    )


def _shorten_list(differences: Sequence[str]) -> list[str]:
    num_more = len(differences) - MAX_SHOWN
    return [*differences[:MAX_SHOWN], *([f"and {num_more} more"] if num_more > 0 else [])]


def _summarize(nodes: Sequence[StageNode], flow: Flow) -> str:
    """Return a summary such as ``SFT, 3 iterations (0 to 2), 1 evaluation``."""
    iterations = sorted({node.iteration for node in nodes if node.stage in flow.stages})
    evaluations = sum(node.stage == EVALUATE for node in nodes)
    parts = ["SFT"] if any(node.stage in flow.setup_stages for node in nodes) else []
    if iterations:
        ends = " to ".join(map(str, dict.fromkeys((iterations[0], iterations[-1]))))
        parts.append(f"{len(iterations)} iteration{'s' * (len(iterations) > 1)} ({ends})")
    if evaluations:
        parts.append(f"{evaluations} evaluation{'s' * (evaluations > 1)}")
    return ", ".join(parts) or "nothing"


def _read_previous_code(folder: Path) -> CodeSnapshot | None:
    try:
        return read_code_snapshot(folder)
    except CodeIdentityError as error:
        log.warning("%s", error)
        return None


def _code_differences(old: CodeSnapshot | None, new: CodeSnapshot) -> list[str]:
    if old is None:
        return ["code: the program that made it did not record its modules"]
    return [f"code: {name}" for name in old.changed_names(new)]


CHANGEABLE_KEYS = ("iterations", "checkpoint", "evaluate.every")
"""Prefixes of keys that a later command may change, because no existing result depends on them."""
SCHEDULE_LENGTH_KEY = "optimizer.lr_decay_iterations"


def create_run(
    config: RunConfig, plan: dict[str, Any] | None, on_mismatch: OnMismatch = OnMismatch.ERROR
) -> Run:
    """Create the run directory, or open it if it holds the same experiment.

    If ``config`` has more iterations than the run, the run is extended. If it has fewer, only this
    command ends earlier: the frozen configuration stays, unless ``on_mismatch`` is RECOMPUTE. A
    directory without any committed stage accepts every configuration.

    Args:
        plan: content of ``plan.yaml``. It replaces an existing plan only if ``config`` names a
            plan, or if an earlier command named one and produced no results. None: the existing
            plan stays.

    Raises:
        MismatchError: the directory holds results or a configuration that do not match.
        ConfigError: a key is unknown, or iterations exceed a schedule that ends at a learning rate
            of 0.
        RunLockedError: the run has a driver.
        InputError: no permission to write in the directory.
    """
    folder = config.run.folder
    effective_settings(config)  # rejects unknown keys before anything is written
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with Run(folder, config).lock():
            if (folder / CONFIG_FILE).exists():
                return _reopen(folder, config, plan, on_mismatch)
            return _create(folder, config, plan or {})


def _create(folder: Path, config: RunConfig, plan: dict[str, Any]) -> Run:
    config, derived = _with_schedule_length(config, config.iterations)
    _check_schedule(config)
    folder.chmod(0o700)
    values = config.model_dump(mode="json")
    write_atomic(folder / PLAN_FILE, yaml.safe_dump(plan, sort_keys=False))
    # Do not inherit the run id of a command that was killed before it wrote its configuration.
    (folder / RUN_FILE).unlink(missing_ok=True)
    write_run_record(folder, values, derived_keys=(*derived, *config.environment_keys))
    write_atomic(folder / CONFIG_FILE, yaml.safe_dump(values, sort_keys=False))
    return Run(folder, load_config(folder / CONFIG_FILE))


def _reopen(
    folder: Path, config: RunConfig, plan: dict[str, Any] | None, on_mismatch: OnMismatch
) -> Run:
    command_iterations = None  # iterations of this command, if the run has more
    try:
        frozen_values = read_config_values(folder / CONFIG_FILE)
        frozen_config = load_config(folder / CONFIG_FILE)
        edits = config_edits(folder)
    except ConfigError as error:
        edits = [str(error).removesuffix(f"; {REPAIR_HINT}")]
        frozen_values = _recorded_values(folder, config)
        frozen_config = RunConfig.model_validate(frozen_values)
    # Without results, or with --redo, the run becomes like a fresh one.
    has_no_results = not ever_had_results(folder)
    starts_over = has_no_results or on_mismatch is OnMismatch.RECOMPUTE
    schedule_length = config.iterations if starts_over else _schedule_length(frozen_config, config)
    config, derived = _with_schedule_length(config, schedule_length)
    derived = (*derived, *_environment_keys(folder, frozen_config, config))
    if config.iterations < frozen_config.iterations and not starts_over:
        command_iterations = config.iterations
        config = config.model_copy(update={"iterations": frozen_config.iterations})
    old_values, new_values = frozen_config.model_dump(mode="json"), config.model_dump(mode="json")
    updated_values = _updated_values(frozen_values, old_values, new_values)
    differences = config_differences(select_semantic(old_values), select_semantic(new_values))
    changes = [change for change in differences if not change.startswith(CHANGEABLE_KEYS)]
    _check_schedule(config)
    run = Run(folder, RunConfig.model_validate(updated_values))
    state = RunState(run, Graph(run.config))
    resolve_mismatches(state, on_mismatch, changes, edits)
    changes += edits
    replaces_config = has_no_results and bool(changes)
    # A command that names no plan does not inherit the plan of a failed command.
    replaces_plan = replaces_config or (has_no_results and frozen_config.plan is not None)
    has_no_plan = not (folder / PLAN_FILE).exists()
    if plan is not None and (config.plan is not None or replaces_plan or has_no_plan):
        write_atomic(folder / PLAN_FILE, yaml.safe_dump(plan, sort_keys=False))
    is_unchanged = not changes and updated_values == frozen_values
    if replaces_config:
        # The run gets a new id and date.
        (folder / RUN_FILE).unlink(missing_ok=True)
    if not is_unchanged:
        # Until ``config.yaml`` is replaced, the record accepts the digests of both configurations.
        write_run_record(
            folder, updated_values, json_digest(select_semantic(frozen_values)), derived
        )
        write_atomic(folder / CONFIG_FILE, yaml.safe_dump(updated_values, sort_keys=False))
    if not is_unchanged or on_mismatch is not OnMismatch.ERROR:
        write_run_record(folder, updated_values, derived_keys=derived)
    if command_iterations is None:
        return run
    text = "this command ends after %d of %d iterations; later results stay"
    log.info(text, command_iterations, run.config.iterations)
    return Run(folder, run.config.model_copy(update={"iterations": command_iterations}))


def _environment_keys(folder: Path, old: RunConfig, config: RunConfig) -> tuple[str, ...]:
    """Return the keys of the task that were read from its environment, by this command or, if the
    task is the same, by an earlier command."""
    if config.environment_keys or old.task.model_dump(mode="json") != config.task.model_dump(
        mode="json"
    ):
        return config.environment_keys
    try:
        record = read_run_record(folder)
    except ConfigError:
        return ()
    derived = record.derived if record is not None else None
    return tuple(key for key in derived or () if key.startswith("task."))


def _recorded_values(folder: Path, config: RunConfig) -> dict[str, Any]:
    """Return the frozen configuration in ``run.json``, for a run whose ``config.yaml`` cannot be
    read; ``config`` if ``run.json`` cannot be read either."""
    complete = config.model_dump(mode="json")
    try:
        record = read_run_record(folder)
    except ConfigError:
        record = None
    if record is None or record.config is None:
        return complete
    return {**{key: complete[key] for key in NON_SEMANTIC_KEYS}, **record.config}


def _updated_values(
    values: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the frozen values with the changes applied.

    A key that the frozen values lack is newer than the run. It is added only if its value changes,
    because adding it would change identities.

    Args:
        values: the frozen values.
        before, after: old and new configuration, with all defaults.
    """
    updated: dict[str, Any] = {}
    for key, new in after.items():
        old = before.get(key)
        if key in values and isinstance(values[key], Mapping) and isinstance(new, Mapping):
            updated[key] = _updated_values(
                values[key], old if isinstance(old, Mapping) else {}, new
            )
        elif key in values or new != old:
            updated[key] = new
    return updated


def _with_schedule_length(config: RunConfig, iterations: int) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the configuration with ``iterations`` as the length of its learning-rate schedule, and
    the key of this length; unchanged and no key if the length is set or there is no schedule."""
    settings = config.optimizer
    is_known = settings.lr_scheduler_type == "constant" or settings.lr_decay_iterations is not None
    if is_known or not iterations:
        # A run without iterations has no schedule length yet.
        return config, ()
    updated = settings.model_copy(update={"lr_decay_iterations": iterations})
    return config.model_copy(update={"optimizer": updated}), (SCHEDULE_LENGTH_KEY,)


def _schedule_length(old: RunConfig, new: RunConfig) -> int:
    """Return the schedule length of an existing run, or, if its schedule had none, a length for the
    new configuration."""
    if old.optimizer.lr_decay_iterations is not None:
        return old.optimizer.lr_decay_iterations
    is_same = old.optimizer.lr_scheduler_type == new.optimizer.lr_scheduler_type
    return old.iterations if is_same else new.iterations


def _check_schedule(config: RunConfig) -> None:
    """Log the learning rate of iterations beyond the schedule.

    Raises:
        ConfigError: this learning rate is 0.
    """
    optimizer = config.optimizer
    length = optimizer.lr_decay_iterations
    if optimizer.lr_scheduler_type == "constant" or length is None or config.iterations <= length:
        return
    last_rate = optimizer.learning_rate(config.iterations - 1, length)
    if not last_rate:
        raise ConfigError(
            f"iterations: the schedule of the learning rate ends at 0 after {length} "
            f"iterations (optimizer.min_lr_ratio: 0), so {config.iterations - length} more would "
            "change nothing; start another run with more iterations, or with "
            "optimizer.min_lr_ratio above 0"
        )
    text = "iterations after the %d of the learning rate schedule use its last rate, %g"
    log.info(text, length, last_rate)
