"""The profile pass: short jobs on one kind of device after the other, then one profile file.

Jobs never run at the same time, because they would slow each other down. The measurements of a job
are its *trial*, a file that is cached in the folder of the runs. So an interrupted pass can
continue, and a second pass for the same work ends at once. For the execution ``jobs``, stages are
also measured as separate jobs. Each job measures several batch sizes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from launchers.launcher import JobSpec, Launcher
from pipeline.driver import Driver
from pipeline.graph import Graph
from pipeline.inventory import load_or_survey
from pipeline.job_executor import JobExecutor, create_launcher
from pipeline.metrics import stage_manifest
from pipeline.plan import Plan, StagePlan
from pipeline.planning.profile import build_profile
from pipeline.planning.profile.device_kinds import DeviceKind, list_kinds, local_kind, select_kinds
from pipeline.planning.profile.measurement import ProfileTask, load_trial
from pipeline.planning.profile.schema import (
    SCHEMA,
    Overhead,
    Profile,
    ProfileIdentity,
    QueueWait,
    kind_key,
)
from pipeline.planning.profile.stage_bench import JOB_STARTED_VARIABLE
from pipeline.resources import ClusterConfig, job_resources, resolve_plan
from pipeline.resume import create_run
from pipeline.run import Run
from rlinf.artifacts import MANIFEST, commit_output, read_manifest, write_atomic
from rlinf.config import EvaluateSection, RunConfig, RunSection, validate
from rlinf.errors import EXIT_BAD_INPUT, InputError, PlanError, RequeueRequested, StageError
from slurm.client import SlurmClient, expected_wait_s, past_waits_s
from slurm.inventory import default_partition
from slurm.jobs import JobState, JobStatus
from slurm.site import SiteConfig, load_site
from stages.factory import create_algorithm
from stages.flow import Flow, flow_of
from stages.identity import CodeSnapshot, stage_key
from stages.layout import CONFIG_FILE, setup_stage_folder

OUT_OF_MEMORY_PATTERN = re.compile(
    r"out.?of.?memory|MemoryError|cannot allocate|SIGKILL", re.IGNORECASE
)
INTERRUPTED_STATES = frozenset(
    {
        JobState.CANCELLED,
        JobState.TIMEOUT,
        JobState.PREEMPTED,
        JobState.NODE_FAIL,
        JobState.VANISHED,
    }
)
"""States of jobs that were ended from outside, not by success or failure of their work."""


def record_job_outcome(task: ProfileTask, status: JobStatus) -> None:
    """Record in the trial how late a job's end was noticed, or that the job ran out of memory.

    Raises:
        InputError, StageError: the job failed for another reason.
    """
    if status.state is JobState.DONE:
        if trial := load_trial(task.trial_path):
            ended = json.loads((task.folder / MANIFEST).read_text())["ended"]
            trial.with_overhead("completion", time.time() - ended).save(task.trial_path)
        return
    reason = status.reason.strip() or status.state.value
    trial = load_trial(task.trial_path)
    if status.state is JobState.OUT_OF_MEMORY or OUT_OF_MEMORY_PATTERN.search(reason):
        if trial is not None and trial.running is not None:
            line = next(
                (r for r in reason.splitlines() if OUT_OF_MEMORY_PATTERN.search(r)), "out of memory"
            )
            trial.with_crash(line.strip()).save(task.trial_path)
        return
    job_name = f"profile of {task.kind} on {task.processes} processes"
    if status.state in INTERRUPTED_STATES:
        log.warning("%s: job ended early (%s)", job_name, status.state.value)
    elif status.exit_code == EXIT_BAD_INPUT:
        raise InputError(f"{job_name}: {reason}")
    else:
        raise StageError(f"{job_name}: {reason}")


def batch_sizes_to_measure(config: RunConfig, processes: int) -> tuple[int, ...]:
    """Return the run's own number of prompts, then half and a quarter of it where possible."""
    run_size, group_size = config.rollout.batch_size, config.rollout.group_size
    minibatches = create_algorithm(config).minibatches
    smaller = [
        size
        for size in (run_size // 2, run_size // 4)
        if size >= processes and not size * group_size % minibatches
    ]
    return (run_size, *dict.fromkeys(smaller))


log = logging.getLogger("rlinf")

CACHE_DIR = ".profiles"
"""Folder of the cache beside the runs."""
STAGE_JOB_LIMIT_MIN = 5
"""Time limit of each separate stage job, minutes."""
STAGE_JOBS_SHARE = 0.5
"""Share of the time for separate stage jobs."""
MIN_STAGE_JOBS_S = 60.0
"""Minimum time for separate stage jobs, seconds; with less time they are not measured."""
MIN_MEASURING_S = 1.0
"""Minimum measuring time of a job, seconds. With less time, only a first job still runs."""
DEFAULT_START_S = 8.0
"""Assumed seconds for the start of a job, until a start was measured."""
MIN_RESTART_S = 15.0
"""Minimum measuring time for which a job is restarted, seconds."""
MAX_ROUNDS = 6
"""Maximum number of times that the jobs of a kind are submitted. After an out-of-memory failure, a
job continues with smaller batches."""
MIN_QUEUE_WAIT_S = 60.0
"""If nothing was measured yet, seconds before which no queued job is cancelled."""
MAX_CPU_PROCESSES = 4
"""Maximum processes per node if CPUs are the devices."""
ARRAY_LIMIT_REASON = "JobArrayTaskLimit"
"""Slurm's reason for an array task that waits for the previous one."""


@dataclass(frozen=True)
class ProfileOptions:
    """Options of ``rlinf profile``; see its ``--help``."""

    partitions: tuple[str, ...] = ()
    minutes: float = 10.0
    processes: int | None = None
    fresh: bool = False


def profile_run(run: Run, options: ProfileOptions, sft: Callable[[Run], None]) -> Profile:
    """Measure a run's stages after its SFT stage, and return the profile.

    Args:
        sft: runs the stages before the first iteration, unless they are done.

    Raises:
        PlanError: a partition does not exist, or a file of an earlier pass is damaged.
        InputError: the stages cannot run as configured, or nothing could be measured.
        StageError: a job failed, but not because of memory.
        SlurmError: Slurm does not answer.
    """
    cluster = validate(ClusterConfig, run.config.cluster, "cluster")
    on_slurm = cluster.launcher == "slurm"
    if not on_slurm:
        cluster = cluster.model_copy(update={"launcher": "local"})
    plan = resolve_plan(Plan.from_run(run.folder), cluster)
    kinds = _kinds_to_measure(cluster, plan, flow_of(run.config), options.partitions)
    identity = ProfileIdentity.of(run.config)
    sft(run)
    with run.lock():
        launcher = create_launcher(cluster, plan)
        try:
            end = time.time() + 60 * options.minutes
            profile_pass = ProfilePass(run, cluster, plan, launcher, identity, options)
            for index, kind in enumerate(kinds):
                kind_s = (end - time.time()) / (len(kinds) - index)
                profile_pass.measure_kind(kind, kind_s)
        finally:
            launcher.close()
    client = SlurmClient(cluster.poll_interval_s) if on_slurm else None
    return profile_pass.build_profile(kinds, client)


def _kinds_to_measure(
    cluster: ClusterConfig, plan: Plan, flow: Flow, requested: Sequence[str]
) -> list[DeviceKind]:
    """Return the kinds of the requested partitions, else of the plan's or the default partition."""
    if cluster.launcher != "slurm":
        return select_kinds({"local": local_kind()}, requested or ("local",))
    inventory = load_or_survey(None, cluster.site)
    kinds = list_kinds(inventory, load_site(cluster.site) if cluster.site else SiteConfig())
    default = default_partition(inventory.partitions)
    planned = [
        plan.stage_plan(stage).partition or default
        for stage in (flow.rollout_stage, flow.train_stage)
        if stage
    ]
    partitions = tuple(requested) or tuple(dict.fromkeys(name for name in planned if name))
    if not partitions:
        available = ", ".join(sorted({kind.partition for kind in kinds.values()}))
        raise PlanError(
            "--partition: name a partition to measure: the plan has none, and the cluster has "
            f"no default; there are {available}"
        )
    return select_kinds(kinds, partitions)


@dataclass
class ProfilePass:
    """One profile pass over some kinds."""

    run: Run
    cluster: ClusterConfig
    plan: Plan
    launcher: Launcher
    identity: ProfileIdentity
    options: ProfileOptions
    tasks: dict[str, list[ProfileTask]] = field(default_factory=dict)
    """Tasks by kind."""
    stage_job_overheads: dict[str, list[Overhead]] = field(default_factory=dict)
    """Overheads of separate stage jobs, by kind."""

    @property
    def flow(self) -> Flow:
        """The flow of the run."""
        return flow_of(self.run.config)

    def measure_kind(self, kind: DeviceKind, seconds: float) -> None:
        """Run jobs on a kind until all times have converged or the time is used up."""
        folder = self.cache_folder(kind_key(self.identity, kind))
        if self.options.fresh:
            shutil.rmtree(folder, ignore_errors=True)
        end = time.time() + seconds
        self.tasks[kind.name] = tasks = self.new_tasks(kind, folder)
        for task in tasks:
            load_trial(task.trial_path)  # raise for a damaged file before anything runs
        if STAGE_JOBS_SHARE * seconds >= MIN_STAGE_JOBS_S:
            stage_plan = self.job_request(kind, 1, 1, time_limit_min=STAGE_JOB_LIMIT_MIN)
            count = MEASURED_ITERATIONS
            log.info("%s: %d iterations with separate stage jobs", kind.name, count)
            stage_jobs_end = time.time() + STAGE_JOBS_SHARE * seconds
            self.stage_job_overheads[kind.name] = measure_stage_jobs(
                self.run, self.cluster, stage_plan, folder, stage_jobs_end
            )
        for round_index in range(MAX_ROUNDS):
            remaining = [task for task in tasks if not is_finished(task)]
            seconds_each = self.measuring_s(tasks, end, max(1, len(remaining)))
            if not remaining or (round_index and seconds_each < MIN_RESTART_S):
                break
            while remaining := self.tasks_in_time(tasks, remaining, end):
                # Tasks of an array have equally many nodes; on one machine tasks run one by one.
                array = [task for task in remaining if task.nodes == remaining[0].nodes]
                array = array if kind.partition else array[:1]
                task_s = max(MIN_MEASURING_S, self.measuring_s(tasks, end, len(remaining)))
                log.info("%s: %d jobs that measure for %.0f s each", kind.name, len(array), task_s)
                self.wait_for_jobs(self.submit(kind, array, task_s), end)
                remaining = remaining[len(array) :]

    def tasks_in_time(
        self, tasks: Sequence[ProfileTask], remaining: list[ProfileTask], end: float
    ) -> list[ProfileTask]:
        """Return as many of the ``remaining`` tasks, in order, as there is time for; at least one
        if nothing was measured yet. The others need a pass with more time."""
        in_time = list(remaining)
        minimum = 0 if any(load_trial(task.trial_path) for task in tasks) else 1
        while len(in_time) > minimum and (
            self.measuring_s(tasks, end, len(in_time)) < MIN_MEASURING_S
        ):
            dropped = in_time.pop()
            log.warning(
                "%s: no time for %d processes; give more with --minutes",
                dropped.kind,
                dropped.processes,
            )
        return in_time

    def measuring_s(self, tasks: Sequence[ProfileTask], end: float, num_jobs: int) -> float:
        """Return the seconds until ``end`` for each of ``num_jobs`` jobs, without their start."""
        start_times = [trial.start_s for task in tasks if (trial := load_trial(task.trial_path))]
        start_s = max((s for s in start_times if s is not None), default=DEFAULT_START_S)
        return (end - time.time()) / num_jobs - start_s

    def new_tasks(self, kind: DeviceKind, folder: Path) -> list[ProfileTask]:
        """Return a task per number of processes: powers of two up to a full node, and two nodes."""
        max_processes = (
            kind.devices_per_node
            if kind.gpus_per_node
            else min(kind.cpus_per_node, MAX_CPU_PROCESSES)
        )
        max_processes = min(max_processes, self.options.processes or max_processes)
        counts = sorted({max_processes, *(1 << i for i in range(max_processes.bit_length()))})
        shapes = [(1, count) for count in counts]
        shapes += [(2, 2 * max_processes)] if kind.nodes > 1 else []
        return [self.task(kind, folder, nodes, count) for nodes, count in shapes]

    def task(self, kind: DeviceKind, folder: Path, nodes: int, processes: int) -> ProfileTask:
        """Return the task of one job, with all batch sizes."""
        return ProfileTask(
            config=self.run.folder / CONFIG_FILE,
            initial=setup_stage_folder(self.run.folder, self.flow.initial_stage),
            key=folder.name,
            kind=kind.name,
            folder=folder / f"{nodes}x{processes // nodes}",
            nodes=nodes,
            processes=processes,
            batch_sizes=batch_sizes_to_measure(self.run.config, processes),
            seconds=1,
            submitted=0,
        )

    def submit(
        self, kind: DeviceKind, group: list[ProfileTask], seconds: float
    ) -> dict[str, ProfileTask]:
        """Submit a job for each task, as an array if there are several. Returns tasks by job id."""
        # All jobs of an array have the request of the largest.
        per_node = max(task.processes // task.nodes for task in group)
        minutes = 5 + round((seconds + DEFAULT_START_S) / 60)
        stage_plan = self.job_request(kind, group[0].nodes, per_node, time_limit_min=minutes)
        resources = job_resources(stage_plan, self.cluster)
        record_start = f"export {JOB_STARTED_VARIABLE}=$(date +%s.%N)"
        resources = replace(resources, setup=(record_start, *resources.setup), array_parallelism=1)
        jobs = []
        for index, task in enumerate(group):
            task.folder.mkdir(parents=True, exist_ok=True)
            (task.folder / MANIFEST).unlink(missing_ok=True)
            for old_folder in task.folder.glob("work-*"):
                shutil.rmtree(old_folder, ignore_errors=True)
            update = {"seconds": seconds, "submitted": time.time(), "first": index == 0}
            path = task.folder / "task.json"
            write_atomic(path, task.model_copy(update=update).model_dump_json())
            logs = self.run.folder / "logs" / "profile"
            name = f"profile/{task.kind}"
            jobs.append(
                JobSpec(
                    name,
                    (str(path),),
                    task.folder,
                    logs,
                    resources,
                    "pipeline.planning.profile.bench_main",
                )
            )
        return dict(zip(self.launcher.submit_array(jobs), group, strict=True))

    def job_request(
        self, kind: DeviceKind, nodes: int, per_node: int, time_limit_min: int
    ) -> StagePlan:
        """Return the request of a job on a kind, with the CPUs and memory of the plan's training
        stage. ``StagePlan`` counts processes, GPUs and CPUs per node."""
        train = self.plan.stage_plan(self.flow.train_stage)
        return StagePlan(
            partition=kind.partition or None,
            nodes=nodes,
            processes=per_node,
            gpus=min(per_node, kind.gpus_per_node),
            gpu_type=kind.gpu_type or None,
            constraint=kind.constraint or None,
            cpus=max(1, min(train.cpus, kind.cpus_per_node // per_node)),
            mem_mb=train.mem_mb,
            time_limit_min=time_limit_min,
        )

    def wait_for_jobs(self, jobs: dict[str, ProfileTask], end: float) -> None:
        """Wait until jobs have ended, and cancel those that have not started by ``end`` (if nothing
        was measured yet, after ``MIN_QUEUE_WAIT_S`` at the earliest)."""
        active = dict(jobs)
        if not any(load_trial(task.trial_path) for task in jobs.values()):
            end = max(end, time.time() + MIN_QUEUE_WAIT_S)
        while active:
            for job_id, status in self.launcher.poll(list(active)).items():
                # A task of an array that waits for the previous task is not late.
                is_queued = status.state is JobState.PENDING and status.reason != ARRAY_LIMIT_REASON
                is_late = is_queued and time.time() > end
                if is_late:
                    log.warning("job %s waits for %s: cancelled", job_id, status.reason)
                    self.launcher.cancel([job_id])
                elif not status.state.is_active:
                    record_job_outcome(active[job_id], status)
                if is_late or not status.state.is_active:
                    del active[job_id]
            if active:
                time.sleep(self.launcher.poll_interval_s)

    def build_profile(self, kinds: Sequence[DeviceKind], client: SlurmClient | None) -> Profile:
        """Return the profile of all measurements.

        Raises:
            InputError: nothing was measured on a kind.
        """
        config, kind_profiles, measured = self.run.config, {}, []
        flow = flow_of(config)
        for kind in kinds:
            trials = [t for task in self.tasks[kind.name] if (t := load_trial(task.trial_path))]
            trials = [trial for trial in trials if trial.samples]
            if not trials:
                raise InputError(
                    f"kind {kind.name}: nothing could be measured in {self.options.minutes:g} "
                    "minutes; give more with --minutes, or leave it out"
                )
            waits = self.queue_waits(kind, client) if client else []
            overheads = self.stage_job_overheads.get(kind.name, [])
            profile = build_profile.build_kind_profile(kind, trials, waits, overheads, flow)
            kind_profiles[kind.name] = profile
            measured += trials
        lengths = build_profile.lengths(measured)
        weights_bytes = max(trial.weights_bytes for trial in measured)
        if not lengths or not weights_bytes:
            failures = (s.failure for t in measured for s in t.samples if s.failure)
            reason = next(failures, "out of time")
            raise InputError(f"no kind could run a whole iteration of this run: {reason}")
        return Profile(
            schema_version=SCHEMA,
            created_at=datetime.now(UTC).replace(microsecond=0),
            identity=self.identity,
            samples=config.rollout.batch_size * config.rollout.group_size,
            weights_bytes=weights_bytes,
            lengths=lengths,
            kinds=kind_profiles,
        )

    def queue_waits(self, kind: DeviceKind, client: SlurmClient) -> list[QueueWait]:
        """Return the expected queue waits of jobs with one, two and all nodes of a kind."""
        past_waits = past_waits_s(client, kind.partition)
        site = job_resources(StagePlan(partition=kind.partition), self.cluster)
        settings = [
            ("account", site.account),
            ("qos", site.qos),
            ("constraint", kind.constraint or site.constraint),
        ]
        queue_waits = []
        for nodes in sorted({1, min(2, kind.nodes), kind.nodes}):
            options = [f"--partition={kind.partition}", f"--nodes={nodes}", "--time=60"]
            options += [f"--{name}={value}" for name, value in settings if value]
            if kind.gpus_per_node:
                gpus = ":".join(filter(None, ("gpu", kind.gpu_type, str(kind.gpus_per_node))))
                options.append(f"--gres={gpus}")
            # The scheduler prints local time without a zone.
            expected = expected_wait_s(client, datetime.now(), *options)
            queue_waits.append(build_profile.build_queue_wait(nodes, expected, past_waits))
        return queue_waits

    def cache_folder(self, key: str) -> Path:
        """Return the folder in which the trials with a key are cached."""
        return self.run.folder.parent / CACHE_DIR / key


def is_finished(task: ProfileTask) -> bool:
    """Return True if a task needs no more jobs."""
    trial = load_trial(task.trial_path)
    return (
        trial is not None
        and trial.key == task.key
        and trial.next_batch_size(task.batch_sizes) is None
    )


MEASURED_ITERATIONS = 3
"""Number of iterations of separate stage jobs. The first iteration loads no earlier checkpoint, so
only its dispatch times (from the end of a stage's inputs to the start of its job) are used."""
QUEUED_DISPATCH_FACTOR = 3.0
"""A job whose dispatch takes longer than this many times the shortest has waited for nodes."""


def measure_stage_jobs(
    run: Run, cluster: ClusterConfig, resources: StagePlan, folder: Path, deadline: float
) -> list[Overhead]:
    """Run a few iterations with each stage as a job of one process, in a separate run folder.

    Finished stages of an earlier call are not repeated.

    Args:
        resources: request of each stage's job.
        folder: folder of the separate run.
        deadline: time to stop, in seconds since the epoch; finished stages are used.

    Raises:
        StageError: a stage failed.
    """
    plan = Plan(defaults=resources)
    scratch = clone_run(run, plan, folder, "alone", MEASURED_ITERATIONS)

    def is_late() -> bool:
        return time.time() > deadline

    executor = JobExecutor(scratch, create_launcher(cluster, plan), plan, cluster, is_late)
    try:
        Driver(scratch, executor, max_retries=cluster.max_retries).drive()
    except RequeueRequested:
        log.warning("time is up before all stages ran as separate jobs")
        executor.cancel()
    return stage_job_overheads(scratch)


def stage_job_overheads(run: Run) -> list[Overhead]:
    """Return dispatch times of all stages together; imports and work (``alone``) of each stage."""
    graph = Graph(run.config)
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for node in graph.nodes():
        manifest = stage_manifest(run.folder, *node)
        if manifest is None or node.stage not in graph.flow.stages:
            continue
        process_start, stage_start, end = (manifest.timing[n] for n in ("began", "start", "end"))
        inputs = graph.inputs(node).values()
        sources = [stage_manifest(run.folder, *s) for s in inputs if s.stage in graph.flow.stages]
        input_ends = [source.timing["end"] for source in sources if source is not None]
        if input_ends:
            times["dispatch", ""].append(process_start - max(input_ends))
        if node.iteration:
            times["imports", node.stage].append(stage_start - process_start)
            times["alone", node.stage].append(end - stage_start)
    if times:
        fastest = min(times["dispatch", ""])
        on_free_nodes = [s for s in times["dispatch", ""] if s <= QUEUED_DISPATCH_FACTOR * fastest]
        times["dispatch", ""] = on_free_nodes or [fastest]
    return [
        Overhead.of([max(0.0, s) for s in seconds], name=name, stage=stage, nodes=1, processes=1)
        for (name, stage), seconds in times.items()
    ]


def clone_run(run: Run, plan: Plan, root: Path, name: str, iterations: int) -> Run:
    """Create a run with the same work and another plan, a finished SFT and no evaluation."""
    config = run.config.model_copy(
        update={
            "run": RunSection(name=name, root=root),
            "iterations": iterations,
            "evaluate": EvaluateSection(every=0, samples=1),
            "plan": None,
        }
    )
    clone = create_run(config, plan.to_dict())
    for stage in flow_of(config).setup_stages:  # the stages before the first iteration
        source, target = (setup_stage_folder(owner.folder, stage) for owner in (run, clone))
        if target.exists():
            continue
        partial = target.with_name(f"{target.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        # Rename at the end, because the manifest must not exist before the other files.
        shutil.copytree(source, partial, copy_function=os.link)
        manifest = read_manifest(source)
        if manifest is not None:
            # The original used other evaluation settings, so give it the key of this run.
            (partial / MANIFEST).unlink()
            code = CodeSnapshot.current(clone.config, stage).digest(stage)
            key = stage_key(clone.config, stage, 0, manifest.inputs, code)
            commit_output(partial, replace(manifest, key=key))
        partial.rename(target)
    return clone
