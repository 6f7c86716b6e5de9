"""The plan for simulators on GPUs is assessed and simulated like others; no GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.commands.experiment import compose
from pipeline.plan import read_plan
from pipeline.planning.planner.build_problem import build_problem
from pipeline.planning.planner.planner import assess_plan, propose_plan
from pipeline.planning.planner.problem import placement_from_pools
from pipeline.planning.simulator.simulation import simulate
from pipeline.validate_config import check_layouts
from rlinf import package_paths
from rlinf.config import RunConfig, validate
from rlinf.envs import environments
from stages.flow import flow_of
from tests.pipeline.planning.planner.test_propose import ask

PLAN = package_paths.ROOT / "configs" / "plans" / "gpu_simulators.yaml"


@pytest.mark.parametrize("experiment", ["maniskill_gpu_ppo", "isaaclab_ppo"])
def test_the_plan_of_gpu_simulators_is_assessed_and_simulated(experiment: str) -> None:
    config = validate(RunConfig, compose([f"experiment={experiment}", "rollout.batch_size=32"]))
    plan = read_plan(Path(PLAN), flow_of(config))
    check_layouts(config, plan)
    request = ask(config, "a100", "h100", execution="pools")
    assessed = assess_plan(request, plan, str(PLAN))
    forecast = assessed.forecast
    pools = [tuple(pool.stages) for pool in assessed.plan.pools]
    assert pools == [("sft", "rollout", "evaluate"), ("reward", "inference", "train")]
    assert propose_plan(request).forecast.iteration_s <= forecast.iteration_s
    problem, _ = build_problem(request)
    occasional = flow_of(config).all_stages.keys() - flow_of(config).stages
    placement = placement_from_pools(problem, plan.pools, plan.num_chunks, occasional)
    trace = simulate(problem, placement, iterations=5)
    assert trace.iteration_s.mean() == pytest.approx(forecast.iteration_s, rel=0.2)


@pytest.mark.parametrize("experiment", ["maniskill_gpu_ppo", "isaaclab_ppo"])
def test_no_environment_rests_and_no_sample_waits(experiment: str) -> None:
    config = validate(RunConfig, compose([f"experiment={experiment}"]))
    task = config.task.model_extra or {}
    assert task["kwargs"]["num_envs"] == config.rollout.batch_size * config.rollout.group_size
    cls = environments.get(config.task.name)
    assert cls.model_spec(cls.Config.model_validate(task))["action"]["size"] == 8
