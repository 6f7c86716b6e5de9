"""Float16 with a scaled loss: close to float32, steps that overflow are left out and counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf import package_paths
from rlinf.data.load_balancing import StepSpan
from rlinf.errors import StageError
from rlinf.models.base import StepOutputs
from rlinf.trainers.base import Loss, loss_from_steps
from rlinf.trainers.fsdp import FSDPTrainer
from rlinf.trainers.optimizer import LossScaler
from tests.environments import need_environment
from tests.rlinf.trainers.ranks import run_ranks
from tests.rlinf.trainers.test_options import LR, assert_close, make
from tests.rlinf.trainers.test_threaded_data_parallel import folder, loss, records, step_loss

__all__ = ["folder"]
HALF: dict[str, Any] = {"param_dtype": "float16"}


def times(factor: float, row: int | None = None) -> Any:
    """The loss, times a number where one row takes part; by default always."""

    def scaled(outputs: StepOutputs, spans: list[StepSpan]) -> Loss:
        value, metrics = step_loss(outputs, spans)
        if row is not None and row not in {span.row for span in spans}:
            return value, metrics
        return value * factor, metrics

    return loss_from_steps(scaled)


def state(trainer: FSDPTrainer) -> dict[str, torch.Tensor]:
    return {n: getattr(t, "_local_tensor", t).clone() for n, t in trainer.snapshot().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> set[str]:
    """Names of what is not."""
    assert one.keys() == other.keys()
    return {name for name, tensor in one.items() if not torch.equal(tensor, other[name])}


@pytest.mark.parametrize("packing", [False, True])
def test_an_update_is_close_to_that_of_float32(folder: Path, packing: bool) -> None:
    """Eleven bits: a thousandth of loss and gradient; a step of Adam is no longer than its rate."""
    right, half = make(folder, packing=packing), make(folder, packing=packing, **HALF)
    seen = set[torch.dtype]()
    for block in half.policy.blocks():
        block.register_forward_hook(lambda _, __, out: seen.add(out.dtype))  # type: ignore[arg-type]
    theirs, mine = (trainer.step(records(), loss, lr=LR) for trainer in (right, half))
    assert seen == {torch.float16}
    assert {p.dtype for p in half.policy.module.parameters()} == {torch.float32}
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
    assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert (mine["skipped_steps"], mine["loss_scale"]) == (0.0, 65536.0)
    assert not theirs.keys() & {"skipped_steps", "loss_scale"}
    assert_close(half, right, 2.1 * LR)


def test_gradients_that_float16_has_no_numbers_for_are_there(folder: Path) -> None:
    small = times(1e-6)
    right = make(folder).step(records(), small, lr=LR)["grad_norm"]
    plain = make(folder, **HALF, initial_loss_scale=1.0).step(records(), small, lr=LR)["grad_norm"]
    scaled = make(folder, **HALF).step(records(), small, lr=LR)["grad_norm"]
    assert plain < 0.9 * right
    assert scaled == pytest.approx(right, rel=1e-2)


def test_a_step_that_overflows_is_left_out_and_counted(folder: Path) -> None:
    made, plain = make(folder, **HALF), make(folder, **HALF)
    for trainer in (made, plain):
        trainer.step(records(), loss, lr=LR)
    before = state(made)
    metrics = made.step(records(), times(1e6), lr=LR)
    assert (metrics["skipped_steps"], metrics["loss_scale"]) == (1.0, 65536.0)
    assert "grad_norm" not in metrics
    assert equal(before, state(made)) == {"loss_scale"}
    found = [trainer.step(records(), loss, lr=LR) for trainer in (made, plain)]
    assert [metrics.pop("loss_scale") for metrics in found] == [32768.0, 65536.0]
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_the_scale_grows_again(folder: Path) -> None:
    made = make(folder, **HALF, initial_loss_scale=2.0, loss_scale_window=2)
    scales = [made.step(records(), loss, lr=LR)["loss_scale"] for _ in range(5)]
    assert scales == [2.0, 2.0, 4.0, 4.0, 8.0]


def test_it_falls_below_one_for_a_large_loss(folder: Path) -> None:
    """A sum over many tokens overflows by itself, and is no error."""
    large = times(1e6)
    made = make(folder, **HALF, initial_loss_scale=1.0)
    metrics = [made.step(records(), large, lr=LR) for _ in range(12)]
    assert metrics[0]["skipped_steps"] == 1.0
    right = make(folder).step(records(), large, lr=LR)["grad_norm"]
    chosen = next(one for one in metrics if not one["skipped_steps"])
    assert chosen["loss_scale"] < 1
    assert chosen["grad_norm"] == pytest.approx(right, rel=2e-3)


def test_an_overflow_at_the_lowest_scale_is_an_error(folder: Path) -> None:
    alone = make(folder, **HALF, initial_loss_scale=1.0)
    for _ in range(24):
        assert alone.step(records(), times(1e15), lr=LR)["skipped_steps"] == 1.0
    before = state(alone)
    with pytest.raises(StageError, match=r"not finite in float16 .*6e-08.*param_dtype=bfloat16"):
        alone.step(records(), times(1e15), lr=LR)
    assert not equal(before, state(alone))


def test_the_scale_stays_a_number() -> None:
    scale = LossScaler(2.0**127, 1)
    scale.record_step()
    assert scale.value == 2.0**127


def test_training_goes_on_to_the_byte(folder: Path, tmp_path: Path) -> None:
    """From another scale, and from steps since it changed."""
    options = {**HALF, "loss_scale_window": 3}
    one, other = make(folder, **options), make(folder, **options)
    for factor in (1e6, 1.0, 1.0):
        one.step(records(), times(factor), lr=LR)
    one.save(tmp_path, one.snapshot())
    other.load(tmp_path)
    metrics = [[t.step(records(), loss, lr=LR) for _ in range(2)] for t in (one, other)]
    assert metrics[0] == metrics[1]
    assert [each["loss_scale"] for each in metrics[0]] == [32768.0, 65536.0]
    assert not equal(state(one), state(other))


def test_states_with_and_without_a_scale_pass_to_each_other(folder: Path, tmp_path: Path) -> None:
    whole, half = make(folder), make(folder, **HALF)
    for trainer in (whole, half):
        trainer.step(records(), loss, lr=LR)
        trainer.save(tmp_path / type(trainer.policy).__name__ / str(trainer is half))
    made = make(folder, **HALF, initial_loss_scale=128.0)
    made.load(tmp_path / "CausalLM" / "False")
    assert_close(made, whole, 0.0)
    assert made.step(records(), loss, lr=LR)["loss_scale"] == 128.0
    back = make(folder)
    back.load(tmp_path / "CausalLM" / "True")
    assert_close(back, half, 0.0)


def test_adapters_are_trained_in_it(folder: Path) -> None:
    given = {"lora": {"rank": 4, "alpha": 8.0}}
    right, half = make(folder, **given), make(folder, **given, **HALF)
    theirs, mine = (trainer.step(records(), loss, lr=LR) for trainer in (right, half))
    assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-3)


RANKS = """
import json, sys
from pathlib import Path
import torch
from rlinf.channels.process_group import ParallelLayout, ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.models.causal_lm import CausalLM
from rlinf.trainers import trainers
from tests.rlinf.trainers.test_threaded_data_parallel import CONFIG, loss, records
from tests.rlinf.trainers.test_loss_scaler import times

said = json.loads(sys.argv[1])
rank, folder, out = int(sys.argv[2]), Path(said["folder"]), Path(said["out"])
if said["trainer"] == "deepspeed":
    # Its arithmetic is torch's, which has no need of the instructions that it asks for.
    from deepspeed.accelerator import get_accelerator
    type(get_accelerator()).is_fp16_supported = lambda self: True
layout = ParallelLayout.parse(said["layout"])
world = ProcessGroupInfo(rank, 2, rendezvous_file=out / "channels" / "group-h.json", layout=layout)
cls = trainers.get(said["trainer"])
config = cls.Config.model_validate(
    {"device": "cpu", "max_tokens_per_microbatch": 40, "param_dtype": "float16", **said["options"]}
)
def made():
    return cls(CausalLM.meta_from_folder(folder, CONFIG), config, OptimizerSection(lr=1e-3), world)

def held(trainer):
    return {n: getattr(t, "_local_tensor", t).clone() for n, t in trainer.snapshot().items()}

trainer = made()
first = trainer.step(records(), loss, lr=1e-3)
before = held(trainer)
skipped = trainer.step(records(), times(1e6, row=0), lr=1e-3)
after = held(trainer)
assert {n for n in before if not torch.equal(before[n], after[n])} <= {"loss_scale"}
trainer.save(out / "state")
torch.distributed.barrier()
other = made()
other.load(out / "state")
found = [each.step(records(), loss, lr=1e-3) for each in (trainer, other)]
assert found[0] == found[1], found
mine, theirs = held(trainer), held(other)
assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
whole = trainer.full_state_dict(copy=True)
if rank == 0:
    (out / "said.json").write_text(json.dumps([first, skipped, found[0]]))
trainer.close()
other.close()
print("ok")
"""


@pytest.mark.parametrize(
    ("trainer", "layout", "options"),
    [
        ("fsdp", "", {"fsdp_wrap_min_mb": 0}),
        *(
            pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])
            for case in (
                ("fsdp", "", {"dp_replicate": 2}),
                ("deepspeed", "", {"stage": 1}),
                ("deepspeed", "", {"stage": 2}),
                ("deepspeed", "", {"stage": 2, "offload_optimizer": True}),
                ("deepspeed", "", {"stage": 3}),
                ("megatron", "", {}),
                ("megatron", "", {"use_distributed_optimizer": True}),
                ("megatron", "pp=2", {}),
            )
        ),
    ],
)
def test_processes_leave_a_step_out_together(
    trainer: str, layout: str, options: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """Though one alone has the sample that overflows."""
    python = sys.executable if trainer == "fsdp" else need_environment(trainer)
    (tmp_path / "channels").mkdir()
    message = {
        "trainer": trainer,
        "layout": layout,
        "options": options,
        "folder": str(folder),
        "out": str(tmp_path),
    }
    run_ranks(RANKS, 2, json.dumps(message), python=python)
    first, skipped, then = json.loads((tmp_path / "said.json").read_text())
    right = make(folder)
    for mine in (first, then):
        theirs = right.step(records(), loss, lr=LR)
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-3)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-3)
        assert mine["skipped_steps"] == 0.0
    assert skipped["skipped_steps"] == 1.0
    assert [message["loss_scale"] for message in (first, skipped, then)] == [
        65536.0,
        65536.0,
        32768.0,
    ]


DEEPSPEED = """
import sys
from pathlib import Path
import torch
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.errors import ConfigError
from rlinf.models.causal_lm import CausalLM
from rlinf.trainers import trainers
from tests.rlinf.trainers.test_threaded_data_parallel import CONFIG

cls = trainers.get("deepspeed")
config = cls.Config.model_validate({"device": "cpu", "param_dtype": "float16"})
from deepspeed.accelerator import get_accelerator
type(get_accelerator()).is_fp16_supported = lambda self: None
try:
    cls(CausalLM.load(Path(sys.argv[1]), CONFIG), config, OptimizerSection(), ProcessGroupInfo())
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_deepspeed_says_where_it_has_no_float16(folder: Path) -> None:
    done = subprocess.run(
        [need_environment("deepspeed"), "-c", DEEPSPEED, str(folder)],
        cwd=package_paths.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "trainer.param_dtype: DeepSpeed computes in float16 on GPUs" in done.stdout
    assert "choose trainer=fsdp or trainer=megatron" in done.stdout
