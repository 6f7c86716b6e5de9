"""The policies pi-0 and pi-0.5: what they see, what they sample, what trains."""

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
from rlinf.models.action_expert import AdaptiveNorm, resize_with_padding
from rlinf.models.character_tokenizer import read_tokenizer
from rlinf.models.denoising import noise_fractions
from rlinf.models.pi0 import Pi0Policy
from rlinf.models.pi0_folder import PiConfig
from rlinf.trainers.base import loss_from_steps
from tests.rlinf.models import acting
from tests.rlinf.models.acting import SPEC, request, stirred
from tests.rlinf.models.pi0_folders import POLICIES

SIZES: dict[str, Any] = {
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "head_dim": 8,
    "intermediate": 48,
    "vision_hidden": 16,
    "vision_heads": 2,
    "patch_size": 8,
    "chunk_size": 4,
    "proprio_dim": 2,
    "expert_hidden": 24,
    "expert_intermediate": 40,
}
KINDS = sorted(POLICIES)
PARTS = (
    "vision_model",
    "multi_modal_projector",
    "language_model",
    "gemma_expert",
    "action_in_proj",
)


def made(folder: Path, kind: str, **options: Any) -> Pi0Policy:
    config, first = PiConfig(**{**SIZES, **options}), folder / "first"
    first.mkdir(parents=True)
    POLICIES[kind].create(config, SPEC, 0, first)
    policy = POLICIES[kind].load(first, config)
    stirred(policy)
    policy.save(folder, policy.module.state_dict())
    return policy


def rolled_out(folder: Path, kind: str, temperature: float = 1.0, **options: Any) -> Any:
    config = PiConfig(**{**SIZES, **options})
    return acting.rolled_out(POLICIES[kind], config, folder, temperature)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("noise", "temperature"), [("sde", 1.0), ("learned", 0.6), ("sde", 0.0)])
def test_the_trainer_recomputes_the_log_probabilities_of_what_was_sampled(
    tmp_path: Path, kind: str, noise: str, temperature: float
) -> None:
    made(tmp_path, kind, noise_method=noise)
    records = rolled_out(tmp_path, kind, temperature, noise_method=noise)
    assert records[0].logprobs.shape == records[0].actions.shape == (3, 4, 3)
    config = PiConfig(**SIZES, noise_method=noise)
    learns = acting.trainer(POLICIES[kind], config, tmp_path)
    acting.assert_recomputed(learns, records, temperature)
    learns.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_update_has_ratios_of_one_and_a_gradient(tmp_path: Path, kind: str) -> None:
    made(tmp_path, kind)
    learns = acting.trainer(POLICIES[kind], PiConfig(**SIZES), tmp_path)
    acting.assert_first_update(learns, rolled_out(tmp_path, kind), "action")
    learns.close()


def test_a_value_for_each_action_is_recomputed_and_learned_from(tmp_path: Path) -> None:
    made(tmp_path, "pi05", value_level="action")
    config = PiConfig(**SIZES, value_level="action")
    acting.assert_values_of_actions(POLICIES["pi05"], config, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
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
    tmp_path: Path, kind: str, options: dict[str, Any], near: float
) -> None:
    if "lora" in options:
        pytest.importorskip("peft")
    policy, records = made(tmp_path, kind), rolled_out(tmp_path, kind)
    loss = loss_from_steps(lambda outputs, spans: (1e-3 * outputs.logprobs.square().sum(), {}))
    known, found = policy.module.state_dict(), []
    for each in ({}, options):
        learns = acting.trainer(POLICIES[kind], PiConfig(**SIZES), tmp_path, **each)
        found.append(learns.step(records, loss, lr=1e-2)["loss"])
        state = learns.full_state_dict()
        learns.close()
    assert found[1] == pytest.approx(found[0], rel=near)
    assert state.keys() == known.keys()
    moved = {name for name, tensor in state.items() if not torch.equal(tensor, known[name])}
    for part in ("vision_model", "language_model", "gemma_expert.model"):
        assert any(part in name for name in moved), part


@pytest.mark.parametrize("kind", KINDS)
def test_processes_that_share_it_out_learn_what_one_learns(tmp_path: Path, kind: str) -> None:
    made(tmp_path, kind)
    acting.assert_shares_learn_what_one_learns(POLICIES[kind], __name__, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_all_parts_learn_from_what_is_said_of_actions(tmp_path: Path, kind: str) -> None:
    policy = made(tmp_path, kind, noise_method="learned")
    batch = policy.collate(rolled_out(tmp_path, kind, noise_method="learned"))
    policy.evaluate(batch, 1.0).logprobs.square().sum().backward()
    moved = {n for n, t in policy.module.named_parameters() if t.grad is not None and t.grad.any()}
    for part in (*PARTS, "action_out_proj", "time_mlp_in", "time_mlp_out", "noise_head"):
        assert any(part in name for name in moved), part
    assert any("dense" in name for name in moved) == (kind == "pi05")
    assert any("state_proj" in name for name in moved) == (kind == "pi0")


@pytest.mark.parametrize("kind", KINDS)
def test_everything_that_is_shown_matters_at_its_own_step_alone(tmp_path: Path, kind: str) -> None:
    policy = made(tmp_path, kind)
    batch = policy.collate(rolled_out(tmp_path, kind))
    names = ["images.front", "images.wrist", "prompt", *["state"] * (kind == "pi0")]
    with torch.no_grad():
        before = policy.evaluate(batch, 1.0).logprobs
        for name in names:
            changed = {**batch, name: batch[name].clone()}
            changed[name][1, 2] = batch[name][2, 1] + 7 if name == "prompt" else 3
            after = policy.evaluate(changed, 1.0).logprobs
            moved = ((after - before).abs() > 1e-6).flatten(2).any(-1).nonzero().tolist()
            assert moved == [[1, 2]], name


@pytest.mark.parametrize("kind", KINDS)
def test_points_of_other_noise_fractions_do_not_matter(tmp_path: Path, kind: str) -> None:
    """So one pass over the chain gives what the sampler got step by step."""
    policy = made(tmp_path, kind)
    batch = policy.collate(rolled_out(tmp_path, kind))
    row = {name: column[0, :1] for name, column in batch.items()}
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


@pytest.mark.parametrize("kind", KINDS)
def test_all_actions_of_a_chunk_matter_to_the_first_ones(tmp_path: Path, kind: str) -> None:
    """Also those that are not carried out: the whole chunk is denoised."""
    made(tmp_path / "whole", kind)
    (tmp_path / "first").mkdir()
    config = PiConfig(path=tmp_path / "whole", chunk_size=2)
    POLICIES[kind].create(config, SPEC, 0, tmp_path / "first")
    policy = POLICIES[kind].load(tmp_path / "first", config)
    seen = {n: torch.tensor(c) for n, c in request(5, 0).steps.items() if n != "sample"}
    noise = torch.tensor(policy.draw_noise(np.random.default_rng(0), 5))
    assert noise.shape == (5, 5, 4, 3)
    other = noise.clone()
    other[:, 0, 3] += 1
    with torch.no_grad():
        one, two = (policy.act(seen, drawn, 1.0)["action"] for drawn in (noise, other))
    assert one.shape == (5, 2, 3)
    assert ((one - two).abs() > 1e-6).any()


@pytest.mark.parametrize(
    ("kind", "in_prompt", "wanted"),
    [
        ("pi0", None, "put the mug down\n"),
        ("pi05", False, "put the mug down\n"),
        ("pi05", None, "Task: put the mug down, State: 192 -1;\nAction: "),
    ],
)
def test_prompts_have_the_published_forms(
    tmp_path: Path, kind: str, in_prompt: bool | None, wanted: str
) -> None:
    """Tokens of a new network are characters. Bins are those of openpi: -1 below the range."""
    policy = made(tmp_path, kind, state_in_prompt=in_prompt)
    tokenizer = read_tokenizer(tmp_path / "tokenizer")
    for text in ("put the mug down", " put_the_mug\ndown "):
        rows = encode_instruction(text)[None, None]
        tokens, mask = policy.tokenize_prompts(rows, torch.tensor([[[0.5, -1.2]]]))
        assert tokenizer.decode(tokens[0, 0].tolist()) == wanted
        assert mask.all()


def test_actions_relative_to_the_state_are_added_back(tmp_path: Path) -> None:
    policy = made(tmp_path, "pi0", relative_action_dims=(0, 1))
    plain = made(tmp_path / "plain", "pi0")
    seen = {n: torch.tensor(c) for n, c in request(5, 0).steps.items() if n != "sample"}
    noise = torch.tensor(policy.draw_noise(np.random.default_rng(0), 5))
    with torch.no_grad():
        one, two = (each.act(seen, noise, 1.0)["action"] for each in (policy, plain))
    moved = seen["observation"][:, None, :2].expand(-1, 4, -1)
    torch.testing.assert_close(one - two, torch.nn.functional.pad(moved, (0, 1)))
    steps: dict[str, Any] = {n: c.numpy() for n, c in seen.items()}
    steps["observations"] = steps.pop("observation")
    shown = policy.prepare_demonstration(
        Trajectory(identity=RecordId(0, 0), **step_fields({**steps, "actions": one[:, 0].numpy()}))
    )
    wanted = plain.prepare_demonstration(
        Trajectory(identity=RecordId(0, 0), **step_fields({**steps, "actions": two[:, 0].numpy()}))
    )
    found, absolute = policy.collate([shown])["actions"], plain.collate([wanted])["actions"]
    torch.testing.assert_close(found[0, :, 0], absolute[0, :, 0])


def test_adaptive_norms_without_weights_switch_the_expert_off() -> None:
    norm, hidden = AdaptiveNorm(6), torch.randn(2, 8, 6)
    condition = torch.randn(2, 4, 6)
    found, gate = norm(hidden, condition)
    scale = hidden.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(found, hidden / scale, atol=1e-4, rtol=1e-4)
    assert not gate.any()
    with torch.no_grad():
        norm.dense.weight.normal_()
        found, gate = norm(hidden, condition)
        each = [norm(hidden[:, 2 * k : 2 * k + 2], condition[:, [k]])[0] for k in range(4)]
    torch.testing.assert_close(found, torch.cat(each, 1))
    assert gate.any()


def test_pictures_that_are_not_square_stand_in_the_middle() -> None:
    wide = torch.ones(1, 3, 4, 8)
    found = resize_with_padding(wide, 8, 8, center=True)[0, 0]
    assert found[2:6].all()
    assert not found[:2].any()
    assert not found[6:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_imitation_makes_it_do_what_was_shown(tmp_path: Path, kind: str) -> None:
    """One action for an instruction, another for the other one."""
    config = PiConfig(**SIZES)
    POLICIES[kind].create(config, SPEC, 0, tmp_path)
    policy = POLICIES[kind].load(tmp_path, config)
    optimizer = torch.optim.Adam(policy.module.parameters(), 3e-3)
    steps: dict[str, Any] = {n: c for n, c in request(16, 0).steps.items() if n != "sample"}
    steps["observations"] = steps.pop("observation")
    is_push = np.arange(16) % 2
    steps[INSTRUCTION_COLUMN] = np.stack(
        [encode_instruction("push" if push else "reach") for push in is_push]
    )
    wanted = np.where(is_push[:, None], 0.8, -0.8) * np.array([1, -1, 0.5])
    chunks, losses = np.repeat(wanted[:, None], 4, 1).astype(np.float32), []
    for number in range(150):
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
