"""The experiments for GPUs fit the hardware of their plans, by data sheets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.recipes import (
    GPU_MODELS,
    MODELS,
    PROMPT_TOKENS,
    RECIPES,
    estimate_recipe,
    plan_inventory,
    plan_path,
    recipe_config,
    recipe_request,
)
from pipeline.commands.experiment import compose_words
from pipeline.graph import Graph
from pipeline.plan import load_plan, read_plan
from pipeline.planning.cost.data_sheet import device_from_data_sheet
from pipeline.planning.cost.model_shape import from_hf_config
from pipeline.planning.planner.planner import assess_plan
from pipeline.pools.measured_times import WORK_PART
from pipeline.resources import pool_resources
from pipeline.run import effective_settings
from pipeline.validate_config import check_layouts, check_requirements, load_components
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError, PlanError
from stages.flow import flow_of

EXPERIMENTS = sorted({experiment for experiment, _ in RECIPES})
PUBLISHED_PARAMETERS = {
    "math_grpo_0_5b": 494_032_768,
    "math_grpo_1_5b": 1_543_714_304,
    "math_grpo_7b": 7_615_616_512,
    "math_grpo_32b": 32_763_876_352,
}
"""Numbers of parameters of the published checkpoints of Qwen2.5."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


def folder_of(root: Path, experiment: str) -> Path:
    """Experiments with models of one size share a checkpoint."""
    return root / experiment.removesuffix("_lora")


@pytest.mark.parametrize("experiment", PUBLISHED_PARAMETERS)
def test_sizes_are_those_of_the_published_models(experiment: str) -> None:
    shape = from_hf_config(MODELS[experiment])
    assert shape.parameters == PUBLISHED_PARAMETERS[experiment]


@pytest.mark.parametrize("experiment", ["math_grpo", *EXPERIMENTS])
def test_a_recipe_composes_without_its_model(experiment: str) -> None:
    words = [f"experiment={experiment}", "model.path=/models/x", "task.test=test.jsonl"]
    values = compose_words(words)
    settings, _ = effective_settings(validate(RunConfig, values))
    assert settings["run"]["name"] == experiment
    assert (settings["engine"]["dtype"], settings["trainer"]["param_dtype"]) == 2 * ("bfloat16",)
    assert settings["model"]["dtype"] == "float32", "weights that the optimizer changes"


def test_a_missing_checkpoint_is_named_with_the_folder_to_give() -> None:
    with pytest.raises(ConfigError, match=r"model\.path=FOLDER.*Hugging Face.*config\.json"):
        compose_words(["experiment=math_grpo_7b", "task.test=test.jsonl"])


@pytest.mark.parametrize(("experiment", "plan_name"), RECIPES)
def test_a_recipe_fits_the_hardware_of_its_plan(
    experiment: str, plan_name: str, root: Path
) -> None:
    """Its plan is valid, memory suffices, and training reaches a plausible share of the peak."""
    folder = folder_of(root, experiment)
    config = recipe_config(experiment, folder)
    config = config.model_copy(update={"plan": str(plan_path(plan_name))})
    run = load_components(config)
    check_requirements(run)
    for section, cls in run.classes.items():
        cls.check(run.options[section], run)
    plan = load_plan(config)
    plan.check_transports(Graph(config).edges())
    check_layouts(config, plan)
    jobs = [job for number in range(len(plan.pools)) for job in pool_resources(plan, number)]
    assert [(job.partition, job.nodes, job.gpus) for job in jobs] == [
        (kind, 1, count) for pool in plan.pools for kind, count in pool.devices.items()
    ]
    request = recipe_request(config, plan, folder)
    proposal = assess_plan(request, plan, plan_name)
    assert 0 < proposal.forecast.low_s < proposal.forecast.iteration_s < proposal.forecast.high_s
    shape = from_hf_config(MODELS[experiment])
    tokens = PROMPT_TOKENS + config.rollout.horizon / 2
    samples = config.rollout.batch_size * config.rollout.group_size
    flops = 3 * samples * tokens * float(shape.forward_flops(tokens / 2))
    ((kind, count),) = next(p for p in plan.pools if "train" in p.stages).devices.items()
    seconds = proposal.forecast.stages["train"].breakdown_s[WORK_PART]
    peak = count * device_from_data_sheet(GPU_MODELS[kind]).flops
    assert 0.2 < flops / seconds / peak < 0.6


@pytest.mark.parametrize(("experiment", "plan_name"), RECIPES)
def test_memory_of_a_recipe_is_explained_and_leaves_room(
    experiment: str, plan_name: str, root: Path
) -> None:
    estimate = estimate_recipe(experiment, plan_name, folder_of(root, experiment))
    for stage, parts in estimate.memory_bytes.items():
        assert all(size > 0 for size in parts.values())
        assert sum(parts.values()) < estimate.usable_bytes[stage]
    assert np.isfinite(estimate.run_gpu_hours)


def test_the_32_b_recipe_on_one_h100_is_refused_with_what_it_needs(root: Path) -> None:
    folder = folder_of(root, "math_grpo_32b")
    config = recipe_config("math_grpo_32b", folder)
    plan = read_plan(plan_path("one_h100"), flow_of(config))
    request = recipe_request(config, plan, folder)
    with pytest.raises(
        PlanError,
        match=r"does not fit: it needs \d+\.\d GiB of 74\.5 usable \(h100\): weights .*"
        r"it fits on 2 such GPUs.*stage 'train' .* it fits on 5 such GPUs",
    ):
        assess_plan(request, plan, "one_h100.yaml")


def test_an_experiment_that_needs_more_gpus_says_how_many(root: Path) -> None:
    """Moments of 32 B parameters are on the host, and weights and gradients need five H100."""
    folder = folder_of(root, "math_grpo_32b")
    config = recipe_config("math_grpo_32b", folder)
    plan = read_plan(plan_path("four_h100"), flow_of(config))
    with pytest.raises(PlanError, match=r"train.*it fits on 5 such GPUs"):
        assess_plan(recipe_request(config, plan, folder), plan, "four_h100.yaml")


def test_tensor_parallelism_must_divide_the_gpus(root: Path) -> None:
    folder = folder_of(root, "math_grpo_7b")
    config = recipe_config("math_grpo_7b", folder)
    plan = read_plan(plan_path("eight_a100_tp4"), flow_of(config))
    profile = recipe_request(config, plan, folder, plan_inventory(plan)).profile
    failures = {
        point.processes: point.failure
        for point in profile.kinds["a100"].points
        if point.stage == "rollout"
    }
    assert "tp=4 does not divide 2 GPUs" in failures[2]
    assert (failures[4], failures[8]) == ("", "")
