"""A run teaches its plan: predicted against actual, and a new plan that has learnt."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.commands.experiment import compose as hydra_compose
from pipeline.commands.experiment import run_experiment
from pipeline.metrics import stage_manifest
from pipeline.plan import Plan, PlanningSources
from pipeline.planning.planner.plan_command import build_request, run_replan
from pipeline.planning.planner.planner import propose_plan
from pipeline.pools.measured_times import compare_with_forecast, measure_times
from pipeline.pools.work_log import WORK_LOG
from pipeline.report import write_report
from pipeline.run import Run
from rlinf.errors import PlanError
from stages.layout import POOLS_FOLDER
from tests.conftest import TINY
from tests.pipeline.planning.planner import clusters

Compose = Callable[..., dict[str, Any]]
BUSY = ("rollout", "inference", "train")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    words = ["experiment=arithmetic_grpo", f"++run.root={root}", *TINY, "++log.trackers=[]"]
    run_experiment(hydra_compose([*words, "iterations=4", "++rollout.batch_size=16"]))
    return root / "tiny"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Run:
    """A copy of a finished run, with a plan made for another machine than it ran on."""
    folder = tmp_path / "runs" / "tiny"
    shutil.copytree(finished, folder)
    opened = Run.open(folder)
    clusters.profile(opened.config).save(tmp_path / "profile.json")
    clusters.inventory().save(tmp_path / "inventory.json")
    sources = PlanningSources(
        profile=str(tmp_path / "profile.json"),
        inventory=str(tmp_path / "inventory.json"),
        partitions=("h100",),
    )
    plan = propose_plan(build_request(opened.config, sources)).plan
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan.to_dict()))
    return opened


def test_actual_times_are_those_between_commits(run: Run) -> None:
    times = measure_times(run)
    assert len(times["iteration"].total_s) == 3
    for iteration, whole in enumerate(times["iteration"].total_s, 1):
        ends = []
        for i in (iteration - 1, iteration):
            manifest = stage_manifest(run.folder, "sync", i)
            assert manifest is not None
            ends.append(manifest.timing["end"])
        assert whole == pytest.approx(ends[1] - ends[0])
    for stage in BUSY:
        pairs = zip(times[stage].running_s, times[stage].total_s, strict=True)
        assert all(0 < inside <= whole for inside, whole in pairs)


def test_a_new_plan_predicts_what_the_run_took(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    old = {line.name: line for line in compare_with_forecast(run)}
    assert old["iteration"].error > 1
    assert not old["rollout"].is_within_interval
    run_replan(run, None, None, apply=False)
    assert "predicted against actual" in capsys.readouterr().out
    assert Plan.from_run(run.folder).forecast is not None
    new = yaml.safe_load((run.folder / "replan.yaml").read_text())["forecast"]["stages"]
    for stage in BUSY:
        assert new[stage]["seconds"] == pytest.approx(old[stage].actual.median_s, rel=0.05)


def ran_again(run: Run) -> None:
    """As if its iterations had been made under the plan that it has now."""
    values = yaml.safe_load((run.folder / "plan.yaml").read_text())
    values["forecast"]["applied_at"] = None
    (run.folder / "plan.yaml").write_text(yaml.safe_dump(values))


def test_iterations_of_an_earlier_plan_teach_nothing(run: Run) -> None:
    run_replan(run, None, None, apply=True)
    assert not compare_with_forecast(run)
    with pytest.raises(PlanError, match="two iterations must be finished"):
        run_replan(run, None, None, apply=True)


def test_what_an_earlier_run_taught_is_kept(run: Run) -> None:
    """A second new plan finds nothing off by much any more, and so changes little."""
    run_replan(run, None, None, apply=True)
    first = Plan.from_run(run.folder).forecast
    ran_again(run)
    run_replan(run, None, None, apply=True)
    second = Plan.from_run(run.folder).forecast
    assert first is not None
    assert second is not None
    for stage in BUSY:
        assert second.stages[stage].seconds == pytest.approx(first.stages[stage].seconds, rel=0.05)


def test_a_new_plan_of_pools_knows_what_the_stages_computed(run: Run) -> None:
    plan = Plan.from_run(run.folder)
    assert plan.forecast is not None
    assert plan.forecast.sources is not None
    request = build_request(run.config, plan.forecast.sources, execution="pools")
    pools = propose_plan(request).plan
    (run.folder / "plan.yaml").write_text(yaml.safe_dump(pools.to_dict()))
    old = {line.name: line for line in compare_with_forecast(run)}
    assert old.keys() == {"rollout", "reward", "inference", "train", "iteration"}
    assert abs(old["train"].error) > 0.5
    took = statistics.median(measure_times(run)["train"].busy_s)
    run_replan(run, None, None, apply=True)
    new = Plan.from_run(run.folder)
    assert new.forecast is not None
    known = {(entry.stage, entry.kind): entry.work_factor for entry in new.forecast.corrections}
    profiled = pools.forecast
    assert profiled is not None
    assert known["train", "h100"] == pytest.approx(
        took / profiled.stages["train"].breakdown_s["work"]
    )


def test_an_elastic_rollout_took_what_its_busiest_generator_did(run: Run) -> None:
    (run.folder / POOLS_FOLDER).mkdir()
    rows = [
        {"node": "rollout/1", "worker": f"pool-0w{worker}-0-r0", "host": "h", "starts": [start]}
        | {"spans": [["generate", at, at + seconds]]}
        for start, (worker, at, seconds) in enumerate([(0, 0.0, 3.0), (1, 0.0, 2.0), (0, 4.0, 4.0)])
    ]
    (run.folder / POOLS_FOLDER / WORK_LOG).write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    first, *_ = measure_times(run)["rollout"].busy_s
    assert first == 7.0


def test_a_new_plan_replaces_the_old_one_only_when_asked(run: Run) -> None:
    before = Plan.from_run(run.folder)
    run_replan(run, None, "gpu-hours", apply=False)
    assert Plan.from_run(run.folder) == before
    run_replan(run, None, "gpu-hours", apply=True)
    after = Plan.from_run(run.folder).forecast
    assert after is not None
    assert after.objective == "gpu-hours"


def test_the_report_shows_predicted_beside_actual(run: Run) -> None:
    page = write_report(run.folder).read_text()
    assert "Predicted and measured times" in page
    (run.folder / "plan.yaml").write_text("{}")
    assert "Predicted and measured times" not in write_report(run.folder).read_text()


def test_a_plan_without_prediction_cannot_be_compared(run: Run) -> None:
    (run.folder / "plan.yaml").write_text("{}")
    with pytest.raises(PlanError, match=r"no prediction to compare with.*rlinf plan"):
        run_replan(run, None, None, apply=False)


def test_a_profile_of_another_run_is_refused(run: Run, compose: Compose) -> None:
    from rlinf.config import RunConfig, validate

    other = validate(RunConfig, compose("rollout.horizon=7"))
    plan = Plan.from_run(run.folder)
    assert plan.forecast is not None
    assert plan.forecast.sources is not None
    with pytest.raises(PlanError, match=r"profile\.json: identity\.config: .*rlinf profile"):
        build_request(other, plan.forecast.sources)
