"""Running one stage instance: check its inputs, run it, commit its output."""

from __future__ import annotations

import importlib
import json
import math
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlinf.artifacts import (
    Manifest,
    attempt_folder,
    commit,
    content_digest,
    describe_files,
    quarantine,
    read_manifest,
    sweep,
    verify,
    write_atomic,
)
from rlinf.config import RunConfig, validate
from rlinf.errors import (
    ArtifactError,
    ConfigError,
    InputError,
    RlinfError,
    StageError,
    nearest,
    storage_error,
)
from rlinf.trainers.world import World
from stages import SECTIONS
from stages.context import Context, Input
from stages.identity import stage_key

UNSTABLE = frozenset({".metadata"})
"""Files whose bytes differ between equal runs: torch.distributed.checkpoint puts a random id in."""
RANK_TIMEOUT_S = 600.0


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
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; is this a run directory?") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of sections")
    return validate(RunConfig, values)


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
    resident: dict[str, Any] | None = None,
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
    began = start if began is None else began
    if call.stage not in SECTIONS:
        raise ConfigError(f"unknown stage {call.stage!r}{nearest(call.stage, SECTIONS)}")
    config = config or load_config(call.config)
    world = World.from_environment()
    try:
        inputs = open_inputs(call)
        digests = {name: entry.manifest.content for name, entry in inputs.items()}
        key = stage_key(config, call.stage, call.iteration, digests)
        done = read_manifest(call.out)
        if done is not None and done.key == key:
            verify(call.out, done, checksums=False)
            return done
        return _attempt(call, config, world, inputs, key, resident, stopping, (began, start))
    except ArtifactError as error:
        if world.rank == 0:
            quarantine(error.manifest)
        raise


def _attempt(
    call: StageCall,
    config: RunConfig,
    world: World,
    inputs: dict[str, Input],
    key: str,
    resident: dict[str, Any] | None,
    stopping: Callable[[], bool],
    times: tuple[float, float],
) -> Manifest:
    attempt = os.environ.get("RLINF_ATTEMPT") or secrets.token_hex(6)
    if world.rank == 0 and call.out.is_dir():
        known = read_manifest(call.out)
        keep = {known.data} if known else set()
        sweep(call.out, keep | {f"data-{attempt}"})
    with attempt_folder(call.out, attempt) as data:
        ctx = Context(
            config=config,
            stage=call.stage,
            iteration=call.iteration,
            run=call.config.parent,
            out=call.out,
            data=data,
            world=world,
            key=key,
            inputs=inputs,
            resident={} if resident is None else resident,
            stopping=stopping,
        )
        try:
            importlib.import_module(f"stages.{call.stage}").run(ctx)
        except RlinfError:
            raise
        except Exception as error:
            # Asked here, before the attempt's files are removed and there is room again.
            full = storage_error(error, data)
            if full is not None:
                raise full from error
            raise
        ctx.spans.append(
            {
                "name": call.stage,
                "rank": world.rank,
                "host": socket.gethostname(),
                "start": times[1],
                "end": time.time(),
            }
        )
        if world.size > 1:
            report = {"metrics": ctx.metrics, "spans": ctx.spans, "extra": ctx.extra}
            write_atomic(data / f".rank-{world.rank}.json", json.dumps(report))
            if world.rank:
                return _settled(ctx, _await_commit(call.out, key))
            _merge_ranks(ctx)
        return _settled(ctx, _commit(call, ctx, key, times))


def _settled(ctx: Context, manifest: Manifest) -> Manifest:
    """Remember on every rank alike what the resident objects now hold."""
    if ctx.stage == "train" and "trainer" in ctx.resident:
        from stages.parts import trainer_moved

        trainer_moved(ctx, manifest.content)
    return manifest


def _commit(call: StageCall, ctx: Context, key: str, times: tuple[float, float]) -> Manifest:
    began, start = times
    files = describe_files(ctx.data, UNSTABLE)
    metrics = {name: value for name, (value, _) in sorted(ctx.metrics.items())}
    bad = [name for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        raise StageError(f"{call.stage}: metric {bad[0]} is not finite")
    manifest = Manifest(
        stage=call.stage,
        iteration=call.iteration,
        key=key,
        content=content_digest(files, metrics),
        data=ctx.data.name,
        files=files,
        inputs={name: entry.manifest.content for name, entry in ctx.inputs.items()},
        metrics=metrics,
        timing={"began": began, "start": start, "end": time.time(), "spans": ctx.spans},
        host=socket.gethostname(),
        job=os.environ.get("SLURM_JOB_ID", ""),
        world=ctx.world.size,
        extra=ctx.extra,
    )
    winner = commit(call.out, manifest)
    shutil.rmtree(call.out / "progress", ignore_errors=True)
    return winner


def _merge_ranks(ctx: Context) -> None:
    """Wait for the reports of all ranks and combine them, in rank order."""
    deadline = time.monotonic() + RANK_TIMEOUT_S
    reports = []
    for rank in range(ctx.world.size):
        path = ctx.data / f".rank-{rank}.json"
        while not path.exists():
            if time.monotonic() > deadline:
                raise StageError(f"{ctx.stage}: rank {rank} never finished")
            time.sleep(0.02)
        reports.append(json.loads(path.read_text()))
        path.unlink()
    ctx.spans = [span for report in reports for span in report["spans"]]
    names = sorted({name for report in reports for name in report["metrics"]})
    for name in names:
        parts = [report["metrics"][name] for report in reports if name in report["metrics"]]
        weight = sum(part[1] for part in parts)
        if weight:
            ctx.metrics[name] = (sum(v * w for v, w in parts) / weight, weight)
        else:
            ctx.metrics[name] = (sum(part[0] for part in parts), 0.0)


def _await_commit(out: Path, key: str) -> Manifest:
    deadline = time.monotonic() + RANK_TIMEOUT_S
    while time.monotonic() < deadline:
        manifest = read_manifest(out)
        if manifest is not None and manifest.key == key:
            return manifest
        time.sleep(0.02)
    raise StageError(f"{out}: rank 0 never committed")
