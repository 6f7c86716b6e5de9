"""Measuring inside a job: the run's own stages, iteration after iteration, on this job's ranks.

The stages run as in a run whose learning rate is too small to change a weight, so that every
repeat, and every number of processes, does the same work.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.flow import Graph, Node
from pipeline.planning.profile import links
from pipeline.planning.profile.schema import Link, read_json, validated
from pipeline.planning.profile.trial import Case, Running, Sample, Task, Trial, load_trial
from rlinf.artifacts import MANIFEST, Manifest, read_manifest, write_atomic
from rlinf.channels.file import FileReader
from rlinf.channels.world import World
from rlinf.config import RunConfig
from rlinf.data.counted import counted
from rlinf.data.record import Record
from rlinf.errors import RequeueRequested
from rlinf.models.device import local_device
from rlinf.residency import Residency
from rlinf.trainers.base import Trainer
from slurm.signals import StopFlag
from stages.layout import CHANNELS, CONFIG, stage_folder
from stages.parts import policy_class
from stages.resident import Resident
from stages.runner import StageCall, load_config, run_stage

STILL = {"lr": 1e-30, "group_lr": {}, "lr_warmup": 0, "schedule": "constant"}
"""Optimizer settings under which weights stay as they are."""
STARTED = "RLINF_JOB_STARTED"
"""Environment variable: when the batch script began, seconds since the epoch."""
LENGTHS = 4
"""Rollouts of the full batch whose response lengths are kept."""
COPIES = 3
"""Repeats of offloading and loading again."""
MEETING = "meeting"
"""Folder where two jobs find each other; made anew for each pair."""
MEETING_S = 120.0
"""How long a job waits for the other end of a link."""


def measure(path: Path, first_line: float, imported: float) -> None:
    """Do what a task file says; leave a manifest with the time when it was done."""
    task = validated(Task, read_json(path, f"no file {path}"), path)
    os.environ["WORLD_SIZE"] = str(task.processes)
    if int(os.environ.get("RANK", "0")) >= task.processes:
        return
    world = World.from_environment(task.folder / CHANNELS)
    config = load_config(task.config)
    if task.rank is not None:
        _meet(task, config)
    else:
        scratch = task.folder / f"work-{os.environ.get('RLINF_ATTEMPT', 'alone')}"
        bench = Bench(task, config, world, scratch, imported_at=imported)
        bench.started(first_line)
        try:
            bench.run(time.time() + task.seconds)
        finally:
            if world.rank == 0:
                shutil.rmtree(scratch, ignore_errors=True)
    if world.rank == 0:
        write_atomic(task.folder / MANIFEST, json.dumps({"ended": time.time()}))


@dataclass
class Bench:
    """What one rank knows of the measuring; rank 0 keeps the trial."""

    task: Task
    config: RunConfig
    world: World
    scratch: Path
    imported_at: float
    resident: Resident = field(default_factory=Resident)
    seen: set[str] = field(default_factory=set)
    imports_s: float = 0.0
    connect_s: float = 0.0
    first_load_s: float = 0.0
    done: int = 0
    """Iterations of this process."""
    records: list[Record] = field(default_factory=list)
    kept: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.graph = Graph(self.config)
        task = self.task
        known = load_trial(task.trial)
        blank = Trial(key=task.key, nodes=task.nodes, processes=task.processes)
        self.trial = blank if known is None or known.key != task.key else known
        self.device = _device(self.config)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def started(self, first_line: float) -> None:
        """Note what the start of this job cost; forms the process group."""
        begun = float(os.environ.get(STARTED, self.task.submitted))
        if STARTED in os.environ and self.task.first:
            self.overhead("submission", begun - self.task.submitted)
        self.overhead("startup", first_line - begun)
        self.imports_s = self.imported_at - first_line
        start = time.perf_counter()
        if self.world.size > 1:
            self.world.connect(self.device.type)
        self.connect_s = time.perf_counter() - start
        # Packages that are imported when first needed: told apart from loading by loading twice.
        start = time.perf_counter()
        policy, options = policy_class(self.config)
        weights = read_manifest(self.task.initial)
        if weights is not None:
            policy.load(self.task.initial / weights.data / "weights", options)
        self.first_load_s = time.perf_counter() - start
        hosts = (*self.trial.hosts, socket.gethostname())
        self.keep(hosts=tuple(sorted(set(hosts))))

    def run(self, deadline: float) -> None:
        """Measure links once, then iterations until all cases are settled or time is up.

        Every process runs the first case twice, whatever the time: cold, then warm.
        """
        if self.world.rank == 0:
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.scratch.mkdir(parents=True)
        if not self.trial.links:
            self.measure_links()
        longest = 0.0
        with StopFlag() as stop, contextlib.suppress(RequeueRequested):
            while True:
                case = self.trial.next_case(self.task.cases)
                late = time.time() + longest > deadline and self.done >= 2
                number = -1
                if case is not None and not late and not stop.is_set():
                    number = self.task.cases.index(case)
                number = self.agree(number)
                if number < 0:
                    return
                start = time.time()
                self.iterate(self.task.cases[number], stop.is_set)
                longest = max(longest, time.time() - start)
                if self.done == 1:
                    self.settle_imports()
                    self.measure_copies()

    def iterate(self, case: Case, stopping: Callable[[], bool]) -> None:
        """All stages of one iteration."""
        config = adapted(self.config, case)
        budget = case.token_budget
        for trainer in (self._trainer(), self.resident.reference):
            if trainer is not None and budget:
                trainer.limit(budget)
        samples = case.starts * config.rollout.group_size
        warm = self.seen.issuperset(self.graph.flow.stages)
        total = 0.0
        for stage in self.graph.flow.stages:
            given = budget if self.budgeted(stage) else None
            self.keep(
                running=Running(stage=stage, case=case, samples=samples, token_budget=given),
            )
            node = Node(stage, self.done)
            inputs = {name: self.folder(n) for name, n in self.graph.inputs(node).items()}
            # The configuration's folder is the run's: old outputs there are pruned by sync.
            call = StageCall(
                stage, self.scratch / CONFIG, self.folder(node), self.trial.iterations, inputs
            )
            _forget_peak()
            # All begin together, whatever rank 0 had to write down meanwhile.
            self.agree(0)
            manifest = run_stage(call, config=config, resident=self.resident, stopping=stopping)
            peak = self.largest(_peak_bytes())
            if self.world.rank == 0:
                total += self.record(manifest, samples, given, peak)
            self.seen.add(stage)
        change: dict[str, Any] = {"running": None, "iterations": self.trial.iterations + 1}
        change["memory"] = "device" if _on_gpu() else "host"
        if warm and self.world.rank == 0:
            change["repeats"] = self.trial.repeated(case, total).repeats
        self.keep(**change)
        if self.world.rank == 0 and self.done:
            shutil.rmtree(
                stage_folder(self.scratch, self.graph.flow.publishes, self.done - 1).parent
            )
        self.done += 1

    def folder(self, node: Node) -> Path:
        """Where a node's output is: what is made once is the run's, all else is thrown away."""
        if node.stage in self.graph.flow.offline:
            return self.task.initial.with_name(node.stage)
        return stage_folder(self.scratch, node.stage, node.iteration)

    def record(
        self, manifest: Manifest, samples: int, budget: int | None, peak_bytes: int
    ) -> float:
        """Add what a stage did to the trial; returns its seconds, loading and moving left out."""
        stage, folder = manifest.stage, stage_folder(self.scratch, manifest.stage, self.done)
        parts, flow = spans(manifest), self.graph.flow
        load = parts.pop("load", 0.0)
        # What it moves depends on who shares the device: a plan counts that by itself.
        moved = parts.pop("offload", 0.0) + parts.pop("onload", 0.0)
        seconds = max(0.0, manifest.timing["end"] - manifest.timing["start"] - load - moved)
        if load and flow.table[stage].loads == "engine":
            self.overhead("weight_load" if stage in self.seen else "engine_load", load)
        elif load:
            self.overhead("trainer_load", load + self.connect_s)
            self.connect_s = 0.0
        if stage == flow.maker("trajectories"):
            self.records = list(FileReader((folder / manifest.data).glob("trajectories-*.h5")))
            if samples == self.config.rollout.batch * self.config.rollout.group_size:
                self.keep_lengths()
        if stage == flow.maker("rewards"):
            rewards = FileReader((folder / manifest.data).glob("rewards-*.h5"))
            self.kept = {record.identity.key for record in rewards if record.info["keep"]}
        if stage == flow.publishes:
            self.overhead("publish", parts["publish"])
            self.keep(weights_bytes=int(manifest.metrics["bytes"]))
        sample = Sample(
            stage=stage,
            samples=samples,
            token_budget=budget,
            cold=stage not in self.seen,
            seconds=seconds,
            tokens=self.tokens(stage),
            parts_s=parts,
            peak_memory_bytes=peak_bytes,
        )
        self.keep(samples=(*self.trial.samples, sample))
        return seconds

    def budgeted(self, stage: str) -> bool:
        """Whether a stage packs micro-batches up to a number of tokens."""
        spec = self.graph.flow.table[stage]
        return spec.device and spec.loads == "trainer"

    def tokens(self, stage: str) -> int:
        """Steps of the responses that count, or positions the trainer evaluates."""
        flow = self.graph.flow
        if stage in (flow.maker("trajectories"), flow.maker("rewards")):
            return sum(self.lengths())
        trainer = self._trainer()
        if not self.budgeted(stage) or trainer is None:
            return 0
        policy = trainer.policy
        chosen = [r for r in self.records if stage != flow.trains or r.identity.key in self.kept]
        return sum(policy.cost(record) for record in chosen)

    def lengths(self) -> list[int]:
        """Steps that count of each response of the last rollout; what tools said is none."""
        return [int(counted(record).sum()) for record in self.records]

    def keep_lengths(self) -> None:
        """Remember the response lengths of the last rollout."""
        if len(self.trial.lengths) < LENGTHS:
            cut = sum(record.info["stop_reason"] == "length" for record in self.records)
            lengths = tuple(sorted(self.lengths()))
            self.keep(lengths=(*self.trial.lengths, lengths), truncated=self.trial.truncated + cut)

    def measure_links(self) -> None:
        """To a neighbour on this node and on the next, and through the filesystem."""
        found: list[Link | None] = []
        between = self.task.kinds
        per_node = self.world.size // self.task.nodes
        ends = {1: "intra_node"} if per_node > 1 else {}
        if self.task.nodes > 1:
            ends[per_node] = "inter_node"
        for other, path in ends.items():
            if self.world.rank in (0, other):
                found.append(links.peer(path, between, self.world.rank, other, self.device))
        if self.world.size == 1:
            found += links.storage(self.scratch, between[0])
        self.keep(links=tuple(link for link in found if link is not None))

    def settle_imports(self) -> None:
        """Note what importing cost: what the first load took longer than the next ones."""
        known = self.trial.overheads_s
        loads = [known[name][-1] for name in ("engine_load", "trainer_load") if name in known]
        late = max(0.0, self.first_load_s - min(loads, default=self.first_load_s))
        self.overhead("imports", self.imports_s + late)

    def _trainer(self) -> Trainer | None:
        held = self.resident.trainer
        return None if held is None else held.trainer

    def measure_copies(self) -> None:
        """Offload the trainer's state to the host's memory and load it again."""
        trainer, residency = self._trainer(), self.resident.residency
        if trainer is None or residency is None:
            return
        residency.need(trainer)
        all_or_nothing = Residency(self.device, sys.maxsize)
        all_or_nothing.need(trainer)
        for _ in range(COPIES):
            all_or_nothing.clear(span=self.timed)
            all_or_nothing.need(trainer, span=self.timed)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time something as an overhead."""
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.overhead(name, time.perf_counter() - start)

    def overhead(self, name: str, seconds: float) -> None:
        """Add one measurement of an overhead."""
        self.trial = self.trial.with_overhead(name, seconds)

    def keep(self, **change: Any) -> None:
        """Change the trial; rank 0 writes it."""
        self.trial = self.trial.model_copy(update=change)
        if self.world.rank == 0:
            self.trial.save(self.task.trial)

    def agree(self, number: int) -> int:
        """What rank 0 says."""
        return self._reduced(number if self.world.rank == 0 else 0, dist.ReduceOp.SUM)

    def largest(self, number: int) -> int:
        """The largest number of all ranks."""
        return self._reduced(number, dist.ReduceOp.MAX)

    def _reduced(self, number: int, how: Any) -> int:
        if self.world.size == 1:
            return number
        tensor = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(tensor, how)
        return int(tensor)


def adapted(config: RunConfig, case: Case) -> RunConfig:
    """The run's configuration with the size of a case, and weights that stay as they are."""

    def named(part: Any, **change: Any) -> Any:
        return type(part)(**{**part.model_dump(), **change})

    budget = {} if case.token_budget is None else {"token_budget": case.token_budget}
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"batch": case.starts}),
            "trainer": named(config.trainer, **budget),
            "optimizer": config.optimizer.model_copy(update=STILL),
        }
    )


def spans(manifest: Manifest) -> dict[str, float]:
    """Seconds of each part that a stage timed itself, of the rank that took longest."""
    sums: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in manifest.timing["spans"]:
        if span["name"] != manifest.stage:
            sums[span["name"]][span["rank"]] += span["end"] - span["start"]
    return {name: max(0.0, *ranks.values()) for name, ranks in sums.items()}


def _meet(task: Task, config: RunConfig) -> None:
    """Measure the link to the job that was started beside this one."""
    assert task.rank is not None
    device = _device(config)
    meeting = task.folder.parent / MEETING / "link.json"
    World(task.rank, 2, meeting=meeting).connect(device.type, MEETING_S)
    link = links.peer("inter_partition", task.kinds, task.rank, 1 - task.rank, device)
    if link is not None:
        trial = Trial(key=task.key, nodes=1, processes=1, links=(link,))
        trial.save(task.trial)
    dist.destroy_process_group()


def _device(config: RunConfig) -> torch.device:
    return local_device(str((config.trainer.model_extra or {}).get("device", "auto")))


def _on_gpu() -> bool:
    """Whether this process has used a GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _forget_peak() -> None:
    if _on_gpu():
        torch.cuda.reset_peak_memory_stats()
    else:
        # proc(5): 5 resets the peak of the resident set. Without the right to it the peak stays.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    if _on_gpu():
        return int(torch.cuda.max_memory_allocated())
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(r.split()[1]) for r in status.splitlines() if r.startswith("VmHWM"))
