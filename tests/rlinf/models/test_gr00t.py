"""The policies GR00T N1.5 and N1.7: what they see, what they sample, what trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.data.episodes import INSTRUCTION_COLUMN
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory, step_fields
from rlinf.envs.observations import encode_instruction
from rlinf.models.denoising import noise_fractions
from rlinf.models.gr00t import Gr00tPolicy
from rlinf.models.gr00t_folder import Gr00tConfig
from rlinf.models.gr00t_network import prepare_pixels
from rlinf.trainers.base import loss_from_steps
from tests.rlinf.models import acting
from tests.rlinf.models.acting import SPEC, request, stirred
from tests.rlinf.models.gr00t_folders import VERSIONS

SIZES: dict[str, Any] = {
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "intermediate": 48,
    "vision_hidden": 16,
    "vision_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "chunk_size": 4,
    "proprio_dim": 2,
    "expert_hidden": 24,
}
PARTS = (
    "backbone",
    "vl_self_attention",
    "vlln",
    "action_head.model.transformer_blocks.0.attn1.to_k",
    "action_head.model.transformer_blocks.1.norm1",
    "timestep_encoder",
    "state_encoder",
    "action_encoder",
    "action_decoder",
    "position_embedding",
    "proj_out_1",
    "noise_head",
)


def made(folder: Path, version: Any, **options: Any) -> Gr00tPolicy:
    config, first = Gr00tConfig(**{**SIZES, "version": version, **options}), folder / "first"
    first.mkdir(parents=True)
    Gr00tPolicy.create(config, SPEC, 0, first)
    policy = Gr00tPolicy.load(first, config)
    stirred(policy)
    policy.save(folder, policy.module.state_dict())
    return policy


def rolled_out(folder: Path, temperature: float = 1.0, **options: Any) -> Any:
    return acting.rolled_out(Gr00tPolicy, Gr00tConfig(**SIZES, **options), folder, temperature)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("noise", "temperature"), [("sde", 1.0), ("learned", 0.6), ("sde", 0.0)])
def test_the_trainer_recomputes_the_log_probabilities_of_what_was_sampled(
    tmp_path: Path, version: str, noise: Any, temperature: float
) -> None:
    made(tmp_path, version, noise_method=noise)
    records = rolled_out(tmp_path, temperature, noise_method=noise)
    assert records[0].logprobs.shape == records[0].actions.shape == (3, 4, 3)
    config = Gr00tConfig(**SIZES, noise_method=noise)
    learns = acting.trainer(Gr00tPolicy, config, tmp_path)
    learns.policy.module.train()
    acting.assert_recomputed(learns, records, temperature)
    learns.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_first_update_has_ratios_of_one_and_a_gradient(tmp_path: Path, version: str) -> None:
    made(tmp_path, version)
    learns = acting.trainer(Gr00tPolicy, Gr00tConfig(**SIZES), tmp_path)
    acting.assert_first_update(learns, rolled_out(tmp_path), "action")
    learns.close()


def test_a_value_for_each_action_is_recomputed_and_learned_from(tmp_path: Path) -> None:
    made(tmp_path, "n1.5", value_level="action")
    config = Gr00tConfig(**SIZES, value_level="action")
    acting.assert_values_of_actions(Gr00tPolicy, config, tmp_path)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({"gradient_checkpointing": True}, 1e-5),
        ({"param_dtype": "bfloat16"}, 0.05),
        ({"lora": {"rank": 2}}, 1e-5),
    ],
    ids=["recomputed", "bfloat16", "adapters"],
)
def test_ways_of_training_have_the_same_loss_and_learn(
    tmp_path: Path, version: str, options: dict[str, Any], near: float
) -> None:
    if "lora" in options:
        pytest.importorskip("peft")
    policy, records = made(tmp_path, version), rolled_out(tmp_path)
    loss = loss_from_steps(lambda outputs, spans: (1e-3 * outputs.logprobs.square().sum(), {}))
    known, found = policy.module.state_dict(), []
    for each in ({}, options):
        learns = acting.trainer(Gr00tPolicy, Gr00tConfig(**SIZES), tmp_path, **each)
        found.append(learns.step(records, loss, lr=1e-2)["loss"])
        state = learns.full_state_dict()
        learns.close()
    assert found[1] == pytest.approx(found[0], rel=near)
    assert state.keys() == known.keys()
    moved = {name for name, tensor in state.items() if not torch.equal(tensor, known[name])}
    for part in ("backbone", "vl_self_attention", "action_head.model.transformer_blocks"):
        assert any(part in name for name in moved), part


def test_processes_that_share_it_out_learn_what_one_learns(tmp_path: Path) -> None:
    made(tmp_path, "n1.5")
    acting.assert_shares_learn_what_one_learns(Gr00tPolicy, __name__, tmp_path)


@pytest.mark.parametrize("version", VERSIONS)
def test_all_parts_learn_from_what_is_said_of_actions(tmp_path: Path, version: str) -> None:
    policy = made(tmp_path, version, noise_method="learned")
    batch = policy.collate(rolled_out(tmp_path, noise_method="learned"))
    policy.evaluate(batch, 1.0).logprobs.square().sum().backward()
    named = dict(policy.module.named_parameters())
    moved = {n for n, t in named.items() if t.grad is not None and t.grad.any()}
    for part in (*PARTS, *["future_tokens"] * (version == "n1.5")):
        assert any(part in name for name in moved), part
    # The value head learns from values alone. Attention does not depend on biases of keys.
    assert {n for n in named if "value_head" not in n} - moved <= {
        n for n in named if n.endswith("k_proj.bias")
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_everything_that_is_shown_matters_at_its_own_step_alone(
    tmp_path: Path, version: str
) -> None:
    policy = made(tmp_path, version)
    batch = policy.collate(rolled_out(tmp_path))
    with torch.no_grad():
        before = policy.evaluate(batch, 1.0).logprobs
        for name in ("images.front", "images.wrist", "prompt", "state"):
            changed = {**batch, name: batch[name].clone()}
            column = changed[name][1, 2]
            if name == "prompt":
                # The instruction of another row: its characters, not the fixed parts.
                column[:] = batch[name][2, 1]
                assert not torch.equal(column, batch[name][1, 2])
            else:
                column += 3
            after = policy.evaluate(changed, 1.0).logprobs
            moved = ((after - before).abs() > 1e-6).flatten(2).any(-1).nonzero().tolist()
            assert moved == [[1, 2]], name


@pytest.mark.parametrize("version", VERSIONS)
def test_padding_of_prompts_does_not_matter(tmp_path: Path, version: str) -> None:
    """The reference does not mask it, and its actions depend on the rest of the batch."""
    policy = made(tmp_path, version)
    batch = policy.collate(rolled_out(tmp_path))
    assert not batch["prompt_mask"].all()
    with torch.no_grad():
        before = policy.evaluate(batch, 1.0).logprobs
        other = batch["prompt"].masked_fill(~batch["prompt_mask"], 9)
        after = policy.evaluate({**batch, "prompt": other}, 1.0).logprobs
        longer = {
            name: torch.nn.functional.pad(batch[name], (0, 11))
            for name in ("prompt", "prompt_mask")
        }
        padded = policy.evaluate({**batch, **longer}, 1.0).logprobs
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
    torch.testing.assert_close(padded, before, atol=1e-5, rtol=0)


@pytest.mark.parametrize("version", VERSIONS)
def test_points_of_other_noise_fractions_do_not_matter(tmp_path: Path, version: str) -> None:
    """So one pass over the chain gives what the sampler got step by step."""
    policy = made(tmp_path, version)
    batch = policy.collate(rolled_out(tmp_path))
    row = {name: column[:2, 0] for name, column in batch.items()}
    points, tau = row["chain"][:, :-1], noise_fractions(policy.num_denoising_steps)
    images = [row["images.front"], row["images.wrist"]]
    with torch.no_grad():
        prefix = policy.module.encode_prefix(
            row["prompt"], row["prompt_mask"], row["state"], *images
        )
        together = policy.module.velocity(prefix, points, tau)[0]
        for index in range(len(tau)):
            one = policy.module.velocity(prefix, points[:, [index]], tau[[index]])[0]
            torch.testing.assert_close(one[:, 0], together[:, index], atol=1e-5, rtol=0)


@pytest.mark.parametrize("version", VERSIONS)
def test_all_actions_of_a_chunk_matter_to_the_first_ones(tmp_path: Path, version: Any) -> None:
    """Also those that are not carried out: the whole chunk is denoised."""
    made(tmp_path / "whole", version)
    (tmp_path / "first").mkdir()
    config = Gr00tConfig(path=tmp_path / "whole", chunk_size=2)
    Gr00tPolicy.create(config, SPEC, 0, tmp_path / "first")
    policy = Gr00tPolicy.load(tmp_path / "first", config)
    seen = {n: torch.tensor(c) for n, c in request(5, 0).steps.items() if n != "sample"}
    noise = torch.tensor(policy.draw_noise(np.random.default_rng(0), 5))
    assert noise.shape == (5, 5, 4, 3)
    other = noise.clone()
    other[:, 0, 3] += 1
    with torch.no_grad():
        one, two = (policy.act(seen, drawn, 1.0)["action"] for drawn in (noise, other))
    assert one.shape == (5, 2, 3)
    assert ((one - two).abs() > 1e-6).any()


def test_pictures_are_cropped_in_the_middle_and_resized() -> None:
    images = torch.zeros(1, 8, 16, 3, dtype=torch.uint8)
    images[:, 2:6, 4:12] = 255
    found = prepare_pixels(images, 4, 0.5)
    assert found.shape == (1, 3, 4, 4)
    torch.testing.assert_close(found, torch.ones_like(found))
    assert prepare_pixels(images, 4, 1.0).min() < -0.9


@pytest.mark.parametrize("version", VERSIONS)
def test_imitation_makes_it_do_what_was_shown(tmp_path: Path, version: Any) -> None:
    """One action for an instruction, another for the other one."""
    config = Gr00tConfig(**SIZES, version=version)
    Gr00tPolicy.create(config, SPEC, 0, tmp_path)
    policy = Gr00tPolicy.load(tmp_path, config)
    optimizer = torch.optim.Adam(policy.module.parameters(), 3e-3)
    steps: dict[str, Any] = {n: c for n, c in request(16, 0).steps.items() if n != "sample"}
    steps["observations"] = steps.pop("observation")
    is_push = np.arange(16) % 2
    steps[INSTRUCTION_COLUMN] = np.stack(
        [encode_instruction("push" if push else "reach") for push in is_push]
    )
    wanted = np.where(is_push[:, None], 0.8, -0.8) * np.array([1, -1, 0.5])
    chunks, losses = np.repeat(wanted[:, None], 4, 1).astype(np.float32), []
    for number in range(200):
        columns = step_fields({**steps, "actions": wanted.astype(np.float32)})
        shown = policy.prepare_demonstration(Trajectory(identity=RecordId(number, 0), **columns))
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
