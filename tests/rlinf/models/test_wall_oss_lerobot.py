"""Equality with LeRobot's own WALL-OSS: prompt, velocity, sampler, loss and likelihood."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf.data.episodes import INSTRUCTION_COLUMN
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory, step_fields
from rlinf.envs.observations import encode_instruction
from rlinf.models.character_tokenizer import read_tokenizer
from rlinf.models.denoising import CHAIN_COLUMN
from tests.environments import need_environment
from tests.rlinf.models.wall_oss_folders import start, write_folder

SCRIPT = Path(__file__).with_name("lerobot_wall_reference.py")
TEXTS = ("reach", "Push the block to the left and then, carefully, back again", "pick up.")
SHAPES = {"front": (56, 56), "wrist": (42, 56)}


def test_network_sampler_loss_and_likelihood_are_lerobots(tmp_path: Path) -> None:
    """LeRobot computes the whole sequence at each step; here the prefix is computed once."""
    python = need_environment("lerobot")
    write_folder(tmp_path / "theirs")
    policy = start(tmp_path / "policy", tmp_path / "theirs")
    (tmp_path / "saved").mkdir()
    policy.save(tmp_path / "saved", policy.module.state_dict())
    random, count = np.random.default_rng(0), len(TEXTS)
    seen: dict[str, Any] = {
        "observation": random.normal(size=(count, 4)).astype(np.float32),
        INSTRUCTION_COLUMN: np.stack([encode_instruction(text) for text in TEXTS]),
    }
    for camera, shape in SHAPES.items():
        seen[f"images.{camera}"] = random.integers(0, 256, (count, *shape, 3), np.uint8)
    noise, points = random.normal(size=(2, count, 6, 20)).astype(np.float32)
    actions = random.normal(size=(count, 6, 3)).astype(np.float32)
    tau = random.uniform(0.1, 1, count).astype(np.float32)

    columns = {name: torch.tensor(column) for name, column in seen.items()}
    steps = {**seen, "observations": seen["observation"]}
    uniform = ((tau - 0.001) / 0.999) ** 1.5
    shown = {**steps, "actions": actions, "noise": noise, "uniform": uniform}
    with torch.no_grad():
        state = policy.scale_state(columns["observation"])
        prompt, mask = (
            x[0] for x in policy.tokenize_prompts(seen[INSTRUCTION_COLUMN][None], state[None])
        )
        images = [columns[f"images.{camera}"] for camera in SHAPES]
        prefix = policy.module.encode_prefix(prompt, mask, state, *images)
        at = torch.tensor(points)[:, None]
        velocity = policy.module.velocity(prefix, at, torch.tensor(tau)[:, None])[0][:, 0]
        # Euler's method from given noise.
        at = torch.tensor(noise)[:, None]
        for step in range(5):
            at = at - policy.module.velocity(prefix, at, torch.tensor([1 - step / 5]))[0] / 5
        sampled = policy.to_actions(at[:, 0], columns["observation"])
        trajectory = Trajectory(identity=RecordId(0, 0), **step_fields(shown))
        losses = -policy.evaluate(policy.collate([trajectory]), 1.0).logprobs[0]
        acted = policy.act(columns, torch.tensor(policy.draw_noise(random, count)), 0.6)
        chained = {**steps, "actions": acted["action"].numpy()}
        chained[CHAIN_COLUMN] = acted[CHAIN_COLUMN].numpy()
        trajectory = Trajectory(identity=RecordId(0, 0), **step_fields(chained))
        logprobs = policy.evaluate(policy.collate([trajectory]), 0.6).logprobs[0]
    np.testing.assert_allclose(logprobs.numpy(), acted["logprob"].numpy(), atol=1e-5)
    np.savez(
        tmp_path / "inputs.npz",
        task=np.array(TEXTS),
        noise=noise,
        points=points,
        tau=tau,
        action=actions,
        chain=chained[CHAIN_COLUMN],
        **{f"observation.images.{name}": seen[f"images.{name}"] for name in SHAPES},
        **{"observation.state": seen["observation"]},
    )
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python, SCRIPT, tmp_path / "saved", tmp_path / "inputs.npz", tmp_path / "outputs.npz"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = np.load(tmp_path / "outputs.npz")
    tokenizer = read_tokenizer(tmp_path / "saved" / "vlm")
    image, action = (tokenizer.token_to_id(f"<|{name}|>") for name in ("image_pad", "action"))
    for row, (tokens, valid) in enumerate(zip(result["tokens"], result["mask"], strict=True)):
        # Their prompt has a token for each place of an image, and the actions at its end.
        theirs = tokens[valid.astype(bool)].tolist()
        first = [
            t
            for t, last in zip(theirs, [None, *theirs], strict=False)
            if (t, last) != (image, image)
        ]
        assert first == [*prompt[row][mask[row]].tolist(), *[action] * 6]
    np.testing.assert_allclose(velocity.numpy(), result["velocity"], atol=1e-5)
    np.testing.assert_allclose(sampled.numpy(), result["actions"][:, :4], atol=1e-5)
    np.testing.assert_allclose(losses.numpy(), result["losses"][..., :3], atol=1e-5, rtol=1e-5)
    assert not result["losses"][..., 3:].any()
    np.testing.assert_allclose(
        logprobs.numpy(), result["logprobs"][:, :4, :3], atol=1e-5, rtol=1e-5
    )
    assert np.abs(result["velocity"]).mean() > 0.1, "a network that says nothing"
