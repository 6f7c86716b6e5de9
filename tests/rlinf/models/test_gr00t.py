"""The policies GR00T N1.5 and N1.7: what they see, what they sample, what trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.models.gr00t import Gr00tPolicy
from rlinf.models.gr00t_folder import Gr00tConfig
from rlinf.models.gr00t_network import prepare_pixels
from tests.rlinf.models import acting
from tests.rlinf.models.acting import SPEC, stirred
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


def test_pictures_are_cropped_in_the_middle_and_resized() -> None:
    images = torch.zeros(1, 8, 16, 3, dtype=torch.uint8)
    images[:, 2:6, 4:12] = 255
    found = prepare_pixels(images, 4, 0.5)
    assert found.shape == (1, 3, 4, 4)
    torch.testing.assert_close(found, torch.ones_like(found))
    assert prepare_pixels(images, 4, 1.0).min() < -0.9


@pytest.mark.parametrize("version", VERSIONS)
def test_every_weight_learns_from_what_is_said_of_actions(tmp_path: Path, version: str) -> None:
    """But for biases of keys, on which attention does not depend, and the value head."""
    policy = made(tmp_path, version, noise_method="learned")
    batch = policy.collate(rolled_out(tmp_path, noise_method="learned"))
    policy.evaluate(batch, 1.0).logprobs.square().sum().backward()
    named = dict(policy.module.named_parameters())
    moved = {n for n, t in named.items() if t.grad is not None and t.grad.any()}
    assert {n for n in named if "value_head" not in n} - moved <= {
        n for n in named if n.endswith("k_proj.bias")
    }
