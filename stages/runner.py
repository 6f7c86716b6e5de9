"""Running one stage instance: check its inputs, run it, commit its output."""

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
    DATA,
    FileEntry,
    Manifest,
    commit,
    content_digest,
    describe_files,
    quarantine,
    read_manifest,
    sweep,
    verify,
)
from rlinf.channels.world import World
from rlinf.config import RunConfig, validate
from rlinf.data.record import joined_digest
from rlinf.errors import (
    ArtifactError,
    ConfigError,
    InputError,
    InputFailed,
    OtherWorkError,
    RlinfError,
    StageError,
    nearest,
    storage_error,
)
from rlinf.user_code import remember_part, user_error
from stages.board import STREAMS
from stages.code import stage_code
from stages.context import Asks, Context, Fault, Input, Live
from stages.flow import flow_of
from stages.identity import read_ledger
from stages.layout import CHANNELS
from stages.lives import PROGRESS, STOPPED
from stages.ranks import Ranks, merged_metrics
from stages.resident import Resident
from stages.usage import METER

FELL = "read_from_disk"
"""In a manifest: inputs that were to come by memory and did not, to one rank at least."""
MEND = "start the run with its first command and --keep, which writes the file anew"


@dataclass(frozen=True)
class StageCall:
    """Which stage to run on what; the content of its command line."""

    stage: str
    config: Path
    out: Path
    iteration: int = 0
    inputs: Mapping[str, Path] = field(default_factory=dict)

    def argv(self) -> tuple[str, ...]:
        """Arguments after ``python -m stages``."""
        words = [self.stage, "--config", str(self.config), "--out", str(self.out)]
        words += ["--iteration", str(self.iteration)]
        for name, folder in self.inputs.items():
            words += ["--input", f"{name}={folder}"]
        return tuple(words)


def load_config(path: Path) -> RunConfig:
    """Read the frozen configuration of a run.

    Raises:
        ConfigError: missing, not YAML, or invalid.
    """
    try:
        return validate(RunConfig, read_config(path))
    except ConfigError as error:
        known = str(error).startswith(str(path))
        raise error if known else ConfigError(f"{path}: {error}") from None


def read_config(path: Path) -> dict[str, Any]:
    """The values of a frozen configuration as they stand there.

    Raises:
        ConfigError: missing, or not a mapping in YAML.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path}: no such file; is this a run directory?") from None
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{path}: damaged ({reason}); {MEND}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path}: damaged (no mapping of sections); {MEND}")
    return values


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def open_inputs(call: StageCall) -> dict[str, Input]:
    """The committed inputs of a call.

    Raises:
        ArtifactError: one is damaged; its manifest is withdrawn so that its stage runs again.
        InputError: one was never committed.
    """
    inputs = {}
    for name, folder in call.inputs.items():
        manifest = read_manifest(folder)
        if manifest is None:
            raise InputError(
                f"{call.stage}: input {name!r} is not there: {folder} has no manifest; "
                "run the stage that makes it first"
            )
        inputs[name] = Input(folder, manifest)
    return inputs


def run_stage(
    call: StageCall,
    *,
    config: RunConfig | None = None,
    resident: Resident | None = None,
    stopping: Callable[[], bool] = lambda: False,
    began: float | None = None,
) -> Manifest:
    """Run a stage instance unless its output is already there; returns its manifest.

    Args:
        began: when the first line of a process that runs this stage alone was reached.

    Raises:
        ConfigError, DataError, InputError: nothing was written.
        ArtifactError: an input is damaged; it was withdrawn.
        RequeueRequested: the allocation is about to end; start the same call again.
        StageError: the stage failed.
    """
    start = time.time()
    config = config or load_config(call.config)
    known = flow_of(config).table
    if call.stage not in known:
        raise ConfigError(f"unknown stage {call.stage!r}{nearest(call.stage, known)}")
    world = World.from_environment(call.config.parent / CHANNELS)
    with contextlib.ExitStack() as ending:
        if resident is None:
            resident = Resident()
            ending.callback(resident.close)
        ending.enter_context(withdrawing())
        attempt = Attempt(
            call,
            config,
            world,
            open_inputs(call),
            resident,
            stopping,
            began=start if began is None else began,
            start=start,
        )
        done = read_manifest(call.out)
        if done is not None:
            if done.key != attempt.ctx.key and not read_ledger(attempt.ctx.run).keeps(done):
                raise OtherWorkError(
                    f"{call.out}: holds a result of another configuration, of other inputs or of "
                    "other code, which stays; start the run again to be told what differs"
                )
            verify(call.out, done, checksums=False)
            return done
        with attempt.ranks.attempting():
            attempt.compute()
            return attempt.commit()


def import_program(config: RunConfig, stage: str) -> ModuleType:
    """The module of a stage; errors that a module of the user's raises count as the user's."""
    name = flow_of(config).program(stage)
    module = importlib.import_module(name)
    remember_part(f"flow: stage {stage}: {name}", module, None)
    return module


class Attempt:
    """One attempt at a stage call: first :meth:`compute`, then :meth:`commit`.

    A stage in a job of its own does one after the other; a pool computes the next stage while it
    commits the one before. Both within :meth:`stages.ranks.Ranks.attempting`.
    """

    def __init__(
        self,
        call: StageCall,
        config: RunConfig,
        world: World,
        inputs: Mapping[str, Input],
        resident: Resident,
        stopping: Callable[[], bool],
        *,
        began: float,
        start: float,
        name: str | None = None,
        live: Live | None = None,
        worker: str = "",
        gathers: bool = False,
        asks: Asks | None = None,
    ) -> None:
        name = name or os.environ.get("RLINF_ATTEMPT") or secrets.token_hex(6)
        self._call, self._began, self._start, self._gathers = call, began, start, gathers
        self.ranks = Ranks(call.out / f"{DATA}{name}", world)
        self._files: dict[str, FileEntry] = {}
        self._fell: set[str] = set()
        """What other ranks said of their files, and of their inputs."""
        self.ctx = Context(
            config=config,
            stage=call.stage,
            iteration=call.iteration,
            run=call.config.parent,
            out=call.out,
            data=self.ranks.data,
            world=world,
            inputs=inputs,
            resident=resident,
            stopping=stopping,
            live=live,
            asks=asks,
            worker=worker,
        )

    def compute(self) -> None:
        """Run the stage."""
        ctx = self.ctx
        stage_code(ctx.run, ctx.config, ctx.stage)  # before any of it runs
        if ctx.world.rank == 0 and ctx.out.is_dir():
            known = read_manifest(ctx.out)
            ours = {ctx.data.name, self.ranks.folder.name}
            sweep(ctx.out, ours | ({known.data} if known else set()))
        ctx.data.mkdir(parents=True, exist_ok=True)
        who = {"rank": ctx.world.rank, "host": socket.gethostname(), "worker": ctx.worker}
        with self._failing(), METER.measuring(ctx.usage, **who):
            module = import_program(ctx.config, ctx.stage)
            (module.gather if self._gathers else module.run)(ctx)
            ctx.took(ctx.stage, self._start)

    def commit(self) -> Manifest:
        """Write what was put off and publish the manifest; all ranks take part.

        Waits for the commits of the inputs.
        """
        ctx = self.ctx
        # Waiting for their commits is no part of the stage's time.
        for entry in ctx.inputs.values():
            entry.waiting = contextlib.nullcontext
        with self._failing():
            _ = ctx.key  # what follows removes old outputs: in the order of the iterations
            while ctx.live and ctx.live.later:
                # What it writes is freed once it is written.
                ctx.live.later.pop(0)()
            self._check_inputs()
            if ctx.world.size > 1:
                self.ranks.report(
                    metrics=ctx.metrics,
                    spans=ctx.spans,
                    usage=ctx.usage,
                    digests=ctx.live.digests if ctx.live else {},
                    faults=ctx.faults,
                    fell=self._fallen(),
                )
                if ctx.world.rank:
                    return self.ranks.committed(ctx.out, ctx.key)
                self._merge_reports()
            return self._publish()

    def _fallen(self) -> list[str]:
        """Inputs that were to come to this process by memory, and were read from disk."""
        return [name for name, entry in self.ctx.inputs.items() if entry.fell]

    def _merge_reports(self) -> None:
        """Wait for what all ranks tell, and put it together in their order."""
        ctx, told = self.ctx, self.ranks.reports()
        if ctx.live is not None:
            digests = [report["digests"] for report in told]
            for channel in {name for found in digests for name in found}:
                ctx.live.digests[channel] = joined_digest(
                    found[channel] for found in digests if channel in found
                )
        ctx.spans = [span for report in told for span in report["spans"]]
        ctx.usage = [entry for report in told for entry in report["usage"]]
        ctx.metrics = merged_metrics([report["metrics"] for report in told])
        ctx.faults = [Fault(*fault) for report in told for fault in report["faults"]]
        for report in told:
            self._files |= report["files"]
            self._fell.update(report["fell"])

    def _check_inputs(self) -> None:
        """What came from memory must be what was committed.

        Each rank has got weights on its own; records are the same for all, and rank 0 looks.
        """
        for name, entry in self.ctx.inputs.items():
            output = entry.output if entry.taken else None
            if output is None or (self.ctx.world.rank and output.streams(name)):
                continue
            if not output.matches(name, entry.manifest):
                raise InputFailed(
                    f"{self.ctx.stage}: {name} of {entry.folder} was committed by another attempt, "
                    "with other content"
                )

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # Asked here, before the attempt's files are removed and there is room again.
            full = None
            if isinstance(error, Exception) and not isinstance(error, RlinfError):
                full = storage_error(error, self.ctx.data)
            self.ctx.let_go()
            if full is not None:
                raise full from error
            if (users := user_error(error)) is not None:
                raise users from None
            raise

    def _publish(self) -> Manifest:
        ctx, call = self.ctx, self._call
        if ctx.live is not None and ctx.live.digests:
            ctx.extra[STREAMS] = ctx.live.digests
        if fell := self._fell.union(self._fallen()):
            ctx.extra[FELL] = sorted(fell)
        from stages.outages import refuse_losses  # it loads torch, which the driver does without

        refuse_losses(ctx.config, ctx.metrics, ctx.faults)
        files = describe_files(ctx.data, self._files)
        metrics = {name: value for name, (value, *_) in sorted(ctx.metrics.items())}
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            raise StageError(f"{call.stage}: metric {bad[0]} is not finite; the log says more")
        manifest = Manifest(
            stage=call.stage,
            iteration=call.iteration,
            key=ctx.key,
            content=content_digest(files, metrics),
            data=ctx.data.name,
            files=files,
            inputs={name: entry.manifest.content for name, entry in ctx.inputs.items()},
            metrics=metrics,
            timing={
                "began": self._began,
                "start": self._start,
                "end": time.time(),
                "spans": ctx.spans,
                "usage": ctx.usage,
            },
            host=socket.gethostname(),
            job=os.environ.get("SLURM_JOB_ID", ""),
            world=ctx.world.size,
            extra=ctx.extra,
        )
        winner = commit(call.out, manifest)
        shutil.rmtree(call.out / PROGRESS, ignore_errors=True)
        (call.out / STOPPED).unlink(missing_ok=True)
        return winner


@contextlib.contextmanager
def withdrawing() -> Iterator[None]:
    """A damaged input loses its commit, so that the stage that made it runs again.

    Any rank may be the only one that read the damaged file.
    """
    try:
        yield
    except ArtifactError as error:
        quarantine(error.manifest, error.data)
        raise
