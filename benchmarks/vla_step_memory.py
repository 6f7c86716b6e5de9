"""Peak memory of a training step of vision-language-action policies over its arithmetic minimum.

The minimum is the bytes of weights, gradients, both moments of Adam, and the activations of a pass
that recomputes each block: the inputs of all blocks, what is saved outside of blocks, and what the
largest block saves. The peak is anonymous memory of a process that loads a policy and does two
steps, minus that after imports. The row is the larger ratio of pi-0.5 and WALL-OSS. With 35 million
parameters and four times as many rows, it was 1.14 and 1.19 in two measurements.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.process_memory import measure_peaks
from benchmarks.row import BenchmarkRow, median_row
from rlinf import process_tuning

KINDS = ("pi05", "wall_oss")
STEPS = 2
SIZES: dict[str, Any] = {
    "hidden": 768,
    "layers": 12,
    "heads": 12,
    "kv_heads": 4,
    "intermediate": 2304,
    "vision_hidden": 256,
    "vision_layers": 4,
    "vision_heads": 4,
    "patch_size": 8,
    "expert_intermediate": 768,
}
FURTHER_SIZES: dict[str, dict[str, Any]] = {
    "pi05": {"head_dim": 64, "expert_hidden": 384},
    "wall_oss": {},
}
"""About 110 million parameters. As at the published sizes, weights need more than activations, and
the libraries' own memory matters little."""
SPEC: dict[str, Any] = {
    "observation": 4,
    "action": {"kind": "box", "size": 4},
    "images": {"corner": [96, 96]},
}


def measure() -> list[BenchmarkRow]:
    """Measure the larger ratio of both policies."""
    ratios = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as name:
            command = [sys.executable, "-m", "benchmarks.vla_step_memory", kind, name]
            measure_peaks([[*command, "create"]])
            minimum = json.loads(measure_peaks([[*command, "minimum"]])[0][2])
            baseline, peak, _ = measure_peaks([[*command, "train"]])[0]
        ratios.append((peak - baseline) / sum(minimum.values()))
        parts = ", ".join(f"{part} {size / 2**20:.0f}" for part, size in minimum.items())
        print(f"  {kind}: peak {(peak - baseline) / 2**20:.0f} MiB of {parts}; {ratios[-1]:.3f}")
    return [median_row("vla_step_memory_ratio", [max(ratios)], "", 1.15, "lower")]


def run(kind: str, folder: Path, task: str) -> None:
    """Run one process, with the memory allocator tuned as in a run."""
    process_tuning.tune_process()
    import torch

    from rlinf.models import policies

    torch.set_num_threads(1)
    policy_class: Any = policies.get(kind)
    config = policy_class.Config(**SIZES, **FURTHER_SIZES[kind])
    with tempfile.TemporaryDirectory() as name:
        # A small policy warms up the libraries.
        small = policy_class.Config(layers=1, vision_layers=1)
        policy_class.create(small, SPEC, 0, Path(name))
        train(policy_class.load(Path(name), small))
    print("ready", flush=True)
    sys.stdin.readline()
    if task == "create":
        policy_class.create(config, SPEC, 0, folder)
    elif task == "minimum":
        print(json.dumps(minimum_bytes(policy_class.load(folder, config))))
    else:
        train(policy_class.load(folder, config))


def train(policy: Any) -> None:
    """Do two training steps on one micro-batch of demonstrations."""
    from rlinf.channels.process_group import ProcessGroupInfo
    from rlinf.config import OptimizerSection
    from rlinf.trainers.base import loss_from_steps
    from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer

    options = FSDPConfig(
        device="cpu", gradient_checkpointing=True, max_tokens_per_microbatch=1_000_000
    )
    trainer = FSDPTrainer(policy, options, OptimizerSection(), ProcessGroupInfo())
    loss = loss_from_steps(lambda outputs, spans: (-outputs.logprobs.mean(), {}))
    for _ in range(2):
        trainer.step([demonstration(policy)], loss, lr=1e-4)
    trainer.close()


def demonstration(policy: Any) -> Any:
    """Return a trajectory of :data:`STEPS` steps with random observations and actions."""
    from rlinf.data.episodes import INSTRUCTION_COLUMN
    from rlinf.data.record import RecordId
    from rlinf.data.trajectory import Trajectory, step_fields
    from rlinf.envs.observations import encode_instruction

    random = np.random.default_rng(0)
    columns = {
        "observations": random.normal(size=(STEPS, 4)).astype(np.float32),
        "actions": random.normal(size=(STEPS, 4)).astype(np.float32),
        "images.corner": random.integers(0, 256, (STEPS, 96, 96, 3), np.uint8),
        INSTRUCTION_COLUMN: np.stack([encode_instruction("close the drawer")] * STEPS),
    }
    shown = Trajectory(identity=RecordId(0, 0), **step_fields(columns))
    return policy.prepare_demonstration(shown)


def minimum_bytes(policy: Any) -> dict[str, int]:
    """Return the bytes that a training step needs, by kind."""
    import torch

    weights = {tensor.untyped_storage().data_ptr() for tensor in policy.module.parameters()}
    # Storages by address. They are kept, so that no other one gets an address.
    inputs, outside = dict[int, Any](), dict[int, Any]()
    blocks: list[dict[int, Any]] = []

    def save(storages: dict[int, Any], tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    for block in policy.blocks():
        forward, storages = block.forward, dict[int, Any]()
        blocks.append(storages)

        def counted(
            *arguments: Any, forward: Any = forward, storages: Any = storages, **options: Any
        ) -> Any:
            for tensor in tensors((arguments, options)):
                save(inputs, tensor)
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: save(storages, tensor), lambda tensor: tensor
            ):
                return forward(*arguments, **options)

        block.forward = counted
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: save(outside, tensor), lambda tensor: tensor
    ):
        loss = policy.evaluate(policy.collate([demonstration(policy)]), 1.0).logprobs.mean()
    assert loss.requires_grad
    parameters = sum(tensor.nbytes for tensor in policy.module.parameters())
    kept = {**inputs, **outside}
    largest = max(
        sum(storage.nbytes() for address, storage in storages.items() if address not in kept)
        for storages in blocks
    )
    return {
        "weights": parameters,
        "gradients": parameters,
        "moments": 2 * parameters,
        "activations": sum(storage.nbytes() for storage in kept.values()) + largest,
    }


def tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in nested tuples, lists and dicts."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
