"""Profile, plan and run on unlike partitions: how good the choice is.

On the dev cluster with ``a100`` nodes at half the speed of ``h100`` nodes: a profile pass, the plan
it leads to, five runs of that plan, and one of each of ten other valid plans drawn at random, in
turns. Iterations are those of the real driver, from one publication of weights to the next. More
processes than this machine has cores would only take turns, so none of the ten has more in a stage.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.row import BenchmarkRow
from benchmarks.slurm_jobs import start_dev_cluster
from pipeline.cluster_config import ClusterConfig
from pipeline.commands.experiment import open_run, run_sft
from pipeline.driver import Driver
from pipeline.job_executor import JobExecutor, create_launcher
from pipeline.plan import Plan, PlanningSources
from pipeline.planning.planner.job_planner import build_plan
from pipeline.planning.planner.plan_command import build_request, propose_plan
from pipeline.planning.planner.stage_options import StageOption
from pipeline.planning.profile.profile_pass import ProfileOptions, profile_run
from pipeline.planning.profile.stage_job_bench import clone_run
from pipeline.pools.measured_times import measure_times
from pipeline.run import Run
from rlinf import package_paths
from rlinf.config import validate
from stages.flow import flow_of

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
    """Bring the cluster up and measure."""
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
        others = drawn(request.stage_options(), [row.size + row.place for row in proposal.rows])
        # In turns, so that a machine that gets slower does so for all.
        chosen, theirs = [], []
        flow = flow_of(run.config)
        for i in range(OTHERS):
            if i % (OTHERS // RUNS) == 0:
                chosen.append(iteration_s(run, proposal.plan, root, f"chosen-{i}"))
                print(f"  predicted {proposal.forecast.iteration_s:.1f} s, was {chosen[-1]:.1f} s")
            theirs.append(iteration_s(run, build_plan(others[i], flow), root, f"other-{i}"))
            print(f"  another plan: {theirs[-1]:.1f} s")
        mine = statistics.median(chosen)
    rank = 1 + sum(seconds < mine for seconds in theirs)
    return [
        BenchmarkRow("plan_rank_of_10", rank, "place", 1, "lower", OTHERS, 0.0),
        BenchmarkRow(
            "plan_vs_next",
            round(min(theirs) / mine, 4),
            "x",
            None,
            "higher",
            OTHERS,
            round((max(theirs) - min(theirs)) / mine, 4),
        ),
    ]


def drawn(
    options: dict[str, list[StageOption]], chosen: Sequence[str], seed: int = 0
) -> list[list[StageOption]]:
    """Other plans: for each stage any of its options."""
    rng, seen = random.Random(seed), {tuple(chosen)}
    found: list[list[StageOption]] = []
    fitting = [[o for o in every if o.count <= CORES] for every in options.values()]
    while len(found) < OTHERS:
        plan = [rng.choice(every) for every in fitting]
        key = tuple(option.size + option.place for option in plan)
        if key not in seen:
            seen.add(key)
            found.append(plan)
    return found


def iteration_s(run: Run, plan: Plan, root: Path, name: str) -> float:
    """Median seconds of an iteration under a plan."""
    made = clone_run(run, plan, root / "runs", name, ITERATIONS)
    cluster = validate(ClusterConfig, run.config.cluster, "cluster")
    executor = JobExecutor(made, create_launcher(cluster, plan), plan, cluster)
    Driver(made, executor, max_retries=cluster.max_retries).drive()
    return measure_times(made)["iteration"].median_s
