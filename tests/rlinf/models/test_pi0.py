"""The policies pi-0 and pi-0.5: what they see, what they sample, what trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory, step_fields
from rlinf.envs.observations import encode_instruction
from rlinf.models.action_expert import AdaptiveNorm, resize_with_padding
from rlinf.models.character_tokenizer import read_tokenizer
from rlinf.models.pi0 import Pi0Policy
from rlinf.models.pi0_folder import PiConfig
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
