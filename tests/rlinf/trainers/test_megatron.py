"""Megatron's layouts give the update of one process of FSDP2, and each other's checkpoints.

The processes run in the environment that ``make env NAME=megatron`` makes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.moe_checkpoint import create_moe_checkpoint
from pipeline.commands.experiment import run_experiment
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.errors import ConfigError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from tests.environments import need_environment
from tests.rlinf.trainers.ranks import run_ranks
from tests.rlinf.trainers.test_threaded_data_parallel import loss, records

LR = 1e-3
ALPHABET = {"alphabet": "0123456789+="}
SIZES = {"hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 64}

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from rlinf.channels.process_group import ParallelLayout, ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.trainers import trainers
from tests.rlinf.trainers.test_threaded_data_parallel import loss, records

said = json.loads(sys.argv[1])
rank, size, out = int(sys.argv[2]), int(sys.argv[3]), Path(said["out"])
layout = ParallelLayout.parse(said["layout"])
rendezvous = out / "channels" / "group-m.json"
world = ProcessGroupInfo(rank, size, rendezvous_file=rendezvous, layout=layout)
cls, folder = trainers.get(said["trainer"]), Path(said["folder"])
load = CausalLM.meta_from_folder if size > 1 else CausalLM.load
options = {"device": "cpu", "max_tokens_per_microbatch": 40, **said["options"]}
trainer = cls(
    load(folder, CausalLMConfig()),
    cls.Config.model_validate(options),
    OptimizerSection(lr=1e-3, weight_decay=0.1),
    world,
)
if said["load"]:
    trainer.load(Path(said["load"]))
data = records(lowest=0)
found = {f"forward/{row}": outputs.logprobs for row, outputs in trainer.forward(data, 1.0)}
metrics = [trainer.step(data, loss, lr=1e-3) for _ in range(said["steps"])]
trainer.save(out / "state")
found |= {f"weights/{name}": tensor for name, tensor in trainer.full_state_dict(copy=True).items()}
if world.is_primary:
    found = {name: tensor.clone() for name, tensor in found.items()}
    save_file(found, out / f"found-{world.data_parallel_rank}.safetensors")
    (out / f"metrics-{world.data_parallel_rank}.json").write_text(json.dumps(metrics))
trainer.close()
print("ok")
"""


def run(
    folder: Path,
    out: Path,
    layout: str,
    size: int,
    steps: int = 2,
    load: Path | None = None,
    trainer: str = "megatron",
    python: str = "",
    **options: Any,
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Metrics and outcome of steps by processes of a layout.

    Args:
        python: the interpreter of the processes; by default that of Megatron's environment.
    """
    (out / "channels").mkdir(parents=True)
    message = {
        "trainer": trainer,
        "folder": str(folder),
        "out": str(out),
        "layout": layout,
        "steps": steps,
        "load": None if load is None else str(load),
        "options": options,
    }
    python = python or need_environment("megatron")
    run_ranks(PROGRAM, size, json.dumps(message), python=python)
    found: dict[str, Tensor] = {}
    for path in sorted(out.glob("found-*.safetensors")):
        found |= load_file(path)
    return json.loads((out / "metrics-0.json").read_text()), found


def alone(folder: Path, steps: int = 2, lora: dict[str, Any] | None = None) -> FSDPTrainer:
    """One process of FSDP2 after as many steps."""
    trainer = FSDPTrainer(
        CausalLM.load(folder, CausalLMConfig()),
        FSDPConfig.model_validate({"max_tokens_per_microbatch": 40, "device": "cpu", "lora": lora}),
        OptimizerSection(lr=LR, weight_decay=0.1),
        ProcessGroupInfo(),
    )
    trainer.metrics = [trainer.step(records(lowest=0), loss, lr=LR) for _ in range(steps)]  # type: ignore[attr-defined]
    return trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    CausalLM.create(CausalLMConfig(**SIZES), ALPHABET, 0, path)
    return path


def check(
    folder: Path, tmp_path: Path, layout: str, size: int, **options: Any
) -> tuple[FSDPTrainer, Path]:
    """A layout computes what one process of FSDP2 does, and each goes on from the other's state."""
    metrics, found = run(folder, tmp_path / "one", layout, size, **options)
    lora = options.get("lora")
    right = alone(folder, 2, lora)
    for row, outputs in alone(folder, 0, lora).forward(records(lowest=0), 1.0):
        torch.testing.assert_close(found[f"forward/{row}"], outputs.logprobs, rtol=0, atol=1e-5)
    for mine, theirs in zip(metrics, right.metrics, strict=True):  # type: ignore[attr-defined]
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert_weights(found, right.full_state_dict())
    # Its state to one process of FSDP2, and that one's to it: a further step is the same.
    other = alone(folder, 0, lora)
    other.load(tmp_path / "one" / "state")
    mine, theirs = other.snapshot(), right.snapshot()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=LR / 50, msg=name)
    right.save(tmp_path / "right")
    _, went_on = run(folder, tmp_path / "two", layout, size, 1, tmp_path / "right", **options)
    for trainer in (right, other):
        trainer.step(records(lowest=0), loss, lr=LR)
    assert_weights(went_on, right.full_state_dict())
    assert_weights(went_on, other.full_state_dict())
    return right, tmp_path / "one" / "state"


def assert_weights(
    found: dict[str, Tensor], right: dict[str, Tensor], atol: float = LR / 50
) -> None:
    mine = {n.removeprefix("weights/"): t for n, t in found.items() if n.startswith("weights/")}
    assert mine.keys() == right.keys()
    for name, tensor in right.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=atol, msg=name)


LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0}
SOME = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
"""Some projections of a matrix alone."""
UNEVEN = {"layers_per_pipeline_stage": [3, 1]}
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    # Two processes share each matrix, its positions too, adapters of both, and layers.
    ("tp=2", 2, {"packing": False}),
    ("tp=2", 2, {"sequence_parallel": True}),
    ("tp=2", 2, {"sequence_parallel": True, "lora": {**LORA, "target_modules": SOME}}),
    ("tp=2", 2, {"lora": LORA}),
    ("pp=2", 2, UNEVEN),
    ("pp=2", 2, {**UNEVEN, "lora": LORA}),
    # Copies share the optimizer's state or have each their own.
    ("", 2, {"use_distributed_optimizer": True}),
    ("", 2, {"use_distributed_optimizer": True, "gradient_checkpointing": True, "lora": LORA}),
    ("", 2, {"lora": LORA}),
    # Sequences are shared in every layout.
    ("tp=2,cp=2", 4, {"sequence_parallel": True, "gradient_checkpointing": True}),
    ("cp=2,pp=2", 4, {"lora": LORA}),
    ("cp=2", 4, {}),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layout", "size", "options"),
    [
        ("tp=2", 2, {"packing": True}),
        ("cp=2", 2, {"use_distributed_optimizer": True}),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in LAYOUTS),
    ],
)
def test_a_layout_updates_as_one_process_does(
    folder: Path, tmp_path: Path, layout: str, size: int, options: dict[str, Any]
) -> None:
    check(folder, tmp_path, layout, size, **options)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_moe")
    create_moe_checkpoint(CausalLMConfig(**SIZES), ALPHABET["alphabet"], path)
    return path


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layout", "options"), [("ep=2", {}), ("ep=2", {"lora": LORA}), ("cp=2,ep=2", {})]
)
def test_they_share_experts(
    mixture: Path, tmp_path: Path, layout: str, options: dict[str, Any]
) -> None:
    """Adapters are those of attention."""
    check(mixture, tmp_path, layout, 2, **options)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_processes_share_matrices_and_layers(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sequence_parallel": True, "gradient_checkpointing": True}
    metrics, found = run(folder, tmp_path / "four", "tp=2,pp=2", 4, **options)
    right = alone(folder)
    for mine, theirs in zip(metrics, right.metrics, strict=True):  # type: ignore[attr-defined]
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert_weights(found, right.full_state_dict())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bfloat16_is_close(folder: Path, tmp_path: Path) -> None:
    """Each step is at most as long as the learning rate, in either direction."""
    options: dict[str, Any] = {"use_distributed_optimizer": True, "param_dtype": "bfloat16"}
    metrics, found = run(folder, tmp_path / "half", "", 2, 1, **options)
    right = alone(folder, 1)
    (theirs,) = right.metrics  # type: ignore[attr-defined]
    assert metrics[0]["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
    assert metrics[0]["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=5e-2)
    assert_weights(found, right.full_state_dict(), 2.1 * LR)


@pytest.mark.timeout(300)
def test_a_plan_that_the_model_does_not_fit_writes_nothing(
    tmp_path: Path, compose: Callable[..., dict[str, Any]]
) -> None:
    """The tiny run's model has one group of heads."""
    need_environment("megatron")
    values = compose("cluster=local", "trainer=megatron", "trainer.python=megatron")
    values["plan"] = {"stages": {"train": {"processes": 2, "layout": {"tp": 2}}}}
    with pytest.raises(ConfigError, match=r"^plan\.stages\.train\.layout\.tp: 2 processes cannot"):
        run_experiment(values)
    assert not (tmp_path / "tiny").exists()
