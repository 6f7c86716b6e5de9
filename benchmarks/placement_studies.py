"""``python -m benchmarks.placement_studies``: simulate and compare plans on the studies.

Prints the table of docs/explanation/cost-model.md and draws its charts. All speeds are derived from
data sheets (``pipeline/planning/simulator/studies.py``). The results compare placements; they are
no measurement of a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import Placement, PlacementProblem
from pipeline.planning.planner.search import solve
from pipeline.planning.simulator import SimulationTrace, simulate
from pipeline.planning.simulator.simulate_command import gantt_chart
from pipeline.planning.simulator.studies import SCENARIOS, STUDIES, PlacementStudy
from pipeline.report.theme import STAGE_COLOURS

IMAGES = Path(__file__).parent.parent / "docs" / "images"
ITERATIONS, SEEDS = 100, range(5)
CHART_STUDY = "70b-1024"


@dataclass(frozen=True)
class StudyPlan:
    """A placement to compare, on all GPUs of a study or on one kind of GPU."""

    name: str
    study: PlacementStudy
    placement: Placement

    def traces(self, scenario: str) -> list[SimulationTrace]:
        """Return one simulation per seed."""
        settings = self.study.scenario(scenario)
        return [
            simulate(self.study.problem, self.placement, settings, ITERATIONS, seed)
            for seed in SEEDS
        ]


def plans(study: PlacementStudy) -> list[StudyPlan]:
    """Return plans that a user might choose, and the planner's plan."""
    problem = study.problem
    # A user may let one job span several kinds of nodes, and use nodes partially.
    relaxed = replace(problem, kinds=[replace(k, per_node=0) for k in problem.kinds], mixes=None)
    singles = [study.only(kind) for kind in study.gpus]
    stages = range(len(problem.stages))
    one_pool = (tuple(stages),)
    separate_pools = tuple((s,) for s in stages)
    everything = tuple(kind.gpus for kind in problem.kinds)
    even = tuple(
        tuple(kind.gpus // len(separate_pools) for kind in problem.kinds) for _ in separate_pools
    )
    collocated = [(s, Placement(one_pool, ((s.problem.kinds[0].gpus,),), 1)) for s in singles]
    planned = [(s, solve(s.problem)[0].placement) for s in singles]
    return [
        StudyPlan("collocated, one kind", *min(collocated, key=_predicted)),
        StudyPlan("planned, one kind", *min(planned, key=_predicted)),
        StudyPlan("collocated, all kinds", study, Placement(one_pool, (everything,), 1)),
        StudyPlan("disaggregated evenly", study, _best_chunks(relaxed, separate_pools, even)),
        StudyPlan("planned", study, solve(problem)[0].placement),
    ]


def main() -> None:
    """Simulate all plans, print the table and draw the charts."""
    means: dict[str, dict[str, dict[str, float]]] = {}
    header = ["study", "plan", *SCENARIOS, "100 iterations with preemption", "price"]
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for name, study in STUDIES.items():
        means[name] = {}
        for plan in plans(study):
            traces = {scenario: plan.traces(scenario) for scenario in SCENARIOS}
            means[name][plan.name] = {
                s: float(np.mean([t.mean_s for t in runs])) for s, runs in traces.items()
            }
            total_h = np.mean([t.total_s for t in traces["preemption"]]) / 3600
            # Prices are per hour of allocation.
            price = float(np.mean([t.cost for t in traces["calm"]])) / ITERATIONS
            cells = [f"{value:.1f}" for value in means[name][plan.name].values()]
            print(
                "| " + " | ".join([name, plan.name, *cells, f"{total_h:.1f} h", f"{price:.1f}"]),
                "|",
            )
            if name == CHART_STUDY and plan.name in ("planned", "disaggregated evenly"):
                _save(gantt_chart(traces["tails"][0]), f"simulated-{plan.name.split()[0]}.png")
    _save(chart(means), "studies.png")


def chart(means: dict[str, dict[str, dict[str, float]]]) -> Figure:
    """Draw iteration times relative to the planner's, one panel per scenario."""
    scenarios = ("calm", "all")
    figure, axes = plt.subplots(1, len(scenarios), figsize=(10, 3.4), sharey=True)
    colours = [STAGE_COLOURS[c] for c in ("sync", "inference", "rollout", "reward", "train")]
    for axis, scenario in zip(axes, scenarios, strict=True):
        for i, (plan, colour) in enumerate(zip(next(iter(means.values())), colours, strict=False)):
            values = [
                study[plan][scenario] / study["planned"][scenario] for study in means.values()
            ]
            x = np.arange(len(values)) + (i - 2) * 0.16
            axis.bar(x, values, 0.16, color=colour, label=plan)
        axis.set_xticks(range(len(means)), list(means))
        axis.grid(axis="x", visible=False)
        axis.set(
            title={"calm": "Without disturbances"}.get(scenario, "Tails, slow GPUs, preemption")
        )
    axes[0].set_ylabel("iteration time / planned")
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=5, loc="lower center", fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def _predicted(entry: tuple[PlacementStudy, Placement]) -> float:
    study, placement = entry
    return float(Predictor(study.problem).predict(placement).total_s)


def _best_chunks(
    problem: PlacementProblem, pools: tuple[tuple[int, ...], ...], gpus: tuple[tuple[int, ...], ...]
) -> Placement:
    options = [Placement(pools, gpus, chunks) for chunks in problem.chunks]
    return min(options, key=lambda p: float(Predictor(problem).predict(p).total_s))


def _save(figure: Figure, name: str) -> None:
    figure.savefig(IMAGES / name, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    main()
