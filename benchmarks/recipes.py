"""Memory, time and GPU-hours of the experiments for GPUs (``configs/experiment/math_grpo_*``).

``python -m benchmarks.recipes`` prints the tables of ``docs/reference/recipes.md``. Nothing is
measured: all numbers come from data sheets (:mod:`pipeline.planning.cost.estimated_profile`). The
planner reads a checkpoint of the published sizes without weights, problems of one length, and an
inventory with the GPUs that the plan requests.
"""

from __future__ import annotations

import json
import string
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.commands.experiment import compose_words
from pipeline.plan import Plan, PlanningSources, read_plan
from pipeline.planning.cost.data_sheet import GIB, device_from_node_group
from pipeline.planning.cost.estimated_profile import stage_memory_parts
from pipeline.planning.planner.plan_command import build_request
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.request import PlanRequest
from pipeline.planning.planner.uncertainty import PlacementForecast, forecast_placement
from pipeline.planning.planner.user_plan import user_placement
from rlinf import package_paths
from rlinf.config import RunConfig, validate
from slurm.inventory import Inventory, NodeGroup, PartitionInventory

RECIPES = (
    ("math_grpo_0_5b", "one_h100"),
    ("math_grpo_1_5b", "one_h100"),
    ("math_grpo_7b_lora", "one_h100"),
    ("math_grpo_7b", "four_h100"),
    ("math_grpo_7b", "eight_a100"),
    ("math_grpo_7b", "a100_rollout_h100_train"),
    ("math_grpo_32b", "eight_a100_tp4"),
    ("math_grpo_32b", "h100_rollout_a100_train_tp4"),
)
"""Experiments with the plans for which they are meant."""
GPU_MODELS = {"h100": "h100-sxm", "a100": "a100-80gb-sxm"}
"""GPU of each partition in these plans, as a key of :data:`slurm.gpus.GPUS`."""
SHARD_BYTES = 4 * 10**9
"""Maximum bytes of the tensors in a weight file."""
PROMPT_TOKENS = 256
"""Tokens of each prompt. Lengths of responses are uniform up to the horizon."""


def _qwen2_5(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, *, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 151936 if tied else 152064,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
    }


QWEN2_5_7B = _qwen2_5(3584, 18944, 28, 28, 4, tied=False)
MODELS = {
    "math_grpo_0_5b": _qwen2_5(896, 4864, 24, 14, 2, tied=True),
    "math_grpo_1_5b": _qwen2_5(1536, 8960, 28, 12, 2, tied=True),
    "math_grpo_7b": QWEN2_5_7B,
    "math_grpo_7b_lora": QWEN2_5_7B,
    "math_grpo_32b": _qwen2_5(5120, 27648, 64, 40, 8, tied=False),
}
"""Sizes of the published Qwen2.5 models, from their ``config.json``, by experiment."""


@dataclass(frozen=True)
class RecipeEstimate:
    """The estimate of an experiment with a plan."""

    experiment: str
    plan: str
    gpus: str
    """Number and kind of the GPUs of all pools."""
    iterations: int
    memory_bytes: Mapping[str, Mapping[str, float]]
    """Bytes per GPU by stage (train, rollout) and purpose."""
    usable_bytes: Mapping[str, float]
    """Bytes per GPU that a stage may use, by stage."""
    forecast: PlacementForecast
    stale_s: float | None
    """Seconds per iteration with ``rollout.staleness=1``; None: all stages share the GPUs."""

    @property
    def run_gpu_hours(self) -> float:
        """GPU-hours of all iterations, without evaluations and restarts."""
        return self.forecast.gpu_hours * self.iterations


def plan_path(name: str) -> Path:
    """Return the file of a plan in ``configs/plans``."""
    return package_paths.ROOT / "configs" / "plans" / f"{name}.yaml"


def write_hollow_checkpoint(sizes: Mapping[str, Any], folder: Path) -> None:
    """Write a checkpoint of a ``config.json`` whose weight files take no disk space.

    The files have the headers of real ones, and a hole in place of the data. The tokenizer has one
    token per character.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlinf.models.causal_lm import CausalLM
    from rlinf.models.causal_lm_config import CausalLMConfig

    small = CausalLMConfig(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64)
    CausalLM.create(small, {"alphabet": string.printable}, 0, folder)
    settings = AutoConfig.for_model(**sizes)
    settings.save_pretrained(folder)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(settings)
    shards: list[dict[str, Any]] = []
    end = SHARD_BYTES
    for name, tensor in module.state_dict().items():
        size = 2 * tensor.numel()
        if end + size > SHARD_BYTES:
            shards.append({})
            end = 0
        offsets = [end, end + size]
        shards[-1][name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
        end += size
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number, table in enumerate(shards, 1):
        path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(table, path.name)
        header = json.dumps(table).encode()
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + max(e["data_offsets"][1] for e in table.values()))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def recipe_config(experiment: str, folder: Path) -> RunConfig:
    """Return the configuration of an experiment with a hollow checkpoint and problems in a
    folder."""
    model = folder / "model"
    if not model.exists():
        model.mkdir(parents=True)
        write_hollow_checkpoint(MODELS[experiment], model)
    words = [f"experiment={experiment}", f"model.path={model}", f"run.root={folder}/runs"]
    words += [f"task.{split}={folder}/{split}.jsonl" for split in ("train", "test")]
    values = compose_words(words)
    length = PROMPT_TOKENS - len(values["task"]["prompt_template"].replace("{prompt}", ""))
    for split, first in (("train", 0), ("test", 1000)):
        rows = [
            json.dumps({"question": f"{number:0{length}}", "answer": str(number)})
            for number in range(first, first + 512)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
    return validate(RunConfig, values)


def plan_inventory(plan: Plan) -> Inventory:
    """Return an inventory with one node for each kind of GPU in a plan."""
    partitions = {}
    for pool in plan.pools:
        for name, count in pool.devices.items():
            group = NodeGroup(
                count=1,
                gpu_type=name,
                gpus_per_node=count,
                cpus_per_node=16 * count,
                mem_mb_per_node=1_000_000,
                idle_nodes=1,
                idle_gpus=count,
                gpu_model=GPU_MODELS[name],
            )
            partitions[name] = PartitionInventory(name=name, groups=(group,), time_limit_min=None)
    return Inventory(
        schema_version=1,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        slurm_version="25.05.1",
        partitions=partitions,
    )


def recipe_request(
    config: RunConfig, plan: Plan, folder: Path, inventory: Inventory | None = None
) -> PlanRequest:
    """Return the planner's request to assess a plan, by default on the GPUs of the plan."""
    path = folder / "inventory.json"
    (inventory or plan_inventory(plan)).save(path)
    sources = PlanningSources(profile="", inventory=str(path))
    return build_request(config, sources, execution=plan.execution, user_plan=plan)


def estimate_recipe(experiment: str, plan_name: str, folder: Path) -> RecipeEstimate:
    """Return the estimate of an experiment with a plan.

    Args:
        folder: a folder for the checkpoint and the problems; estimates of experiments with models
            of the same size may share it.

    Raises:
        PlanError: the plan does not fit, for example because of memory.
    """
    from stages.flow import flow_of

    config = recipe_config(experiment, folder)
    plan = read_plan(plan_path(plan_name), flow_of(config))
    request = recipe_request(config, plan, folder)
    placement, problem, tables = user_placement(request.for_user_plan(), plan, plan_name)
    inventory, memory, usable = plan_inventory(plan), {}, {}
    for stage in ("train", "rollout"):
        pool = next(pool for pool in plan.pools if stage in pool.stages)
        ((kind, count),) = pool.devices.items()
        device = device_from_node_group(kind, inventory.partitions[kind].groups[0])
        memory[stage] = stage_memory_parts(config, stage, device, count, plan)
        usable[stage] = device.usable_bytes
    stale_s = Predictor(problem).steady_period_s(placement, 1) if len(plan.pools) > 1 else None
    gpus = [f"{n} {kind.upper()}" for pool in plan.pools for kind, n in pool.devices.items()]
    return RecipeEstimate(
        experiment,
        plan_name,
        " + ".join(gpus),
        config.iterations,
        memory,
        usable,
        forecast_placement(problem, placement, tables),
        stale_s,
    )


def estimate_recipes() -> Iterator[RecipeEstimate]:
    """Yield the estimates of all recipes."""
    with tempfile.TemporaryDirectory() as root:
        for experiment, plan in RECIPES:
            yield estimate_recipe(experiment, plan, Path(root) / experiment.removesuffix("_lora"))


@cache
def tables() -> str:
    """Return the tables of memory and of time, in Markdown."""
    memory = (
        "| `experiment=` | `plan=configs/plans/` | stage | weights | gradients | optimizer | "
        "activations | KV cache | sum | usable |\n|---|---|---|---|---|---|---|---|---|---|\n"
    )
    times = (
        "| `experiment=` | `plan=configs/plans/` | GPUs | seconds per iteration (80 % interval) | "
        "with `rollout.staleness=1` | GPU-hours per iteration | GPU-hours of the run | state |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    for estimate in estimate_recipes():
        name = f"| `{estimate.experiment}` | `{estimate.plan}.yaml` "
        for stage, parts in estimate.memory_bytes.items():
            purposes = ("weights", "gradients", "optimizer", "activations", "KV cache")
            cells = [f"{parts[p] / GIB:.1f}" if p in parts else "" for p in purposes]
            cells += [f"{sum(parts.values()) / GIB:.1f}"]
            cells += [f"{estimate.usable_bytes[stage] / GIB:.1f}"]
            memory += f"{name}| {stage} | {' | '.join(cells)} |\n"
        forecast = estimate.forecast
        interval = f"{forecast.nominal_s:.0f} ({forecast.q10_s:.0f} to {forecast.q90_s:.0f})"
        stale = "" if estimate.stale_s is None else f"{estimate.stale_s:.0f}"
        times += (
            f"{name}| {estimate.gpus} | {interval} | {stale} | "
            f"{_two_digits(forecast.gpu_hours)} | "
            f"{_two_digits(estimate.run_gpu_hours)} ({estimate.iterations} iterations) | "
            "not run on GPUs |\n"
        )
    return f"## Memory of each GPU, in GiB\n\n{memory}\n## Time\n\n{times}"


def _two_digits(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


if __name__ == "__main__":
    print(tables())
