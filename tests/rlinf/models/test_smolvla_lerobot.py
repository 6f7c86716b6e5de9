"""Equality with LeRobot's own SmolVLA, on the same folder: its network, sampler and loss."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.data.episodes import INSTRUCTION_COLUMN
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory, step_fields
from rlinf.envs.observations import encode_instruction
from rlinf.models.character_tokenizer import DEFAULT_ALPHABET, write_character_tokenizer
from rlinf.models.denoising import CHAIN_COLUMN, bounded_log_std, noise_fractions
from rlinf.models.smolvla import SmolVLAPolicy
from rlinf.models.smolvla_folder import SmolVLAConfig
from tests.environments import need_environment
from tests.rlinf.models.acting import stirred

SCRIPT = Path(__file__).with_name("lerobot_reference.py")
SPEC: dict[str, Any] = {
    "observation": 4,
    "action": {"kind": "box", "size": 3},
    "images": {"front": [40, 30], "wrist": [32, 48]},
}
TEXTS = ("reach", "Push the block to the left and then, carefully, back again", "pick up\n")


def lerobot(*words: str | Path) -> None:
    python = need_environment("lerobot")
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python, SCRIPT, *words],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def of_ours(folder: Path) -> SmolVLAPolicy:
    """A new policy, with weights that make something of everything."""
    config = SmolVLAConfig(
        hidden=32,
        layers=3,
        heads=4,
        kv_heads=2,
        intermediate=48,
        vision_hidden=16,
        vision_heads=2,
        chunk_size=4,
        denoising_steps=10,
        noise_method="learned",
    )
    first = folder / "first"
    first.mkdir()
    SmolVLAPolicy.create(config, SPEC, 0, first)
    return SmolVLAPolicy.load(first, config)


def of_theirs(folder: Path) -> SmolVLAPolicy:
    """One that LeRobot made and saved: with actions that are not carried out, numbers that fill
    states and actions up, an empty camera, a model cut off above, and statistics."""
    (folder / "vlm").mkdir()
    write_character_tokenizer(DEFAULT_ALPHABET + "\n", folder / "vlm")
    lerobot("make", folder / "theirs")
    config = SmolVLAConfig(
        path=folder / "theirs",
        vlm_path=folder / "vlm",
        camera_map={"camera1": "front", "camera2": "wrist"},
        noise_method="learned",
    )
    first = folder / "first"
    first.mkdir()
    SmolVLAPolicy.create(config, SPEC, 0, first)
    return SmolVLAPolicy.load(first, config)


@pytest.mark.parametrize("make", [of_ours, of_theirs])
def test_network_sampler_loss_and_likelihood_are_lerobots(tmp_path: Path, make: Any) -> None:
    need_environment("lerobot")
    made = make(tmp_path)
    stirred(made)
    folder = tmp_path / "saved"
    folder.mkdir()
    made.save(folder, made.module.state_dict())
    count, (length, size) = 3, made.action_shape
    wide, whole = made.module.model.action_in_proj.in_features, 6 if make is of_theirs else 4
    draw = np.random.default_rng(0)
    seen: dict[str, Any] = {
        "observation": draw.normal(size=(count, 4)).astype(np.float32),
        INSTRUCTION_COLUMN: np.stack([encode_instruction(text) for text in TEXTS]),
    }
    for camera, shape in SPEC["images"].items():
        seen[f"images.{camera}"] = draw.integers(0, 256, (count, *shape, 3), np.uint8)
    noise = draw.normal(size=(count, whole, wide)).astype(np.float32)
    points = draw.normal(size=(count, whole, wide)).astype(np.float32)
    actions = draw.normal(size=(count, whole, size)).astype(np.float32)
    tau = draw.uniform(0.1, 1, count).astype(np.float32)

    columns = {name: torch.tensor(column) for name, column in seen.items()}
    with torch.no_grad():
        prompt, there = (x[0] for x in made._tokenize(seen[INSTRUCTION_COLUMN][None]))
        state = made.scale_state(columns["observation"])
        pictures = [columns[name] for name in made._image_columns]
        prefix = made.module.encode_prefix(prompt, there, state, *pictures)
        at, first = (torch.tensor(column[:, :length]) for column in (points, noise))
        velocity = made.module.velocity(prefix, at[:, None], torch.tensor(tau)[:, None])[0][:, 0]
        euler = made._denoising.sample(
            lambda x, t: made.module.velocity(prefix, x, t), first, None, 0.0
        )
        sampled = made._action_normalizer.unnormalize(euler[:, -1, :, :size])
        uniform = ((torch.tensor(tau) - 0.001) / 0.999) ** 1.5
        shown = Trajectory(
            identity=RecordId(0, 0),
            **step_fields(
                {
                    **seen,
                    "observations": seen["observation"],
                    "actions": actions[:, :length],
                    "noise": noise[:, :length],
                    "uniform": uniform.numpy(),
                }
            ),
        )
        losses = -made.evaluate(made.collate([shown]), 1.0).logprobs[0]
    named = {"camera1": "front", "camera2": "wrist"} if make is of_theirs else {}
    plain = SmolVLAPolicy.load(folder, SmolVLAConfig(camera_map=named))
    chains, logprobs = {}, {}
    for kind, policy in (("sde", plain), ("learned", made)):
        for temperature in (1.0, 0.6):
            steps = torch.tensor(policy.draw_noise(np.random.default_rng(2), count))
            chained = {**seen, "observations": seen["observation"]}
            with torch.no_grad():
                acted = policy.act(columns, steps, temperature)
                chained["actions"] = acted["action"].numpy()
                chained[CHAIN_COLUMN] = chains[f"{kind}{temperature}"] = acted[CHAIN_COLUMN].numpy()
                batch = policy.collate(
                    [Trajectory(identity=RecordId(0, 0), **step_fields(chained))]
                )
                expected = policy.evaluate(batch, temperature).logprobs[0]
            np.testing.assert_allclose(expected.numpy(), acted["logprob"].numpy(), atol=1e-5)
            logprobs[f"{kind}{temperature}"] = expected.numpy()
            if kind == "learned":
                with torch.no_grad():
                    at = acted[CHAIN_COLUMN][:, :-1]
                    raw = made.module.velocity(
                        prefix, at, noise_fractions(made.num_denoising_steps)
                    )[1]
                assert raw is not None
                spread = bounded_log_std(raw, (0.08, 0.16)).exp() * temperature
                assert float(spread.std()) > 0.002, "learned noise is the same everywhere"
                chains[f"std{temperature}"] = spread.numpy()
    names = ("camera1", "camera2") if make is of_theirs else ("front", "wrist")
    settings = {
        f"observation.images.{name}": seen[f"images.{camera}"]
        for name, camera in zip(names, SPEC["images"], strict=True)
    }
    np.savez(
        tmp_path / "inputs.npz",
        task=np.array(TEXTS),
        noise=noise,
        points=points,
        tau=tau,
        action=actions,
        **chains,
        **settings,
        **{"observation.state": seen["observation"]},
    )
    lerobot("say", folder, tmp_path / "inputs.npz", tmp_path / "outputs.npz")
    result = np.load(tmp_path / "outputs.npz")
    np.testing.assert_array_equal(prompt.numpy(), result["tokens"])
    np.testing.assert_allclose(velocity.numpy(), result["velocity"][:, :length], atol=1e-5)
    np.testing.assert_allclose(sampled.numpy(), result["actions"][:, :length], atol=1e-5)
    errors = result["losses"][:, :length]
    errors = errors[..., :size] + errors[..., size:].sum(-1, keepdims=True) / size
    np.testing.assert_allclose(losses.numpy(), errors, atol=1e-5, rtol=1e-5)
    for name, own in logprobs.items():
        np.testing.assert_allclose(own, result[name][..., :size], atol=1e-5, rtol=1e-5)
    assert np.abs(result["velocity"]).mean() > 0.1, "a network that says nothing"
