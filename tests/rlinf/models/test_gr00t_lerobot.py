"""Equality with LeRobot's own action head of GR00T N1.5, and with its parts put together as in
N1.7: velocity, sampler and likelihood."""

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
from rlinf.models.character_tokenizer import read_tokenizer
from rlinf.models.denoising import CHAIN_COLUMN
from rlinf.models.gr00t_folder import IMAGE_TOKENS
from rlinf.models.gr00t_network import prepare_pixels
from tests.environments import need_environment
from tests.rlinf.models.gr00t_folders import SPEC, VERSIONS, start, write_folder

SCRIPT = Path(__file__).with_name("lerobot_gr00t_reference.py")
TEXTS = ("reach", "Push the block to the left and then, carefully, back again", "pick up")


@pytest.mark.parametrize("version", VERSIONS)
def test_velocity_sampler_and_likelihood_are_lerobots(tmp_path: Path, version: Any) -> None:
    """Prompts have different lengths; there, each row is computed alone. Dropout is 0.2 there, and
    adaptive norms have random weights."""
    python = need_environment("lerobot_pi")
    write_folder(tmp_path / "theirs", version)
    options = {"chunk_size": 5, "crop_fraction": 1.0}
    policy = start(tmp_path / "policy", tmp_path / "theirs", version, **options)
    (tmp_path / "saved").mkdir()
    policy.save(tmp_path / "saved", policy.module.state_dict())
    random, count = np.random.default_rng(0), len(TEXTS)
    seen: dict[str, Any] = {
        "observation": random.normal(size=(count, 5)).astype(np.float32),
        INSTRUCTION_COLUMN: np.stack([encode_instruction(text) for text in TEXTS]),
    }
    for camera, shape in SPEC["images"].items():
        seen[f"images.{camera}"] = random.integers(0, 256, (count, *shape, 3), np.uint8)
    noise, points = random.normal(size=(2, count, 6, 5)).astype(np.float32)
    tau = random.uniform(0.1, 1, count).astype(np.float32)
    columns = {name: torch.tensor(column) for name, column in seen.items()}
    image_token = read_tokenizer(tmp_path / "policy" / "vlm").token_to_id(IMAGE_TOKENS[version])
    module = policy.module
    with torch.no_grad():
        state = policy.scale_state(columns["observation"])
        prompt, mask = (
            x[0] for x in policy.tokenize_prompts(seen[INSTRUCTION_COLUMN][None], state[None])
        )
        images = [columns[f"images.{camera}"] for camera in SPEC["images"]]
        pixels = torch.stack([prepare_pixels(i, 32, 1.0) for i in images], 1).flatten(0, 1)
        is_image = prompt == image_token
        features = module.model.backbone(prompt, is_image, pixels)
        prefix = module.encode_prefix(prompt, mask, state, *images)
        at = torch.tensor(points)[:, None]
        velocity = module.velocity(prefix, at, torch.tensor(tau)[:, None])[0][:, 0]
        # Euler's method from given noise.
        at = torch.tensor(noise)[:, None]
        for step in range(5):
            at = at - module.velocity(prefix, at, torch.tensor([1 - step / 5]))[0] / 5
        drawn = torch.tensor(policy.draw_noise(random, count))
        acted = policy.act(columns, drawn, 0.6)
        steps = {**seen, "observations": seen["observation"], "actions": acted["action"].numpy()}
        steps[CHAIN_COLUMN] = acted[CHAIN_COLUMN].numpy()
        trajectory = Trajectory(identity=RecordId(0, 0), **step_fields(steps))
        logprobs = policy.evaluate(policy.collate([trajectory]), 0.6).logprobs[0]
    np.testing.assert_allclose(logprobs.numpy(), acted["logprob"].numpy(), atol=1e-5)
    lengths = mask.sum(1).numpy()
    assert len(set(lengths.tolist())) == count
    np.savez(
        tmp_path / "inputs.npz",
        features=features.numpy(),
        is_image=is_image.numpy(),
        lengths=lengths,
        state=state.numpy(),
        embodiment=np.int64(24 if version == "n1.5" else 2),
        noise=noise,
        points=points,
        tau=tau,
        chain=steps[CHAIN_COLUMN],
    )
    done = subprocess.run(
        [python, SCRIPT, tmp_path / "saved", tmp_path / "inputs.npz", tmp_path / "outputs.npz"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = np.load(tmp_path / "outputs.npz")
    np.testing.assert_allclose(velocity.numpy(), result["velocity"], atol=1e-5)
    np.testing.assert_allclose(at[:, 0].numpy(), result["actions"], atol=1e-5)
    np.testing.assert_allclose(
        logprobs.numpy(), result["logprobs"][:, :5, :3], atol=1e-5, rtol=1e-5
    )
    assert np.abs(result["velocity"]).mean() > 0.1, "a network that says nothing"
