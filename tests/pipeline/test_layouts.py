"""Models that several processes share: what each of them does, and that it ends as one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.commands.experiment import run_experiment, validate_experiment
from rlinf.artifacts import read_manifest
from rlinf.channels.record_files import RecordFileReader
from rlinf.errors import ConfigError, RlinfError
from tests.environments import need_environment
from tests.pipeline.test_driver import weights

Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")
OWN = "tests.pipeline.own_parallel"
PARTS = [f"engine.name={OWN}:ParallelEngine", f"trainer.name={OWN}:ParallelTrainer"]
SERVER = [
    "engine.name=tests.rlinf.engines.small_server:SmallEngine",
    *("model.hidden=96", "model.heads=12", "model.kv_heads=4"),
]
STAGES = ["rollout", "reward", "inference", "train"]
SHARED = {"processes": 2, "layout": {"tp": 2}}
JOBS = {"stages": dict.fromkeys(("rollout", "evaluate", "inference", "train"), SHARED)}
POOLS = {
    "stages": {
        "rollout": SHARED,
        "train": {"processes": 4, "layout": {"tp": 2}},
        "inference": {"processes": 4},
    },
    "pools": [
        {"stages": ["rollout"], "devices": {"local": 2}},
        {"stages": STAGES[1:], "devices": {"local": 4}},
    ],
}


@pytest.fixture(scope="module")
def reference(tiny_run: Path) -> Path:
    return tiny_run


def samples(run: Path, iteration: int) -> list[list[int]]:
    manifest = read_manifest(run / f"it/{iteration:04d}/rollout")
    assert manifest is not None
    files = (run / f"it/{iteration:04d}/rollout" / manifest.data).glob("*.h5")
    return [record.steps["actions"].tolist() for record in RecordFileReader(files)]


@pytest.mark.parametrize(
    ("plan", "processes"),
    [(JOBS, 2), pytest.param(POOLS, 4, marks=pytest.mark.slow)],
    ids=["jobs", "pools"],
)
@pytest.mark.timeout(600)
def test_processes_that_share_a_model_end_as_one_does(
    plan: dict[str, Any], processes: int, reference: Path, compose: Compose
) -> None:
    values = {**compose("cluster=local", "iterations=1", *PARTS), "plan": plan}
    run_experiment(values)
    run = Path(values["run"]["root"]) / "tiny"
    assert samples(run, 0) == samples(reference, 0), "each sample once"
    manifest = read_manifest(run / "it/0000/train")
    other = read_manifest(reference / "it/0000/train")
    assert manifest is not None
    assert other is not None
    assert manifest.world == processes
    assert manifest.metrics == pytest.approx(other.metrics, rel=1e-3, abs=1e-5)
    one, shared = weights(reference, 0), weights(run, 0)
    for name, tensor in one.items():
        torch.testing.assert_close(shared[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("experiment", "words", "text"),
    [
        (
            "arithmetic_grpo",
            ["trainer.dp_replicate=2"],
            r"^trainer\.dp_replicate: 2 .* 3 .*stages\.train;",
        ),
        (
            "arithmetic_grpo",
            ["trainer.lora={rank: 2, target_modules: [qproj]}"],
            r"^trainer\.lora\.target_modules: 'qproj' is not in the model; did you mean 'q_proj'",
        ),
        (
            "arithmetic_grpo",
            ["trainer.lora={rank: 2, target_modules: [embed_tokens]}"],
            r"embed_tokens is a Embedding; .* only linear layers",
        ),
        (
            "arithmetic_ppo",
            ["trainer=deepspeed", "model.critic=own", "trainer.python=deepspeed"],
            r"^trainer\.name: CausalLMCritic has several networks",
        ),
    ],
    ids=["copies", "target", "embedding", "critic"],
)
def test_what_no_trainer_could_begin_is_refused_before_a_job_is(
    experiment: str, words: list[str], text: str, compose: Compose, tmp_path: Path
) -> None:
    if "trainer.python=deepspeed" in words:
        need_environment("deepspeed")
    plan = {"stages": {"train": {"processes": 3}}}
    with pytest.raises(ConfigError, match=text):
        validate_experiment(
            {**compose("cluster=local", *words, experiment=experiment), "plan": plan}
        )
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("parts", "plan", "text"),
    [
        ([], JOBS, r"plan\.stages\.rollout\.layout\.tp: engine 'transformers' does not .* none"),
        (PARTS, {"defaults": {"layout": {"tp": 2}}}, r"plan\.defaults\.layout: set it per stage"),
        (PARTS, {"stages": {"train": {"layout": {"tp": 2}}}}, r"stages\.train\.layout: tp=2 takes"),
        (PARTS, {"stages": {"reward": SHARED}}, r"reward\.layout: reward computes with no model"),
        (PARTS, {"stages": {"train": {"layout": {"pt": 2}}}}, r"train\.layout\.pt: unknown key"),
        (
            PARTS,
            POOLS | {"stages": {**POOLS["stages"], "inference": {"processes": 4, "layout": {}}}},
            r"inference\.layout: none, but sft, whose trainer .* has tp=2",
        ),
        (
            SERVER,
            {"stages": {"evaluate": {"processes": 6, "layout": {"tp": 6}}}},
            r"stages\.evaluate\.layout\.tp: 6 .* 12 attention heads.*, 4 of keys.* 1, 2, 4, 12$",
        ),
    ],
)
def test_what_cannot_be_laid_out_is_refused(
    parts: list[str], plan: dict[str, Any], text: str, compose: Compose
) -> None:
    with pytest.raises(RlinfError, match=text) as error:
        validate_experiment({**compose("cluster=local", *parts), "plan": plan})
    assert error.value.exit_code == 65
