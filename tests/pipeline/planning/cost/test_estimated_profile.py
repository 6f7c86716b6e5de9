"""Plans before any measurement: what data sheets say, in the shape of a profile."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.recipes import QWEN2_5_7B, write_hollow_checkpoint
from pipeline.plan import PlanningSources, read_plan
from pipeline.planning.cost.estimated_profile import estimate_profile, with_critic
from pipeline.planning.cost.model_shape import from_hf_config
from pipeline.planning.planner.plan_command import build_request, compute_corrections, run_plan
from pipeline.planning.planner.planner import propose_plan
from pipeline.planning.planner.stage_times import StageTimes
from pipeline.pools.measured_times import WORK_PART, MeasuredTimes
from rlinf.config import RunConfig, validate
from rlinf.errors import PlanError
from rlinf.models.causal_lm_critic import CausalLMActorCritic
from slurm.inventory import Inventory, NodeGroup, PartitionInventory
from slurm.site import SiteConfig
from stages.flow import on_policy
from tests.pipeline.planning.planner.clusters import TAKEN

Compose = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 7 B parameters, whose file has holes for weights."""
    folder = tmp_path_factory.mktemp("qwen")
    write_hollow_checkpoint(QWEN2_5_7B, folder)
    return folder


def groups(**counts: int) -> Inventory:
    """Partitions of so many nodes, each of eight GPUs of the partition's name."""
    found = {}
    for name, nodes in counts.items():
        gpus = 0 if name == "cpu" else 8
        group = NodeGroup(
            count=nodes,
            gpu_type="" if name == "cpu" else name,
            gpus_per_node=gpus,
            cpus_per_node=64,
            mem_mb_per_node=1_000_000,
            idle_nodes=nodes,
            idle_gpus=gpus * nodes,
            gpu_model={"a100": "a100-80gb-sxm", "h100": "h100-sxm"}.get(name, ""),
        )
        found[name] = PartitionInventory(name=name, groups=(group,), time_limit_min=None)
    return Inventory(schema_version=1, created_at=TAKEN, slurm_version="25.05.1", partitions=found)


Configure = Callable[..., RunConfig]


@pytest.fixture
def configure(checkpoint: Path, compose: Compose, tmp_path: Path) -> Configure:
    for split, count in (("train", 512), ("test", 256)):
        rows = [json.dumps({"question": f"{split} {i}", "answer": str(i)}) for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    words = [
        f"model.path={checkpoint}",
        f"task.train={tmp_path}/train.jsonl",
        f"task.test={tmp_path}/test.jsonl",
        "engine.dtype=bfloat16",
        "trainer.param_dtype=bfloat16",
        "trainer.gradient_checkpointing=true",
        "algorithm.minibatches=1",
    ]
    return lambda *more: validate(RunConfig, compose(*words, *more, experiment="jsonl_grpo"))


@pytest.fixture
def config(configure: Configure) -> RunConfig:
    return configure()


@pytest.mark.parametrize("execution", ["jobs", "pools"])
def test_a_model_of_7_b_is_planned_on_64_a100_and_32_h100(
    config: RunConfig, execution: Any, tmp_path: Path
) -> None:
    saved = tmp_path / "inventory.json"
    saved.write_text(groups(a100=8, h100=4, cpu=2).model_dump_json())
    request = build_request(
        config, PlanningSources(profile="", inventory=str(saved)), execution=execution
    )
    assert request.profile.estimated
    assert "nothing was measured" in request.notes[0]
    assert any("cpu was not measured" in note for note in request.notes)
    proposal = propose_plan(request)
    forecast = proposal.forecast
    assert forecast.high_s > 1.2 * forecast.iteration_s, "wide"
    rows = {row.stage: row for row in proposal.rows}
    train = proposal.plan.stage_plan("train")
    has_one = train.nodes * train.processes == 1
    assert not has_one, "one GPU has no room for weights, gradients and moments"
    assert {"rollout", "reward", "inference", "train"} <= set(rows)


@pytest.mark.parametrize("execution", ["jobs", "pools"])
def test_the_command_plans_it_with_and_without_a_profile(
    config: RunConfig, execution: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The profile is what data sheets say, as if it had been measured."""
    saved, measured = tmp_path / "inventory.json", tmp_path / "profile.json"
    saved.write_text(groups(a100=8, h100=4).model_dump_json())
    profile = estimate_profile(
        config, Inventory.model_validate_json(saved.read_text()), SiteConfig()
    )
    profile.model_copy(update={"estimated": False}).save(measured)
    widths, seconds = {}, {}
    for name in ("", str(measured)):
        out = tmp_path / f"plan-{bool(name)}.yaml"
        run_plan(
            config,
            PlanningSources(profile=name, inventory=str(saved)),
            out,
            "time",
            (),
            execution=execution,
        )
        assert ("nothing was measured" in capsys.readouterr().out) == (not name)
        forecast = read_plan(out, on_policy).forecast
        assert forecast is not None
        assert out.with_suffix(".html").exists()
        seconds[name] = forecast.iteration_s
        widths[name] = (forecast.high_s - forecast.low_s) / forecast.iteration_s
    assert widths[str(measured)] < 0.5 * widths[""]
    assert seconds[str(measured)] == pytest.approx(seconds[""], rel=0.25)


def test_what_does_not_fit_a_gpu_is_no_place_for_it(config: RunConfig) -> None:
    profile = estimate_profile(config, groups(a100=2), SiteConfig())
    (kind,) = profile.kinds.values()
    points = {(p.stage, p.processes, p.samples): p for p in kind.points}
    alone = points["train", 1, profile.samples]
    assert not alone.succeeded
    # 16 bytes of each of 7.6 B parameters.
    assert "does not fit: it needs 1" in alone.failure
    assert points["train", 8, profile.samples].succeeded
    assert points["rollout", 1, profile.samples].succeeded


def test_more_gpus_and_half_the_batch_take_less(config: RunConfig) -> None:
    profile = estimate_profile(config, groups(a100=2, h100=2), SiteConfig())
    for kind in profile.kinds.values():
        times = {(p.stage, p.processes, p.samples): p.time.median_s for p in kind.points if p.time}
        for stage in ("rollout", "inference", "train"):
            whole = profile.samples
            assert times[stage, 8, whole] < times.get((stage, 4, whole), np.inf)
            assert times[stage, 8, whole // 2] < times[stage, 8, whole]
    a100, h100 = (
        next(p.time.median_s for p in profile.kinds[name].points if p.stage == "rollout" and p.time)
        for name in ("a100", "h100")
    )
    assert a100 > h100


@pytest.mark.parametrize("execution", ["jobs", "pools"])
def test_what_a_run_teaches_narrows_it(config: RunConfig, execution: Any, tmp_path: Path) -> None:
    saved = tmp_path / "inventory.json"
    saved.write_text(groups(a100=2).model_dump_json())
    request = build_request(
        config, PlanningSources(profile="", inventory=str(saved)), execution=execution
    )
    wide = propose_plan(request)
    times = {}
    for stage, own in wide.forecast.stages.items():
        before = sum(own.breakdown_s.get(part, 0.0) for part in ("start", "imports"))
        work = own.breakdown_s.get(WORK_PART, own.seconds)
        times[stage] = MeasuredTimes((own.seconds,), (own.seconds - before,), (work,))
    known = compute_corrections(wide.plan, times, request)
    narrow = propose_plan(replace(request, corrections=known)).forecast
    assert narrow.iteration_s == pytest.approx(wide.forecast.iteration_s, rel=0.05)
    width = wide.forecast.high_s - wide.forecast.low_s
    assert narrow.high_s - narrow.low_s < width / 2


def test_its_spread_is_that_of_no_measurement(config: RunConfig) -> None:
    saved = groups(a100=1)
    profile = estimate_profile(config, saved, SiteConfig())
    from pipeline.planning.planner.available_devices import select_devices

    (own,) = select_devices(saved, SiteConfig(), profile)[0].values()
    work = StageTimes(own, "rollout", on_policy.all_stages["rollout"], profile)
    expected, _ = work.work(np.array([8]))
    assert expected.spread[0] > 0.3 * expected.mean[0]


def test_what_the_sheets_do_not_tell_is_to_be_measured(config: RunConfig, compose: Compose) -> None:
    with pytest.raises(PlanError, match=r"there are no GPUs.*rlinf profile"):
        estimate_profile(config, groups(cpu=2), SiteConfig())
    cartpole = validate(RunConfig, compose(experiment="cartpole_ppo"))
    with pytest.raises(PlanError, match="only of language models, not of model 'mlp'"):
        estimate_profile(cartpole, groups(a100=1), SiteConfig())
    with pytest.raises(PlanError, match=r"no profile\.json; make one with: rlinf profile"):
        build_request(config, PlanningSources(profile=""))


def test_memory_follows_the_trainer(configure: Configure) -> None:
    """Of training on eight GPUs: blocks computed again, adapters alone, ZeRO's stages."""

    def need(*words: str) -> float:
        profile = estimate_profile(configure(*words), groups(a100=1), SiteConfig())
        (kind,) = profile.kinds.values()
        point = next(
            p
            for p in kind.points
            if (p.stage, p.processes, p.samples) == ("train", 8, profile.samples)
        )
        if point.peak_memory_bytes:
            return point.peak_memory_bytes / 2**30
        return float(point.failure.split()[5])

    whole = need()
    assert need("trainer.gradient_checkpointing=false") > 1.5 * whole
    # Gradients and moments, 12 bytes of 7.6 B parameters on eight GPUs.
    assert whole - need("trainer.lora={rank: 16, alpha: 32}") == pytest.approx(10.6, abs=0.5)
    one, two, three = (need("trainer=deepspeed", f"trainer.zero_stage={n}") for n in (1, 2, 3))
    assert three == whole
    parameters = 7.6e9 / 2**30
    assert one - two == pytest.approx(4 * parameters * 7 / 8, rel=0.05)
    assert two > three
    megatron = need("trainer=megatron")
    assert megatron - need("trainer=megatron", "trainer.use_distributed_optimizer=true") > 40


def training(config: RunConfig, processes: int = 8, stage: str = "train") -> float:
    """GiB that it needs of each GPU."""
    (kind,) = estimate_profile(config, groups(a100=2), SiteConfig()).kinds.values()
    points = [p for p in kind.points if (p.stage, p.processes) == (stage, processes)]
    point = max(points, key=lambda p: p.samples)
    if point.peak_memory_bytes:
        return point.peak_memory_bytes / 2**30
    return float(point.failure.split()[5])


def test_copies_of_a_sharded_model_take_as_much_as_on_so_many_fewer_gpus(
    configure: Configure,
) -> None:
    parameters = 7.6e9 / 2**30
    one, two = training(configure()), training(configure("trainer.dp_replicate=2"))
    # 16 bytes of each, on four GPUs instead of eight.
    assert two - one == pytest.approx(16 * parameters / 8, rel=0.05)
    assert training(configure("trainer.dp_replicate=2"), 16) == pytest.approx(one, rel=0.02)
    (kind,) = estimate_profile(
        configure("trainer.dp_replicate=3"), groups(a100=1), SiteConfig()
    ).kinds.values()
    failures = {p.failure for p in kind.points if (p.stage, p.processes) == ("train", 8)}
    assert failures == {"trainer.dp_replicate: 3 does not divide 8 processes"}


def test_optimizer_states_in_the_host_s_memory_take_none_of_the_gpu_s(
    configure: Configure,
) -> None:
    parameters = 7.6e9 / 2**30
    whole, less = training(configure()), training(configure("trainer.offload_optimizer=true"))
    # Eight bytes of each, but for half a GiB at a time.
    assert whole - less == pytest.approx(8 * parameters / 8 - 0.5, abs=0.1)
    words = ("trainer=deepspeed", "trainer.zero_stage=2")
    zero = training(configure(*words)) - training(
        configure(*words, "trainer.offload_optimizer=true")
    )
    assert zero == pytest.approx(8 * parameters / 8, rel=0.05)


def test_a_critic_of_its_own_is_trained_and_held_beside_the_policy(configure: Configure) -> None:
    words = ("algorithm=ppo", "model.name=causal_lm_critic")
    shared = configure(*words, "model.critic=shared", "algorithm.minibatches=1")
    own = configure(*words, "algorithm.minibatches=1")
    critic = 7.6e9 - 3584 * 152064  # its head is one number
    per_gpu = 16 * critic / 8 / 2**30
    more = training(own, 16) * 2 - training(shared, 16) * 2
    assert more > per_gpu
    assert more == pytest.approx(per_gpu, rel=0.25), "and what its layers keep of a sequence"
    held = training(own, 8, "inference") - training(shared, 8, "inference")
    assert held == pytest.approx(4 * critic / 8 / 2**30, rel=0.01)
    assert training(own, 8, "rollout") == training(shared, 8, "rollout")


@pytest.mark.parametrize("tied", [True, False])
def test_a_policy_with_a_critic_has_as_many_parameters_as_is_counted(tied: bool) -> None:
    """But for what the critic has alone: its last norm and its head."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    settings = {**QWEN2_5_7B, **sizes, "num_hidden_layers": 3, "tie_word_embeddings": tied}
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    module = CausalLMActorCritic(network, "own")
    built = sum(parameter.numel() for parameter in module.parameters())
    assert with_critic(from_hf_config(settings)).parameters == built - (2 * 64 + 1)
