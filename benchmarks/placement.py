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

from benchmarks.row import Row
from benchmarks.slurm_jobs import bring_up
from pipeline.commands.experiment import named, warm_start
from pipeline.driver import Driver
from pipeline.launch import ClusterConfig, LauncherExecutor, make_launcher
from pipeline.plan import Plan, Sources
from pipeline.planning.planner.jobs import plan_of
from pipeline.planning.planner.options import Option
from pipeline.planning.planner.propose import propose
from pipeline.planning.planner.show import request
from pipeline.planning.profile.alone import like
from pipeline.planning.profile.measure import Options, profile
from pipeline.pools.actuals import actual
from pipeline.run import Run
from rlinf import tree
from rlinf.config import validate
from stages.flow import flow_of

RUNS = 5
OTHERS = 10
CORES = 2
ITERATIONS = 3
"""Of each run; the first does not count."""
SETTINGS = [
    "experiment=halfcheetah_ppo",
    "run.name=placement",
    "rollout.batch=64",
    "cluster=slurm",
    f"cluster.site={tree.ROOT}/slurm/devcluster/site.yaml",
    "cluster.poll_s=0.2",
    "log.trackers=[]",
]


def measure() -> list[Row]:
    """Bring the cluster up and measure."""
    bring_up()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        run = named([*SETTINGS, f"run.root={root}"])
        measured = profile(run, Options(("a100", "h100"), minutes=4, processes=CORES), warm_start)
        measured.save(root / "profile.json")
        sources = Sources(profile=str(root / "profile.json"), partitions=("a100", "h100", "gpu"))
        asked = request(run.config, sources)
        proposal = propose(asked)
        others = drawn(asked.options(), [row.size + row.place for row in proposal.rows])
        # In turns, so that a machine that gets slower does so for all.
        chosen, theirs = [], []
        flow = flow_of(run.config)
        for i in range(OTHERS):
            if i % (OTHERS // RUNS) == 0:
                chosen.append(iteration_s(run, proposal.plan, root, f"chosen-{i}"))
                print(f"  predicted {proposal.forecast.iteration_s:.1f} s, was {chosen[-1]:.1f} s")
            theirs.append(iteration_s(run, plan_of(others[i], flow), root, f"other-{i}"))
            print(f"  another plan: {theirs[-1]:.1f} s")
        mine = statistics.median(chosen)
    rank = 1 + sum(seconds < mine for seconds in theirs)
    return [
        Row("plan_rank_of_10", rank, "place", 1, "lower", OTHERS, 0.0),
        Row(
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
    options: dict[str, list[Option]], chosen: Sequence[str], seed: int = 0
) -> list[list[Option]]:
    """Other plans: for each stage any of its options."""
    rng, seen = random.Random(seed), {tuple(chosen)}
    found: list[list[Option]] = []
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
    made = like(run, plan, root / "runs", name, ITERATIONS)
    cluster = validate(ClusterConfig, run.config.cluster, "cluster")
    executor = LauncherExecutor(made, make_launcher(cluster, plan), plan, cluster)
    Driver(made, executor, retries=cluster.retries).drive()
    return actual(made)["iteration"].median_s
