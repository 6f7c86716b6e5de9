"""The measurements of a profiling job, which runs the stages of a run for several iterations.

The learning rate is too small to change a weight, so all repeats and all numbers of processes do
the same work.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.graph import Graph, StageNode
from pipeline.planning.profile.measurement import (
    ProfileTask,
    RunningStage,
    StageTiming,
    Trial,
    load_trial,
)
from pipeline.planning.profile.schema import read_json, validate_section
from rlinf.artifacts import MANIFEST, Manifest, read_manifest, write_atomic
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.channels.record_files import RecordFileReader
from rlinf.config import RunConfig
from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.device_memory import DeviceMemoryManager
from rlinf.errors import RequeueRequested
from rlinf.models.base import local_device
from rlinf.trainers.base import Trainer
from slurm.stop_signals import StopFlag
from stages.factory import policy_class
from stages.layout import CHANNELS_FOLDER, CONFIG_FILE, stage_folder
from stages.runner import StageCall, load_config, run_stage
from stages.worker_state import WorkerState

FROZEN_OPTIMIZER = {
    "lr": 1e-30,
    "group_lr": {},
    "lr_warmup_iterations": 0,
    "lr_scheduler_type": "constant",
}
"""Optimizer settings that leave the weights unchanged."""
JOB_STARTED_VARIABLE = "RLINF_JOB_STARTED"
"""Environment variable with the time at which the batch script began, seconds since the epoch."""
MAX_LENGTH_ROLLOUTS = 4
"""Maximum number of rollouts of the full batch whose response lengths are recorded."""
OFFLOAD_REPEATS = 3
"""Number of times that the trainer's state is offloaded and loaded again."""


def run_task(path: Path, first_line_at: float, imported_at: float) -> None:
    """Run a task file, and write a manifest with the end time. The arguments are the times of the
    first line of code and of the end of the imports, seconds since the epoch."""
    task = validate_section(ProfileTask, read_json(path, f"no file {path}"), path)
    os.environ["WORLD_SIZE"] = str(task.processes)
    if int(os.environ.get("RANK", "0")) >= task.processes:
        return
    world = ProcessGroupInfo.from_environment(task.folder / CHANNELS_FOLDER)
    config = load_config(task.config)
    scratch = task.folder / f"work-{os.environ.get('RLINF_ATTEMPT', 'alone')}"
    bench = StageBench(task, config, world, scratch, imported_at)
    bench.record_startup(first_line_at)
    try:
        bench.run(time.time() + task.seconds)
    finally:
        if world.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
    if world.rank == 0:
        write_atomic(task.folder / MANIFEST, json.dumps({"ended": time.time()}))


@dataclass
class StageBench:
    """The measurements of a profiling job on one rank; rank 0 writes the trial."""

    task: ProfileTask
    config: RunConfig
    world: ProcessGroupInfo
    scratch: Path
    """Folder of the outputs of the measured stages."""
    imported_at: float
    """Time at which the imports were done, seconds since the epoch."""
    worker_state: WorkerState = field(default_factory=WorkerState)
    stages_run: set[str] = field(default_factory=set)
    """Stages that this process has run."""
    imports_s: float = 0.0
    """Seconds of the imports at the start, without imports on first use."""
    connect_s: float = 0.0
    """Seconds to create the process group; set to 0 once ``trainer_load`` includes them."""
    first_load_s: float = 0.0
    """Seconds to load the weights for the first time, including imports on first use."""
    num_iterations: int = 0
    """Number of iterations that this process has run."""

    def __post_init__(self) -> None:
        self.graph = Graph(self.config)
        task = self.task
        saved = load_trial(task.trial_path)
        new_trial = Trial(key=task.key, nodes=task.nodes, processes=task.processes)
        self.trial = new_trial if saved is None or saved.key != task.key else saved
        self.device = _trainer_device(self.config)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def record_startup(self, first_line_at: float) -> None:
        """Record the time to start this job, create the process group, and load the weights."""
        job_start = float(os.environ.get(JOB_STARTED_VARIABLE, self.task.submitted))
        if JOB_STARTED_VARIABLE in os.environ and self.task.first:
            self.add_overhead("submission", job_start - self.task.submitted)
        self.add_overhead("startup", first_line_at - job_start)
        self.imports_s = self.imported_at - first_line_at
        start = time.perf_counter()
        if self.world.size > 1:
            self.world.init_process_group(self.device.type)
        self.connect_s = time.perf_counter() - start
        # Load once here, so that later loads do not include imports on first use.
        start = time.perf_counter()
        policy, options = policy_class(self.config)
        weights = read_manifest(self.task.initial)
        if weights is not None:
            policy.load(self.task.initial / weights.data / "weights", options)
        self.first_load_s = time.perf_counter() - start

    def run(self, deadline: float) -> None:
        """Measure iterations until all times have converged or time is up.

        Every process runs at least two iterations, a cold and a warm one, even if time is up.
        """
        if self.world.rank == 0:
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.scratch.mkdir(parents=True)
        longest_s = 0.0
        with StopFlag() as stop, contextlib.suppress(RequeueRequested):
            while True:
                batch_size = self.trial.next_batch_size(self.task.batch_sizes)
                is_late = time.time() + longest_s > deadline and self.num_iterations >= 2
                should_end = batch_size is None or is_late or stop.is_set()
                batch_size = self.broadcast_number(0 if should_end else batch_size or 0)
                if not batch_size:
                    return
                start = time.time()
                self.run_iteration(batch_size, stop.is_set)
                longest_s = max(longest_s, time.time() - start)
                if self.num_iterations == 1:
                    self.record_imports()
                    self.measure_offload()

    def run_iteration(self, batch_size: int, should_stop: Callable[[], bool]) -> None:
        """Run all stages of one iteration."""
        config = config_for_batch_size(self.config, batch_size)
        samples = batch_size * config.rollout.group_size
        is_warm = self.stages_run.issuperset(self.graph.flow.stages)
        total_s = 0.0
        for stage in self.graph.flow.stages:
            self.update_trial(
                running=RunningStage(stage=stage, batch_size=batch_size, samples=samples)
            )
            node = StageNode(stage, self.num_iterations)
            inputs = {name: self.folder(n) for name, n in self.graph.inputs(node).items()}
            # The sync stage prunes old outputs in the folder of this configuration file.
            call = StageCall(
                stage, self.scratch / CONFIG_FILE, self.folder(node), self.trial.iterations, inputs
            )
            _reset_peak_memory()
            # Begin on all ranks at the same time, although rank 0 may have written files.
            self.broadcast_number(0)
            manifest = run_stage(
                call, config=config, worker_state=self.worker_state, should_stop=should_stop
            )
            peak_bytes = self.max_across_ranks(_peak_memory_bytes())
            if self.world.rank == 0:
                total_s += self.record_stage(manifest, samples, peak_bytes)
            self.stages_run.add(stage)
        change: dict[str, Any] = {"running": None, "iterations": self.trial.iterations + 1}
        change["memory"] = "device" if _on_gpu() else "host"
        if is_warm and self.world.rank == 0:
            change["repeats"] = self.trial.with_repeat(batch_size, total_s).repeats
        self.update_trial(**change)
        if self.world.rank == 0 and self.num_iterations:
            shutil.rmtree(
                stage_folder(
                    self.scratch, self.graph.flow.publish_stage, self.num_iterations - 1
                ).parent
            )
        self.num_iterations += 1

    def folder(self, node: StageNode) -> Path:
        """Return the folder of a stage's output: in the run for SFT, else in the scratch folder."""
        if node.stage in self.graph.flow.setup_stages:
            return self.task.initial.with_name(node.stage)
        return stage_folder(self.scratch, node.stage, node.iteration)

    def record_stage(self, manifest: Manifest, samples: int, peak_bytes: int) -> float:
        """Add a stage's measurement to the trial, and return its seconds without loading and
        offloading."""
        stage = manifest.stage
        folder = stage_folder(self.scratch, stage, self.num_iterations)
        part_seconds, flow = span_seconds(manifest), self.graph.flow
        load_s = part_seconds.pop("load", 0.0)
        # Offloading depends on the stages that share the device, so the planner adds it itself.
        offload_s = part_seconds.pop("offload", 0.0) + part_seconds.pop("onload", 0.0)
        seconds = max(0.0, manifest.timing["end"] - manifest.timing["start"] - load_s - offload_s)
        if load_s and flow.all_stages[stage].holds == "engine":
            self.add_overhead("weight_load" if stage in self.stages_run else "engine_load", load_s)
        elif load_s:
            self.add_overhead("trainer_load", load_s + self.connect_s)
            self.connect_s = 0.0
        is_full = samples == self.config.rollout.batch_size * self.config.rollout.group_size
        if stage == flow.producer_of("trajectories") and is_full:
            files = (folder / manifest.data).glob("trajectories-*.h5")
            self.record_lengths(map(Trajectory.from_record, RecordFileReader(files)))
        if stage == flow.publish_stage:
            self.add_overhead("publish", part_seconds["publish"])
            self.update_trial(weights_bytes=int(manifest.metrics["bytes"]))
        timing = StageTiming(
            stage=stage,
            samples=samples,
            cold=stage not in self.stages_run,
            seconds=seconds,
            peak_memory_bytes=peak_bytes,
        )
        self.update_trial(samples=(*self.trial.samples, timing))
        return seconds

    def record_lengths(self, trajectories: Iterable[Trajectory]) -> None:
        """Record the length of each response of a rollout, in steps without tool outputs."""
        if len(self.trial.lengths) < MAX_LENGTH_ROLLOUTS:
            lengths = tuple(sorted(int(loss_mask(each).sum()) for each in trajectories))
            self.update_trial(lengths=(*self.trial.lengths, lengths))

    def record_imports(self) -> None:
        """Record the time of imports. Imports on first use count too: their time is the first load
        of the weights minus the shortest later load."""
        overheads = self.trial.overheads_s
        names = ("engine_load", "trainer_load")
        loads = [overheads[name][-1] for name in names if name in overheads]
        late_imports_s = max(0.0, self.first_load_s - min(loads, default=self.first_load_s))
        self.add_overhead("imports", self.imports_s + late_imports_s)

    def _trainer(self) -> Trainer | None:
        state = self.worker_state.trainer
        return None if state is None else state.trainer

    def measure_offload(self) -> None:
        """Measure offloading the trainer's state to host memory and loading it back."""
        trainer, device_memory = self._trainer(), self.worker_state.device_memory
        if trainer is None or device_memory is None:
            return
        device_memory.acquire(trainer)
        # Without a limit, the whole state is moved.
        unlimited = DeviceMemoryManager(self.device, sys.maxsize)
        unlimited.acquire(trainer)
        for _ in range(OFFLOAD_REPEATS):
            unlimited.offload_all(span=self.timed)
            unlimited.acquire(trainer, span=self.timed)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record the time of a block as an overhead."""
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.add_overhead(name, time.perf_counter() - start)

    def add_overhead(self, name: str, seconds: float) -> None:
        """Add one measurement of an overhead."""
        self.trial = self.trial.with_overhead(name, seconds)

    def update_trial(self, **changes: Any) -> None:
        """Update the trial, and write it on rank 0."""
        self.trial = self.trial.model_copy(update=changes)
        if self.world.rank == 0:
            self.trial.save(self.task.trial_path)

    def broadcast_number(self, number: int) -> int:
        """Return the number that rank 0 passes, on all ranks."""
        return self._all_reduce(number if self.world.rank == 0 else 0, dist.ReduceOp.SUM)

    def max_across_ranks(self, number: int) -> int:
        """Return the maximum over all ranks."""
        return self._all_reduce(number, dist.ReduceOp.MAX)

    def _all_reduce(self, number: int, operation: Any) -> int:
        if self.world.size == 1:
            return number
        tensor = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(tensor, operation)
        return int(tensor)


def config_for_batch_size(config: RunConfig, batch_size: int) -> RunConfig:
    """Return the run's configuration with a batch size and ``FROZEN_OPTIMIZER``."""
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"batch_size": batch_size}),
            "optimizer": config.optimizer.model_copy(update=FROZEN_OPTIMIZER),
        }
    )


def span_seconds(manifest: Manifest) -> dict[str, float]:
    """Return the seconds of each timed part of a stage, those of the slowest rank."""
    sums: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in manifest.timing["spans"]:
        if span["name"] != manifest.stage:
            sums[span["name"]][span["rank"]] += span["end"] - span["start"]
    return {name: max(0.0, *ranks.values()) for name, ranks in sums.items()}


def _trainer_device(config: RunConfig) -> torch.device:
    return local_device(str((config.trainer.model_extra or {}).get("device", "auto")))


def _on_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _reset_peak_memory() -> None:
    if _on_gpu():
        torch.cuda.reset_peak_memory_stats()
    else:
        # proc(5): writing 5 resets the peak resident set size; this needs permission.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _peak_memory_bytes() -> int:
    if _on_gpu():
        return int(torch.cuda.max_memory_allocated())
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(r.split()[1]) for r in status.splitlines() if r.startswith("VmHWM"))
