"""What a stage takes is on its device, whatever others did there while it waited for an input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.commands.experiment import compose, run_experiment
from pipeline.graph import Graph, StageNode
from pipeline.run import Run
from rlinf.artifacts import read_manifest
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import RunConfig, validate
from stages.context import StageContext, StageInput
from stages.factory import (
    component_class,
    ensure_on_device,
    get_actor,
    get_device_memory,
    get_engine,
    get_reference,
    get_trainer,
    mark_published,
    with_default_dtype,
)
from stages.live_store import LiveStore
from stages.worker_state import WorkerState
from tests.conftest import TINY


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("runs")
    words = ["experiment=arithmetic_grpo", f"++run.root={root}", "++log.trackers=[]", *TINY]
    # A limit at all: on a CPU there is none by default, and nothing would ever leave.
    run_experiment(compose([*words, "device_memory_gib=1"]))
    return Run.open(root / "tiny")


@dataclass
class Late(StageInput):
    """An input that is committed while its stage waits; others compute meanwhile."""

    meanwhile: Callable[[], object] = lambda: None

    def is_committed(self) -> bool:
        self.meanwhile()
        return super().is_committed()


def context(run: Run, resident: WorkerState, **inputs: tuple[str, int]) -> StageContext:
    """Of a stage whose inputs come late, when all else has left the device."""
    late = {}
    for name, of in inputs.items():
        folder = Graph(run.config).output_folder(run.folder, StageNode(*of))
        manifest = read_manifest(folder)
        assert manifest is not None
        output = LiveStore().output(str(folder))
        output.mark_complete(manifest.data)  # its name is known before it is committed
        late[name] = Late(folder, None, output)
    ctx = StageContext(
        config=run.config,
        stage="test",
        iteration=1,
        run_folder=run.folder,
        output_folder=run.folder,
        data_folder=run.folder,
        world=ProcessGroupInfo(),
        inputs=late,
        worker_state=resident,
    )
    for entry in late.values():
        entry.meanwhile = lambda: get_device_memory(ctx).offload_all()
    return ctx


def committed(run: Run, stage: str, iteration: int) -> dict[str, torch.Tensor]:
    folder = Graph(run.config).output_folder(run.folder, StageNode(stage, iteration))
    (path,) = folder.glob("data-*/weights/model.safetensors")
    return load_file(path)


def assert_there(holder: Any, expected: dict[str, torch.Tensor]) -> None:
    given = {tensor.sum().item() for tensor in expected.values()}
    weights = holder.tensor_groups()["weights"]
    assert all(tensor.untyped_storage().nbytes() for tensor in weights)
    assert {tensor.sum().item() for tensor in weights} == given


def test_the_engine(run: Run) -> None:
    resident = WorkerState()
    for number, of in enumerate([("sft", 0), ("sync", 0), ("sync", 1)]):
        engine = get_engine(context(run, resident, weights=of), "weights", number)
        assert_there(engine, committed(run, *of))


def test_the_trainer_and_the_reference(run: Run) -> None:
    resident = WorkerState()
    inputs = {"initial": ("sft", 0), "checkpoint": ("train", 0)}
    for _ in range(2):
        ctx = context(run, resident, **inputs)
        assert_there(get_trainer(ctx), committed(run, "sync", 0))
        assert_there(get_reference(ctx), committed(run, "sft", 0))
    ensure_on_device(ctx, get_trainer(ctx))
    assert [span["name"] for span in ctx.spans].count("onload") > 0


def test_the_policy_that_is_only_evaluated(run: Run) -> None:
    """One takes version after version; where training has come as far it is the trainer itself."""
    resident = WorkerState()
    made = []
    for of in [("sft", 0), ("sync", 0), ("sync", 1)]:
        ctx = context(run, resident, initial=("sft", 0), weights=of)
        made.append(get_actor(ctx))
        assert_there(made[-1], committed(run, *of))
    assert made[0] is made[1] is made[2]
    inputs = {"initial": ("sft", 0), "checkpoint": ("train", 0)}
    trainer = get_trainer(context(run, resident, **inputs))
    assert trainer is not made[-1]
    later = {"initial": ("sft", 0), "weights": ("sync", 0)}
    # A process that was started again does not know that these are the trainer's: neither goes.
    for _ in range(2):
        assert get_actor(context(run, resident, **later)) is made[-1]
        assert get_trainer(context(run, resident, **inputs)) is trainer
    ctx = context(run, resident, **later)
    ctx.output_folder, ctx.data_folder = (
        ctx.inputs["weights"].folder,
        ctx.inputs["weights"].data_folder,
    )
    mark_published(ctx)
    assert get_actor(ctx) is trainer


def test_before_any_training_one_load_serves_both(run: Run) -> None:
    resident = WorkerState()
    first = ("sft", 0)
    policy = get_actor(context(run, resident, initial=first, weights=first))
    assert get_trainer(context(run, resident, initial=first)) is policy
    assert get_actor(context(run, resident, initial=first, weights=first)) is policy


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("seed=1", ("bfloat16", "bfloat16")),
        ("++engine.dtype=float32", ("float32", "bfloat16")),
        ("++trainer.param_dtype=float16", ("bfloat16", "float16")),
        ("engine=vllm", ("bfloat16", "bfloat16")),
    ],
)
def test_a_checkpoint_is_computed_in_bfloat16_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, word: str, expected: tuple[str, str]
) -> None:
    """A key that is set is obeyed. On a CPU nothing is changed."""
    words = ["experiment=jsonl_grpo", "model.path=model", "task.test=test.jsonl", word]
    config = validate(RunConfig, compose(words))
    sections = (("engine", "dtype"), ("trainer", "param_dtype"))
    for section, key in sections:
        options = component_class(config, section)[1]
        assert with_default_dtype(config, section, options, key) == options
    monkeypatch.setattr("stages.factory.local_device", lambda name: torch.device("cuda", 0))
    got = [
        getattr(with_default_dtype(config, section, component_class(config, section)[1], key), key)
        for section, key in sections
    ]
    assert tuple(got) == expected
