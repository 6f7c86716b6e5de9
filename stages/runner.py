"""Run a stage of one iteration: verify its inputs, compute, and commit its output."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from rlinf.artifacts import (
    DATA_PREFIX,
    FileEntry,
    Manifest,
    commit_output,
    content_digest,
    describe_files,
    read_manifest,
    remove_uncommitted,
    verify_output,
    withdraw_manifest,
)
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import RunConfig, validate
from rlinf.data.record import combine_digests
from rlinf.errors import (
    ArtifactError,
    ConfigError,
    ConflictingOutputError,
    InputError,
    RlinfError,
    StageError,
    UpstreamFailed,
    did_you_mean,
    to_resource_error,
)
from rlinf.user_code import register_user_component, to_user_code_error
from stages.context import DialogueFailure, LiveContext, RemotePolicy, StageContext, StageInput
from stages.flow import flow_of
from stages.identity import read_accepted_mismatches, stage_code_digest
from stages.layout import CHANNELS_FOLDER
from stages.live_store import STREAM_DIGESTS
from stages.progress_watchdog import timeout_from_environment, watch_progress
from stages.rank_reports import AttemptRanks, reduce_metrics
from stages.resource_usage import USAGE_METER
from stages.timeout_retries import PROGRESS_FOLDER, TIMEOUTS_FILE
from stages.worker_state import COMPUTING, WorkerState

DISK_FALLBACKS = "read_from_disk"
"""Key of a manifest's ``extra``: inputs that a rank read from disk although memory was expected."""
REPAIR_HINT = "start the run with its first command and --keep, which writes the file again"


@dataclass(frozen=True)
class StageCall:
    """The arguments of one stage run, as on the command line of ``python -m stages``."""

    stage: str
    config_path: Path
    output_folder: Path
    iteration: int = 0
    """Iteration, from 0; for ``evaluate`` the version of the weights."""
    inputs: Mapping[str, Path] = field(default_factory=dict)
    """Output folder that each input is read from, by name of the input."""

    def argv(self) -> tuple[str, ...]:
        """Return the arguments after ``python -m stages``."""
        arguments = [self.stage, "--config", str(self.config_path)]
        arguments += ["--out", str(self.output_folder), "--iteration", str(self.iteration)]
        for name, folder in self.inputs.items():
            arguments += ["--input", f"{name}={folder}"]
        return tuple(arguments)


def load_config(path: Path) -> RunConfig:
    """Read the frozen configuration of a run.

    Raises:
        ConfigError: the file is missing, not YAML, or invalid.
    """
    try:
        return validate(RunConfig, read_config_values(path))
    except ConfigError as error:
        names_path = str(error).startswith(str(path))
        raise error if names_path else ConfigError(f"{path}: {error}") from None


def read_config_values(path: Path) -> dict[str, Any]:
    """Return the values of a frozen configuration without validating them.

    Raises:
        ConfigError: the file is missing, or not a YAML mapping.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path}: no such file; is this a run directory?") from None
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{path}: damaged ({reason}); {REPAIR_HINT}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path}: damaged (no mapping of sections); {REPAIR_HINT}")
    return values


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def open_inputs(call: StageCall) -> dict[str, StageInput]:
    """Return the committed inputs of a call.

    Raises:
        ArtifactError: an input is damaged; its manifest is withdrawn so that its stage runs again.
        InputError: an input was never committed.
    """
    inputs = {}
    for name, folder in call.inputs.items():
        manifest = read_manifest(folder)
        if manifest is None:
            raise InputError(
                f"{call.stage}: input {name!r} is not there: {folder} has no manifest; "
                "run the stage that produces it first"
            )
        inputs[name] = StageInput(folder, manifest)
    return inputs


def run_stage(
    call: StageCall,
    *,
    config: RunConfig | None = None,
    worker_state: WorkerState | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    process_start: float | None = None,
    progress_timeout_s: float | None = None,
) -> Manifest:
    """Run a stage unless its output is committed; return the manifest of the output.

    Args:
        config: the frozen configuration; None: read from the file that the call names.
        worker_state: loaded components to use; None: the stage loads its own.
        process_start: Unix time at which the process began, if it runs only this stage.
        progress_timeout_s: see :class:`StageAttempt`.

    Raises:
        ConfigError, DataError, InputError: the call is invalid; nothing was written.
        ArtifactError: an input is damaged; its commit was withdrawn.
        RequeueRequested: the allocation is about to end; start the same call again.
        StageError: the stage failed.
    """
    start = time.time()
    config = config or load_config(call.config_path)
    stages = flow_of(config).all_stages
    if call.stage not in stages:
        raise ConfigError(f"unknown stage {call.stage!r}{did_you_mean(call.stage, stages)}")
    world = ProcessGroupInfo.from_environment(call.config_path.parent / CHANNELS_FOLDER)
    with contextlib.ExitStack() as exit_stack:
        if worker_state is None:
            worker_state = WorkerState()
            exit_stack.callback(worker_state.close)
        exit_stack.enter_context(withdraw_on_damage())
        attempt = StageAttempt(
            call,
            config,
            world,
            open_inputs(call),
            worker_state,
            should_stop,
            process_start=start if process_start is None else process_start,
            start=start,
            progress_timeout_s=progress_timeout_s,
        )
        committed = read_manifest(call.output_folder)
        if committed is not None:
            if committed.key != attempt.ctx.key and not read_accepted_mismatches(
                attempt.ctx.run_folder
            ).accepts(committed):
                raise ConflictingOutputError(
                    f"{call.output_folder}: holds a result of another configuration, of "
                    "other inputs or of other code, which stays; start the run again, which "
                    "lists the differences"
                )
            verify_output(call.output_folder, committed, checksums=False)
            return committed
        with attempt.ranks.attempt_scope():
            attempt.compute()
            return attempt.commit()


def import_stage_module(config: RunConfig, stage: str) -> ModuleType:
    """Import the module of a stage. Errors of a user's module are reported as the user's."""
    name = flow_of(config).module_of(stage)
    module = importlib.import_module(name)
    register_user_component(f"flow: stage {stage}: {name}", module, None)
    return module


class StageAttempt:
    """One attempt at a stage call: first :meth:`compute`, then :meth:`commit`.

    A stage in its own job computes and then commits. A pool worker computes the next stage while it
    commits this one. Both run inside :meth:`stages.rank_reports.AttemptRanks.attempt_scope`.

    Args:
        process_start: Unix time at which the process, or in a pool the stage, began.
        start: Unix time at which the stage began.
        name: name of the attempt; None: from the variable ``RLINF_ATTEMPT``, or random.
        worker: name of the pool worker; empty if the stage has its own job.
        receives_trajectories: whether rollout workers generate the trajectories of this rollout.
        progress_timeout_s: seconds from one step of progress to the next, see
            :mod:`stages.progress_watchdog`; 0: no deadline; None: as in the environment.
        report_stall: called with the reason before a process without progress ends.
    """

    def __init__(
        self,
        call: StageCall,
        config: RunConfig,
        world: ProcessGroupInfo,
        inputs: Mapping[str, StageInput],
        worker_state: WorkerState,
        should_stop: Callable[[], bool],
        *,
        process_start: float,
        start: float,
        name: str | None = None,
        live: LiveContext | None = None,
        worker: str = "",
        receives_trajectories: bool = False,
        remote_policy: RemotePolicy | None = None,
        progress_timeout_s: float | None = None,
        report_stall: Callable[[str], None] = lambda message: None,
    ) -> None:
        name = name or os.environ.get("RLINF_ATTEMPT") or secrets.token_hex(6)
        self._call, self._process_start, self._start = call, process_start, start
        self._receives_trajectories = receives_trajectories
        self._progress_timeout_s = (
            timeout_from_environment() if progress_timeout_s is None else progress_timeout_s
        )
        self._report_stall = report_stall
        self.ranks = AttemptRanks(call.output_folder / f"{DATA_PREFIX}{name}", world)
        self._files: dict[str, FileEntry] = {}
        """On rank 0: the files that other ranks wrote, from their reports."""
        self._disk_fallbacks: set[str] = set()
        """On rank 0: inputs that any rank read from disk although memory was expected."""
        self.ctx = StageContext(
            config=config,
            stage=call.stage,
            iteration=call.iteration,
            run_folder=call.config_path.parent,
            output_folder=call.output_folder,
            data_folder=self.ranks.data_folder,
            world=world,
            inputs=inputs,
            worker_state=worker_state,
            should_stop=should_stop,
            live=live,
            remote_policy=remote_policy,
            worker=worker,
        )

    def compute(self) -> None:
        """Run the stage."""
        ctx = self.ctx
        stage_code_digest(ctx.run_folder, ctx.config, ctx.stage)  # raises if the code has changed
        if ctx.world.rank == 0 and ctx.output_folder.is_dir():
            committed = read_manifest(ctx.output_folder)
            kept = {ctx.data_folder.name, self.ranks.ranks_folder.name}
            remove_uncommitted(ctx.output_folder, kept | ({committed.data} if committed else set()))
        ctx.data_folder.mkdir(parents=True, exist_ok=True)
        labels = {"rank": ctx.world.rank, "host": socket.gethostname(), "worker": ctx.worker}
        watch = watch_progress(
            f"{ctx.stage}/{ctx.iteration}",
            self._progress_timeout_s,
            lambda: ctx.activity != COMPUTING,
            self.ranks if ctx.world.size > 1 else None,
            self._report_stall,
        )
        with self._translate_errors(), watch, USAGE_METER.measure(ctx.usage, **labels):
            module = import_stage_module(ctx.config, ctx.stage)
            (module.receive_trajectories if self._receives_trajectories else module.run)(ctx)
            ctx.add_span(ctx.stage, self._start)

    def commit(self) -> Manifest:
        """Run the deferred writes and publish the manifest; all ranks take part.

        Waits for the commits of the inputs.
        """
        ctx = self.ctx
        # Waiting for the commits of inputs is not recorded as time of the stage.
        for stage_input in ctx.inputs.values():
            stage_input.wait_scope = contextlib.nullcontext
        with self._translate_errors():
            # Reading the key waits for the inputs' commits, so old outputs are removed in order.
            _ = ctx.key
            while ctx.live and ctx.live.deferred_writes:
                # Removed from the list first, so that its data is freed once it is written.
                ctx.live.deferred_writes.pop(0)()
            self._check_inputs()
            if ctx.world.size > 1:
                self.ranks.write_report(
                    ctx.discarded_files,
                    metrics=ctx.metrics,
                    spans=ctx.spans,
                    usage=ctx.usage,
                    digests=ctx.live.stream_digests if ctx.live else {},
                    faults=ctx.dialogue_failures,
                    fallbacks=self._rank_fallbacks(),
                )
                if ctx.world.rank:
                    return self.ranks.wait_for_commit(ctx.output_folder, ctx.key)
                self._merge_reports()
            return self._commit_manifest()

    def _rank_fallbacks(self) -> list[str]:
        """Return the inputs that this rank read from disk although memory was expected."""
        inputs = self.ctx.inputs
        return [name for name in inputs if inputs[name].used_disk_fallback]

    def _merge_reports(self) -> None:
        """Wait for the reports of all ranks and merge them in rank order."""
        ctx, reports = self.ctx, self.ranks.wait_for_reports()
        if ctx.live is not None:
            rank_digests = [report["digests"] for report in reports]
            for channel in {name for digests in rank_digests for name in digests}:
                ctx.live.stream_digests[channel] = combine_digests(
                    digests[channel] for digests in rank_digests if channel in digests
                )
        ctx.spans = [span for report in reports for span in report["spans"]]
        ctx.usage = [entry for report in reports for entry in report["usage"]]
        ctx.metrics = reduce_metrics([report["metrics"] for report in reports])
        ctx.dialogue_failures = [
            DialogueFailure(*failure) for report in reports for failure in report["faults"]
        ]
        for report in reports:
            self._files |= report["files"]
            self._disk_fallbacks.update(report["fallbacks"])

    def _check_inputs(self) -> None:
        """Check that inputs from memory equal the committed inputs.

        Each rank checks its weights. Records are equal on all ranks, so only rank 0 checks them.
        """
        for name, stage_input in self.ctx.inputs.items():
            output = stage_input.live_output if stage_input.used_live else None
            if output is None or (self.ctx.world.rank and output.has_stream(name)):
                continue
            if not output.matches_commit(name, stage_input.manifest):
                raise UpstreamFailed(
                    f"{self.ctx.stage}: {name} of {stage_input.folder} was committed by another "
                    "attempt, with other content"
                )

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # Check for a full disk before the attempt's files are removed, which frees space.
            resource_error = None
            if isinstance(error, Exception) and not isinstance(error, RlinfError):
                resource_error = to_resource_error(error, self.ctx.data_folder)
            self.ctx.release()
            if resource_error is not None:
                raise resource_error from error
            if (user_error := to_user_code_error(error)) is not None:
                raise user_error from None
            raise

    def _commit_manifest(self) -> Manifest:
        ctx, call = self.ctx, self._call
        if ctx.live is not None and ctx.live.stream_digests:
            ctx.manifest_extra[STREAM_DIGESTS] = ctx.live.stream_digests
        if fallbacks := self._disk_fallbacks.union(self._rank_fallbacks()):
            ctx.manifest_extra[DISK_FALLBACKS] = sorted(fallbacks)
        from stages.dialogue_failures import (
            check_failure_limits,  # imports torch, which the driver does not need
        )

        check_failure_limits(ctx.config, ctx.metrics, ctx.dialogue_failures)
        self._files |= ctx.discarded_files or {}
        files = describe_files(ctx.data_folder, self._files)
        metrics = {name: value for name, (value, *_) in sorted(ctx.metrics.items())}
        if invalid := [name for name, value in metrics.items() if not math.isfinite(value)]:
            raise StageError(f"{call.stage}: metric {invalid[0]} is not finite; the log says more")
        manifest = Manifest(
            stage=call.stage,
            iteration=call.iteration,
            key=ctx.key,
            content=content_digest(files, metrics),
            data=ctx.data_folder.name,
            files=files,
            inputs={name: stage_input.manifest.content for name, stage_input in ctx.inputs.items()},
            metrics=metrics,
            timing={
                "began": self._process_start,
                "start": self._start,
                "end": time.time(),
                "spans": ctx.spans,
                "usage": ctx.usage,
            },
            host=socket.gethostname(),
            job=os.environ.get("SLURM_JOB_ID", ""),
            world=ctx.world.size,
            extra=ctx.manifest_extra,
        )
        is_pruned = ctx.discarded_files is not None
        committed = commit_output(call.output_folder, manifest, is_pruned=is_pruned)
        shutil.rmtree(call.output_folder / PROGRESS_FOLDER, ignore_errors=True)
        (call.output_folder / TIMEOUTS_FILE).unlink(missing_ok=True)
        return committed


@contextlib.contextmanager
def withdraw_on_damage() -> Iterator[None]:
    """Withdraw the commit of a damaged input, so that the stage that produced it runs again.

    Every rank withdraws it, because only one rank may have read the damaged file.
    """
    try:
        yield
    except ArtifactError as error:
        withdraw_manifest(error.manifest, error.data)
        raise
