"""Quality of a chosen plan on partitions of different speed, compared with random plans.

On the dev cluster with ``a100`` nodes at half the speed of ``h100`` nodes: a profile pass, five
runs of the resulting plan, and one run of each of ten random valid plans, alternately. The real
driver runs them; an iteration lasts from one publication of weights to the next. No stage of the
ten plans has more processes than this machine has cores, because they would wait for each other.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path

from benchmarks.row import BenchmarkRow
from benchmarks.slurm_jobs import start_dev_cluster
from pipeline.commands.experiment import open_run, run_sft
from pipeline.driver import Driver
from pipeline.job_executor import JobExecutor, create_launcher
from pipeline.plan import Plan, PlanningSources
from pipeline.planning.planner.build_problem import build_problem
from pipeline.planning.planner.plan_command import build_request
from pipeline.planning.planner.planner import build_plan, propose_plan
from pipeline.planning.planner.problem import Placement
from pipeline.planning.planner.request import PlanRequest
from pipeline.planning.profile.profile_pass import ProfileOptions, clone_run, profile_run
from pipeline.pools.measured_times import measure_times
from pipeline.resources import ClusterConfig
from pipeline.run import Run
from rlinf import package_paths
from rlinf.config import validate

RUNS = 5
OTHERS = 10
CORES = 2
ITERATIONS = 3
"""Iterations of each run; the first does not count."""
SETTINGS = [
    "experiment=halfcheetah_ppo",
    "run.name=placement",
    "rollout.batch_size=64",
    "cluster=slurm",
    f"cluster.site={package_paths.ROOT}/slurm/devcluster/site.yaml",
    "cluster.poll_interval_s=0.2",
    "log.trackers=[]",
]


def measure() -> list[BenchmarkRow]:
    """Start the dev cluster and measure both rows."""
    start_dev_cluster()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        run = open_run([*SETTINGS, f"run.root={root}"])
        measured = profile_run(
            run, ProfileOptions(("a100", "h100"), minutes=4, processes=CORES), run_sft
        )
        measured.save(root / "profile.json")
        sources = PlanningSources(
            profile=str(root / "profile.json"), partitions=("a100", "h100", "gpu")
        )
        request = build_request(run.config, sources)
        proposal = propose_plan(request)
        other_plans = draw_plans(request, proposal.plan)
        # Alternate, so that a machine that slows down affects all plans.
        chosen_s, other_s = [], []
        for i in range(OTHERS):
            if i % (OTHERS // RUNS) == 0:
                chosen_s.append(iteration_s(run, proposal.plan, root, f"chosen-{i}"))
                print(
                    f"  predicted {proposal.forecast.iteration_s:.1f} s, was {chosen_s[-1]:.1f} s"
                )
            other_s.append(iteration_s(run, other_plans[i], root, f"other-{i}"))
            print(f"  another plan: {other_s[-1]:.1f} s")
        median_s = statistics.median(chosen_s)
    rank = 1 + sum(seconds < median_s for seconds in other_s)
    return [
        BenchmarkRow("plan_rank_of_10", rank, "place", 1, "lower", OTHERS, 0.0),
        BenchmarkRow(
            "plan_vs_next",
            round(min(other_s) / median_s, 4),
            "x",
            None,
            "higher",
            OTHERS,
            round((max(other_s) - min(other_s)) / median_s, 4),
        ),
    ]


def draw_plan(request: PlanRequest, rng: random.Random) -> Plan:
    """Return a random plan of jobs: any kind and number of devices, at most one for each core."""
    problem, tables = build_problem(request)
    jobs = []
    for stage in problem.stages:
        choices = [
            tuple(n * (kind is other) for other in problem.kinds)
            for kind in problem.kinds
            for n in range(1, CORES + 1)
            if kind.name in stage.rates and n <= kind.gpus and stage.rates[kind.name][n] > 0
            if n == 1 or stage.divisible
        ]
        jobs.append(rng.choice(choices))
    pools = tuple((s,) for s in range(len(jobs)))
    return build_plan(request, problem, tables, Placement(pools, tuple(jobs), 1))


def draw_plans(request: PlanRequest, chosen: Plan, seed: int = 0) -> list[Plan]:
    """Return random plans that differ from the chosen one."""
    rng, plans = random.Random(seed), [chosen]
    while len(plans) <= OTHERS:
        plan = draw_plan(request, rng)
        if all(plan.stages != other.stages for other in plans):
            plans.append(plan)
    return plans[1:]


def iteration_s(run: Run, plan: Plan, root: Path, name: str) -> float:
    """Return the median seconds of an iteration under a plan."""
    clone = clone_run(run, plan, root / "runs", name, ITERATIONS)
    cluster = validate(ClusterConfig, run.config.cluster, "cluster")
    executor = JobExecutor(clone, create_launcher(cluster, plan), plan, cluster)
    Driver(clone, executor, max_retries=cluster.max_retries).drive()
    return measure_times(clone)["iteration"].median_s
