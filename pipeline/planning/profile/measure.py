"""The profile pass: short jobs on one kind of device after the other, then one file.

Jobs never run side by side, for neighbours would slow each other down. What they measured stays in
the cache beside the runs, so that a pass that was interrupted goes on, and a second one of the same
work is done at once.
"""

from __future__ import annotations

import logging
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path

from launchers.base import Job, Launcher
from pipeline.inventory import obtain
from pipeline.launch import ClusterConfig, make_launcher, resources
from pipeline.launch import settled as settled_plan
from pipeline.plan import Plan, StagePlan
from pipeline.planning.profile import alone, assemble, mixture
from pipeline.planning.profile.bench import MEETING, MEETING_S, STARTED
from pipeline.planning.profile.conclude import conclude
from pipeline.planning.profile.identity import Identity, kind_key
from pipeline.planning.profile.kinds import Kind, kinds_of, local_kind, of_partitions
from pipeline.planning.profile.mixture import Pair
from pipeline.planning.profile.schema import SCHEMA, Link, Mixture, Overhead, Profile, Wait
from pipeline.planning.profile.sizes import cases, token_budget
from pipeline.planning.profile.trial import Case, Task, load_trial
from pipeline.run import Run
from rlinf.artifacts import MANIFEST, write_atomic
from rlinf.config import digest, validate
from rlinf.errors import InputError, PlanError, StageError
from slurm.client import SlurmClient, default_partition
from slurm.jobs import State
from slurm.site import Site, load_site
from slurm.waits import expected_wait_s, past_waits_s
from stages.flow import Flow, flow_of
from stages.layout import CONFIG, offline_folder

log = logging.getLogger("rlinf")

CACHE = ".profiles"
"""Folder beside the runs."""
PATIENCE_MIN = 5
"""Limit of each of the jobs on their own, minutes."""
ALONE_SHARE, ALONE_S, LINKS_SHARE, MIXED_SHARE = 0.5, 60.0, 0.1, 0.15
"""Shares of the time that the jobs on their own may take, for which they need so many seconds, that
is kept for links between kinds, and for each pair of kinds in one job."""
LEAST_S = 1.0
"""A job that could measure for less is not started, unless nothing is known yet."""
START_S = 8.0
"""Set aside for the start of a job until one was measured."""
WORTHWHILE_S = 15.0
"""A job is not started again for less than this."""
ROUNDS = 6
"""Most times that the jobs of a kind are started: what dies of too little memory goes on without
what it died of."""
PATIENCE_S = 60.0
"""Least time that jobs wait for nodes."""
MOST_CPUS = 4
"""Most processes per node where CPUs are the devices."""
NEXT_OF_ARRAY = "JobArrayTaskLimit"
"""Slurm's reason why a task of an array waits for the one before."""


@dataclass(frozen=True)
class Options:
    """What to measure; see ``rlinf profile --help``."""

    partitions: tuple[str, ...] = ()
    minutes: float = 10.0
    processes: int | None = None
    fresh: bool = False


def profile(run: Run, options: Options, warm_start: Callable[[Run], None]) -> Profile:
    """Measure a run's stages, after its warm start.

    Args:
        warm_start: runs the stages before the first iteration, unless that is done.

    Raises:
        PlanError: no such partition, or a damaged file of an earlier pass.
        InputError: the stages cannot run as configured, or nothing could be measured.
        StageError: a job failed, and not for want of memory.
        SlurmError: Slurm does not answer.
    """
    cluster = validate(ClusterConfig, run.config.cluster, "cluster")
    on_slurm = cluster.launcher == "slurm"
    if not on_slurm:
        cluster = cluster.model_copy(update={"launcher": "local"})
    plan = settled_plan(Plan.read(run.folder), cluster)
    kinds = _kinds(cluster, plan, flow_of(run.config), options.partitions)
    identity = Identity.of(run.config)
    warm_start(run)
    with run.driven():
        launcher = make_launcher(cluster, plan)
        try:
            end = time.time() + 60 * options.minutes
            pairs = mixture.pairs(kinds, obtain(None, cluster.site)) if on_slurm else []
            share = LINKS_SHARE * (on_slurm and len(kinds) > 1) + MIXED_SHARE * len(pairs)
            kept = 60 * options.minutes * min(0.5, share)
            work = Pass(run, cluster, plan, launcher, identity, options)
            for number, kind in enumerate(kinds):
                work.measure(kind, (end - kept - time.time()) / (len(kinds) - number))
            between = work.between(kinds, end) if on_slurm else []
            mixed = [found for pair in pairs for found in work.mixed(pair, end)]
        finally:
            launcher.close()
    return work.result(kinds, between, mixed, SlurmClient(cluster.poll_s) if on_slurm else None)


def _kinds(cluster: ClusterConfig, plan: Plan, flow: Flow, wanted: Sequence[str]) -> list[Kind]:
    """The kinds of the partitions asked for, else of those that the plan names, else of the
    cluster's default one."""
    if cluster.launcher != "slurm":
        return of_partitions({"local": local_kind()}, wanted or ("local",))
    inventory = obtain(None, cluster.site)
    kinds = kinds_of(inventory, load_site(cluster.site) if cluster.site else Site())
    default = default_partition(inventory.partitions)
    named = [plan.of(stage).partition or default for stage in (flow.acts, flow.trains) if stage]
    chosen = tuple(wanted) or tuple(dict.fromkeys(name for name in named if name))
    if not chosen:
        there = ", ".join(sorted({kind.partition for kind in kinds.values()}))
        raise PlanError(
            "--partition: say which to measure: the plan names none, and the cluster has no "
            f"default one; there are {there}"
        )
    return of_partitions(kinds, chosen)


@dataclass
class Pass:
    """One profile pass over some kinds."""

    run: Run
    cluster: ClusterConfig
    plan: Plan
    launcher: Launcher
    identity: Identity
    options: Options
    tasks: dict[str, list[Task]] = field(default_factory=dict)
    """By kind."""
    alone: dict[str, list[Overhead]] = field(default_factory=dict)
    """By kind."""

    @property
    def flow(self) -> Flow:
        """Of the run."""
        return flow_of(self.run.config)

    def measure(self, kind: Kind, seconds: float) -> None:
        """Run jobs on a kind until all is settled or the time is used up."""
        folder = self.cache(kind_key(self.identity, kind))
        if self.options.fresh:
            shutil.rmtree(folder, ignore_errors=True)
        end = time.time() + seconds
        self.tasks[kind.name] = tasks = self.new_tasks(kind, folder)
        for task in tasks:
            load_trial(task.trial)  # a damaged one is refused before anything runs
        if ALONE_SHARE * seconds >= ALONE_S:
            needs = self.stage_plan(kind, 1, 1, time_min=PATIENCE_MIN)
            log.info("%s: %d iterations of jobs on their own", kind.name, alone.ITERATIONS)
            until = time.time() + ALONE_SHARE * seconds
            self.alone[kind.name] = alone.measure(self.run, self.cluster, needs, folder, until)
        for number in range(ROUNDS):
            todo = [task for task in tasks if not settled(task)]
            if not todo or (number and self.share_s(tasks, end, len(todo)) < WORTHWHILE_S):
                break
            while todo := self.in_time(tasks, todo, end):
                # The tasks of an array are of one size; on one machine each is for itself.
                group = [task for task in todo if task.nodes == todo[0].nodes]
                group = group if kind.partition else group[:1]
                share = max(LEAST_S, self.share_s(tasks, end, len(todo)))
                log.info("%s: %d jobs that measure for %.0f s each", kind.name, len(group), share)
                self.finish(self.submit(kind, group, share), end)
                todo = todo[len(group) :]

    def in_time(self, tasks: Sequence[Task], todo: list[Task], end: float) -> list[Task]:
        """Those of some tasks, smallest first, that there is time for; one where nothing is known.

        What is left out is measured by a pass that is given more time.
        """
        kept = list(todo)
        least = 0 if any(load_trial(task.trial) for task in tasks) else 1
        while len(kept) > least and self.share_s(tasks, end, len(kept)) < LEAST_S:
            left = kept.pop()
            log.warning(
                "%s: no time for %d processes; give more with --minutes",
                "+".join(left.kinds),
                left.processes,
            )
        return kept

    def share_s(self, tasks: Sequence[Task], end: float, jobs: int) -> float:
        """Time to measure that is left for each of some jobs, their starts taken off."""
        known = [trial.start_s for task in tasks if (trial := load_trial(task.trial))]
        start_s = max((s for s in known if s is not None), default=START_S)
        return (end - time.time()) / jobs - start_s

    def new_tasks(self, kind: Kind, folder: Path) -> list[Task]:
        """One for each number of processes: powers of two on a node, all of it, all of two."""
        most = kind.devices_per_node if kind.gpus_per_node else min(kind.cpus_per_node, MOST_CPUS)
        most = min(most, self.options.processes or most)
        counts = sorted({most, *(1 << i for i in range(most.bit_length()))})
        shapes = [(1, count) for count in counts]
        shapes += [(2, 2 * most)] if kind.nodes > 1 else []
        return [self.task(kind, folder, nodes, count) for nodes, count in shapes]

    def task(self, kind: Kind, folder: Path, nodes: int, processes: int) -> Task:
        """That of one job, with all cases."""
        return Task(
            config=self.run.folder / CONFIG,
            initial=offline_folder(self.run.folder, self.flow.initial),
            key=folder.name,
            kinds=(kind.name,),
            folder=folder / f"{nodes}x{processes // nodes}",
            nodes=nodes,
            processes=processes,
            cases=cases(self.run.config, processes),
            seconds=1,
            submitted=0,
        )

    def submit(
        self,
        kind: Kind,
        group: list[Task],
        seconds: float,
        changed: Callable[[StagePlan], StagePlan] = lambda asked: asked,
    ) -> dict[str, Task]:
        """Start one job for each task, as an array where there are several; by their ids."""
        # All jobs of an array ask for what the largest needs.
        per_node = max(task.processes // task.nodes for task in group)
        minutes = 5 + round((seconds + START_S) / 60)
        asked = self.stage_plan(kind, group[0].nodes, per_node, time_min=minutes)
        needs = resources(changed(asked), self.cluster)
        stamp = f"export {STARTED}=$(date +%s.%N)"
        needs = replace(needs, setup=(stamp, *needs.setup), parallel_tasks=1)
        jobs = []
        for number, task in enumerate(group):
            task.folder.mkdir(parents=True, exist_ok=True)
            (task.folder / MANIFEST).unlink(missing_ok=True)
            for old in task.folder.glob("work-*"):
                shutil.rmtree(old, ignore_errors=True)
            told = {"seconds": seconds, "submitted": time.time(), "first": number == 0}
            path = task.folder / "task.json"
            write_atomic(path, task.model_copy(update=told).model_dump_json())
            logs = self.run.folder / "logs" / "profile"
            name = f"profile/{'+'.join(task.kinds)}"
            jobs.append(
                Job(name, (str(path),), task.folder, logs, needs, "pipeline.planning.profile.probe")
            )
        return dict(zip(self.launcher.submit_array(jobs), group, strict=True))

    def stage_plan(self, kind: Kind, nodes: int, per_node: int, time_min: int) -> StagePlan:
        """Resources on a kind; what it does not settle is as the plan has it for training."""
        train = self.plan.of(self.flow.trains)
        return StagePlan(
            partition=kind.partition or None,
            nodes=nodes,
            processes=per_node,
            gpus=min(per_node, kind.gpus_per_node),
            gpu_type=kind.gpu_type or None,
            constraint=kind.constraint or None,
            cpus=max(1, min(train.cpus, kind.cpus_per_node // per_node)),
            mem_mb=train.mem_mb,
            time_min=time_min,
        )

    def finish(self, jobs: dict[str, Task], end: float) -> None:
        """Wait until jobs have ended; those that have not started by ``end`` are cancelled.

        Where nothing is known yet they wait a minute at least.
        """
        open_ = dict(jobs)
        if not any(load_trial(task.trial) for task in jobs.values()):
            end = max(end, time.time() + PATIENCE_S)
        while open_:
            for identity, status in self.launcher.poll(list(open_)).items():
                # The next of an array has its turn as soon as the one before has ended.
                waits = status.state is State.PENDING and status.reason != NEXT_OF_ARRAY
                late = waits and time.time() > end
                if late:
                    log.warning("job %s waits for %s: cancelled", identity, status.reason)
                    self.launcher.cancel([identity])
                elif not status.state.active:
                    conclude(open_[identity], status)
                if late or not status.state.active:
                    del open_[identity]
            if open_:
                time.sleep(self.launcher.poll_s)

    def between(self, kinds: Sequence[Kind], end: float) -> list[Link]:
        """Links between kinds, each measured by a job on either; those without two are left out,
        and those whose jobs could not start before ``end``."""
        found: list[Link] = []
        for pair in combinations(kinds, 2):
            key = digest([kind_key(self.identity, kind) for kind in pair])
            folder = self.cache(key)
            if self.options.fresh:
                shutil.rmtree(folder, ignore_errors=True)
            tasks = [self.end_of_link(pair, key, folder, rank) for rank in (0, 1)]
            if load_trial(tasks[0].trial) is None and time.time() < end:
                shutil.rmtree(folder / MEETING, ignore_errors=True)
                jobs: dict[str, Task] = {}
                for kind, task in zip(pair, tasks, strict=True):
                    jobs |= self.submit(kind, [task], MEETING_S)
                try:
                    self.finish(jobs, time.time() + MEETING_S)
                except StageError as error:
                    log.warning("no link %s: %s", " - ".join(tasks[0].kinds), error)
            trial = load_trial(tasks[0].trial)
            found += trial.links if trial is not None else ()
        return found

    def mixed(self, pair: Pair, end: float) -> list[Mixture]:
        """Iterations of one job with a node of either kind; nothing where there is no time, or
        training alone on either was not measured."""
        times = [self.train_s(kind) for kind in pair.kinds]
        if None in times:
            return []
        speeds = mixture.speeds([seconds for seconds in times if seconds is not None])
        keys = [kind_key(self.identity, kind) for kind in pair.kinds]
        key = digest([*keys, *pair.features, *speeds])
        folder = self.cache(f"mixed-{key}")
        if self.options.fresh:
            shutil.rmtree(folder, ignore_errors=True)
        kind = pair.kinds[0]
        whole = Case(
            starts=self.run.config.rollout.batch, token_budget=token_budget(self.run.config)
        )
        task = self.task(kind, folder, 2, 2).model_copy(
            update={"kinds": tuple(kind.name for kind in pair.kinds), "cases": (whole,)}
        )
        share = min(end - time.time(), 60 * self.options.minutes * MIXED_SHARE) - START_S
        if not settled(task) and share > LEAST_S:
            log.info("%s in one job: measured for %.0f s", " and ".join(task.kinds), share)
            jobs = self.submit(kind, [task], share, lambda asked: pair.resources(asked, speeds))
            try:
                self.finish(jobs, end)
            except StageError as error:
                log.warning("%s in one job: %s", " and ".join(task.kinds), error)
        trial = load_trial(task.trial)
        samples = self.run.config.rollout.batch * self.run.config.rollout.group_size
        return mixture.mixtures(pair, speeds, samples, trial) if trial is not None else []

    def train_s(self, kind: Kind) -> float | None:
        """What training on the whole batch takes on one process of a kind."""
        samples = self.run.config.rollout.batch * self.run.config.rollout.group_size
        one = [t for task in self.tasks[kind.name] if task.processes == 1 for t in [task.trial]]
        trials = [trial for path in one if (trial := load_trial(path)) is not None]
        ran = [
            s for t in trials for s in t.samples if s.stage == self.flow.trains and not s.failure
        ]
        seconds = [s.seconds for s in ran if s.samples == samples and s.seconds > 0]
        return statistics.median(seconds) if seconds else None

    def end_of_link(self, pair: Sequence[Kind], key: str, folder: Path, rank: int) -> Task:
        """The task of one of two jobs that meet."""
        update = {
            "kinds": tuple(kind.name for kind in pair),
            "folder": folder / str(rank),
            "cases": (),
            "rank": rank,
            "key": key,
        }
        return self.task(pair[rank], folder, 1, 1).model_copy(update=update)

    def result(
        self,
        kinds: Sequence[Kind],
        between: Sequence[Link],
        mixed: Sequence[Mixture],
        client: SlurmClient | None,
    ) -> Profile:
        """All that was measured.

        Raises:
            InputError: nothing was measured on a kind.
        """
        config, found, every = self.run.config, {}, []
        flow = flow_of(config)
        for kind in kinds:
            trials = [t for task in self.tasks[kind.name] if (t := load_trial(task.trial))]
            trials = [trial for trial in trials if trial.samples]
            if not trials:
                raise InputError(
                    f"kind {kind.name}: nothing could be measured in {self.options.minutes:g} "
                    "minutes; give more with --minutes, or leave it out"
                )
            waits = self.waits(kind, client) if client else []
            own = self.alone.get(kind.name, [])
            found[kind.name] = assemble.kind_profile(kind, trials, waits, own, flow)
            every += trials
        lengths = assemble.lengths(every, config.rollout.horizon)
        size = max(trial.weights_bytes for trial in every)
        if lengths is None or not size:
            why = next((s.failure for t in every for s in t.samples if s.failure), "out of time")
            raise InputError(f"no kind could run a whole iteration of this run: {why}")
        return Profile(
            schema_version=SCHEMA,
            taken=datetime.now(UTC).replace(microsecond=0),
            identity=self.identity,
            samples=config.rollout.batch * config.rollout.group_size,
            token_budget=token_budget(config),
            weights_bytes=size,
            lengths=lengths,
            kinds=found,
            links=tuple(between),
            mixtures=tuple(mixed),
        )

    def waits(self, kind: Kind, client: SlurmClient) -> list[Wait]:
        """How long jobs of one node and of more would wait."""
        past = past_waits_s(client, kind.partition)
        site = resources(StagePlan(partition=kind.partition), self.cluster)
        given = [
            ("account", site.account),
            ("qos", site.qos),
            ("constraint", kind.constraint or site.constraint),
        ]
        found = []
        for nodes in sorted({1, min(2, kind.nodes), kind.nodes}):
            options = [f"--partition={kind.partition}", f"--nodes={nodes}", "--time=60"]
            options += [f"--{name}={value}" for name, value in given if value]
            if kind.gpus_per_node:
                gpus = ":".join(filter(None, ("gpu", kind.gpu_type, str(kind.gpus_per_node))))
                options.append(f"--gres={gpus}")
            # The scheduler prints local time without a zone.
            expected = expected_wait_s(client, datetime.now(), *options)
            found.append(assemble.wait(nodes, expected, past))
        return found

    def cache(self, key: str) -> Path:
        """Folder of the trials of a key."""
        return self.run.folder.parent / CACHE / key


def settled(task: Task) -> bool:
    """Whether a task needs no more jobs."""
    trial = load_trial(task.trial)
    return trial is not None and trial.key == task.key and trial.next_case(task.cases) is None
