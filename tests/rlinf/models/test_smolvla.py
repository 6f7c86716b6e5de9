"""The policy that denoises chunks: what it sees, what it samples, what its folder holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory, step_fields
from rlinf.models.denoising import CHAIN_COLUMN, DenoisingProcess
from rlinf.models.smolvla import SmolVLAPolicy
from rlinf.models.smolvla_folder import SmolVLAConfig
from tests.rlinf.models import acting
from tests.rlinf.models.acting import SPEC, request, stirred

SIZES: dict[str, Any] = {
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "intermediate": 48,
    "vision_hidden": 16,
    "vision_heads": 2,
    "patch_size": 4,
    "chunk_size": 4,
    "proprio_dim": 2,
}
PARTS = ("vision_model", "connector", "text_model", "lm_expert", "state_proj", "action_in_proj")


def made(folder: Path, **options: Any) -> SmolVLAPolicy:
    config = SmolVLAConfig(**SIZES, **options)
    first = folder / "first"
    first.mkdir(parents=True)
    SmolVLAPolicy.create(config, SPEC, 0, first)
    policy = SmolVLAPolicy.load(first, config)
    stirred(policy)
    policy.save(folder, policy.module.state_dict())
    return policy


def rolled_out(folder: Path, temperature: float = 1.0, **options: Any) -> list[Trajectory]:
    config = SmolVLAConfig(**SIZES, **options)
    return acting.rolled_out(SmolVLAPolicy, config, folder, temperature)


def acted(policy: SmolVLAPolicy, rows: int = 5, noise: Any = None) -> dict[str, Tensor]:
    seen = {n: torch.tensor(c[:rows]) for n, c in request(5, 0).steps.items() if n != "sample"}
    drawn = (
        torch.tensor(policy.draw_noise(np.random.default_rng(0), rows)) if noise is None else noise
    )
    with torch.no_grad():
        return policy.act(seen, drawn, 1.0)


@pytest.mark.parametrize("level", [0.3, 1.0])
def test_chunks_of_normal_data_come_out_as_normal_data(level: float) -> None:
    """By the exact velocity: each number of each action has the data's mean and deviation."""
    mean, std = torch.tensor([[1.5, -0.5], [0.0, 2.0]]), torch.tensor([[0.4, 1.0], [0.7, 0.2]])

    def velocity(points: Tensor, tau: Tensor) -> tuple[Tensor, None]:
        at = tau[:, None, None]
        spread = at.square() + (1 - at).square() * std**2
        return (at - (1 - at) * std**2) / spread * (points - (1 - at) * mean) - mean, None

    random = torch.Generator().manual_seed(0)
    drawn = torch.randn(20_000, 201, 2, 2, generator=random)
    denoising = DenoisingProcess(200, level, 2)
    found = denoising.sample(velocity, drawn[:, 0], drawn[:, 1:], 1.0)[:, -1]
    assert torch.allclose(found.mean(0), mean, atol=0.03)
    assert torch.allclose(found.std(0), std, rtol=0.05)


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_a_first_update_has_ratios_of_one_and_a_gradient(tmp_path: Path, level: Any) -> None:
    made(tmp_path)
    records = rolled_out(tmp_path)
    learns = acting.trainer(SmolVLAPolicy, SmolVLAConfig(**SIZES), tmp_path)
    acting.assert_first_update(learns, records, level)
    learns.close()


def test_ratios_of_chains_lead_to_actions_that_are_rewarded(tmp_path: Path) -> None:
    """Clipped ratios of whole actions, on one state, with a reward for being near a target."""
    config = SmolVLAConfig(**SIZES, noise_level=0.7)
    SmolVLAPolicy.create(config, SPEC, 0, tmp_path)
    policy = SmolVLAPolicy.load(tmp_path, config)
    optimizer = torch.optim.Adam(policy.module.parameters(), 1e-3)
    one = {n: c[:1] for n, c in request(5, 0).steps.items() if n != "sample"}
    seen = {n: torch.tensor(c).expand(32, *c.shape[1:]) for n, c in one.items()}
    steps = {n: column.numpy() for n, column in seen.items()}
    steps["observations"] = steps.pop("observation")
    random, target = np.random.default_rng(0), torch.tensor([0.5, -0.5, 1.0])
    means = []
    for _ in range(20):
        with torch.no_grad():
            done = policy.act(seen, torch.tensor(policy.draw_noise(random, 32)), 1.0)
        rewards = -(done["action"] - target).square().mean((1, 2))
        means.append(float(rewards.mean()))
        advantages = ((rewards - rewards.mean()) / rewards.std())[:, None]
        chained = {**steps, CHAIN_COLUMN: done[CHAIN_COLUMN].numpy()}
        chained["actions"] = done["action"].numpy()
        batch = policy.collate([Trajectory(identity=RecordId(0, 0), **step_fields(chained))])
        for _ in range(2):
            outputs = policy.evaluate(batch, 1.0).logprobs[0]
            ratios = (outputs - done["logprob"]).sum(-1).exp()
            clipped = ratios.clamp(0.8, 1.28)
            loss = -torch.minimum(ratios * advantages, clipped * advantages).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert np.mean(means[-3:]) > 0.4 * means[0], "rewards are below 0"


def test_everything_that_is_shown_matters_at_its_own_step_alone(tmp_path: Path) -> None:
    policy = made(tmp_path)
    batch = policy.collate(rolled_out(tmp_path))
    with torch.no_grad():
        before = policy.evaluate(batch, 1.0).logprobs
        for name in ("images.front", "images.wrist", "state", "prompt"):
            changed = {**batch, name: batch[name].clone()}
            changed[name][1, 2] = batch[name][2, 1] + 7 if name == "prompt" else 3
            after = policy.evaluate(changed, 1.0).logprobs
            moved = ((after - before).abs() > 1e-6).flatten(2).any(-1).nonzero().tolist()
            assert moved == [[1, 2]], name


def test_the_length_of_other_instructions_does_not_matter(tmp_path: Path) -> None:
    policy = made(tmp_path)
    noise = torch.tensor(policy.draw_noise(np.random.default_rng(0), 5))
    together, alone = acted(policy, 5, noise), acted(policy, 1, noise[:1])
    torch.testing.assert_close(together["action"][:1], alone["action"], atol=1e-5, rtol=0)


def test_actions_that_are_not_carried_out_have_no_part_in_those_before(tmp_path: Path) -> None:
    """So the first ones of a chunk are denoised alone, and their likelihood is whole."""
    policy = made(tmp_path / "whole")
    noise = torch.tensor(policy.draw_noise(np.random.default_rng(0), 5))
    config = SmolVLAConfig(path=tmp_path / "whole", chunk_size=2)
    (tmp_path / "first").mkdir()
    SmolVLAPolicy.create(config, SPEC, 0, tmp_path / "first")
    shorter = SmolVLAPolicy.load(tmp_path / "first", config)
    whole, first = acted(policy, 5, noise), acted(shorter, 5, noise[:, :, :2])
    assert first["action"].shape == (5, 2, 3)
    torch.testing.assert_close(first["action"], whole["action"][:, :2], atol=1e-5, rtol=0)
    torch.testing.assert_close(first["logprob"], whole["logprob"][:, :2], atol=1e-4, rtol=0)


def test_a_demonstration_is_learned_as_the_chunks_that_begin_at_its_steps(tmp_path: Path) -> None:
    policy = made(tmp_path)
    actions = np.random.default_rng(0).uniform(-1, 1, (6, 3)).astype(np.float32)
    record = Trajectory(identity=RecordId(2, 1), actions=actions)
    found = policy.prepare_demonstration(record, 5).to_record().steps
    for t in range(6):
        for k in range(4):
            assert (found["submask"][t, k] == (t + k < 6)).all()
            if t + k < 6:
                np.testing.assert_array_equal(found["actions"][t, k], actions[t + k])
    again, other = (
        policy.prepare_demonstration(record, 5).to_record().steps,
        policy.prepare_demonstration(record, 6).to_record().steps,
    )
    np.testing.assert_array_equal(found["noise"], again["noise"])
    assert not (found["uniform"] == other["uniform"]).any()


def test_imitation_makes_it_do_what_was_shown(tmp_path: Path) -> None:
    """One action for a picture that is bright, another where it is dark."""
    config = SmolVLAConfig(**SIZES)
    SmolVLAPolicy.create(config, SPEC, 0, tmp_path)
    policy = SmolVLAPolicy.load(tmp_path, config)
    optimizer = torch.optim.Adam(policy.module.parameters(), 3e-3)
    bright = np.arange(16) % 2
    steps = {n: c for n, c in request(16, 0).steps.items() if n != "sample"}
    steps["observations"] = steps.pop("observation")
    for camera in SPEC["images"]:
        steps[f"images.{camera}"] = np.broadcast_to(
            (40 + 170 * bright)[:, None, None, None], steps[f"images.{camera}"].shape
        ).astype(np.uint8)
    wanted = np.where(bright[:, None], 0.8, -0.8) * np.array([1, -1, 0.5])
    chunks = np.repeat(wanted[:, None], 4, 1).astype(np.float32)
    losses = []
    for number in range(150):
        shown = policy.prepare_demonstration(
            Trajectory(
                identity=RecordId(number, 0),
                **step_fields({**steps, "actions": wanted.astype(np.float32)}),
            )
        )
        shown.actions = chunks
        loss = -policy.evaluate(policy.collate([shown]), 1.0).logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-10:]) < 0.3 * losses[0]
    seen = {n: torch.tensor(c) for n, c in steps.items()}
    seen["observation"] = seen.pop("observations")
    with torch.no_grad():
        done = policy.act(seen, None, 0.0)["action"].numpy()
    assert np.abs(done - chunks).mean() < 0.25


def test_states_and_actions_are_scaled_by_the_statistics_of_a_data_set(tmp_path: Path) -> None:
    stats = {
        "observation.state": {"mean": [1.0, 2.0, 3.0], "std": [2.0, 4.0, 5.0]},
        "action": {"mean": [0.5, 0.0, -1.0], "std": [0.1, 2.0, 3.0]},
    }
    (tmp_path / "stats.json").write_text(json.dumps(stats))
    policy = made(tmp_path / "policy", norm_stats=tmp_path / "stats.json")
    found = acted(policy)
    mean, std = (torch.tensor(stats["action"][name]) for name in ("mean", "std"))
    torch.testing.assert_close(found["action"], found[CHAIN_COLUMN][:, -1] * std + mean)
    batch = policy.collate(rolled_out(tmp_path / "policy"))
    state = torch.tensor(request(5, 0).steps["observation"][:, :2])
    scaled = (state - torch.tensor([1.0, 2.0])) / torch.tensor([2.0, 4.0])
    torch.testing.assert_close(batch["state"][:, 0], scaled)
