"""The policy WALL-OSS: what it sees, what it samples, what trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from rlinf.data.episodes import INSTRUCTION_COLUMN
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory, step_fields
from rlinf.envs.observations import encode_instruction
from rlinf.models.character_tokenizer import read_tokenizer
from rlinf.models.images import ImageProcessor
from rlinf.models.wall_oss import WallOSSPolicy
from rlinf.models.wall_oss_folder import WallOSSConfig
from rlinf.models.wall_oss_network import resized_shapes, time_code, to_patches
from tests.rlinf.models import acting
from tests.rlinf.models.acting import SPEC, stirred
from tests.rlinf.models.wall_oss_folders import start, write_folder

SIZES: dict[str, Any] = {
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "intermediate": 48,
    "expert_intermediate": 24,
    "vision_hidden": 16,
    "vision_heads": 2,
    "patch_size": 4,
    "chunk_size": 4,
    "proprio_dim": 2,
}
PARTS = (
    *("visual.blocks", "visual.merger", "embed_tokens", "moe.experts.0", "moe.experts.1"),
    *("w1", "w2", "w3", "action_proj_back", "propri_proj"),
)


def made(folder: Path, **options: Any) -> WallOSSPolicy:
    config, first = WallOSSConfig(**{**SIZES, **options}), folder / "first"
    first.mkdir(parents=True)
    WallOSSPolicy.create(config, SPEC, 0, first)
    policy = WallOSSPolicy.load(first, config)
    stirred(policy)
    policy.save(folder, policy.module.state_dict())
    return policy


def rolled_out(folder: Path, temperature: float = 1.0, **options: Any) -> Any:
    config = WallOSSConfig(**{**SIZES, **options})
    return acting.rolled_out(WallOSSPolicy, config, folder, temperature)


def test_everything_that_is_shown_matters_at_its_own_step_alone(tmp_path: Path) -> None:
    policy = made(tmp_path)
    batch = policy.collate(rolled_out(tmp_path))
    with torch.no_grad():
        before = policy.evaluate(batch, 1.0).logprobs
        for name in ("images.front", "images.wrist", "prompt", "state"):
            changed = {**batch, name: batch[name].clone()}
            if name == "prompt":
                changed[name][1, 2, -80] += 1  # a character of the instruction
            else:
                changed[name][1, 2] = 3
            after = policy.evaluate(changed, 1.0).logprobs
            moved = ((after - before).abs() > 1e-6).flatten(2).any(-1).nonzero().tolist()
            assert moved == [[1, 2]], name


def encoded(policy: WallOSSPolicy, folder: Path) -> tuple[dict[str, Tensor], Any]:
    """The columns of the first steps, and their prefix."""
    batch = policy.collate(rolled_out(folder))
    rows = {name: column[:2, 0] for name, column in batch.items()}
    images = [rows["images.front"], rows["images.wrist"]]
    prefix = policy.module.encode_prefix(
        rows["prompt"], rows["prompt_mask"], rows["state"], *images
    )
    return rows, prefix


def test_the_cache_of_the_prefix_is_exact(tmp_path: Path) -> None:
    """One pass over the whole sequence, without a cache, with a dense mask, and with the MLP of
    each token, gives the same velocity."""
    policy = made(tmp_path)
    module: Any = policy.module
    layers, norm, actions = (
        module.model.model["layers"],
        module.model.model["norm"],
        module.model.action_preprocessor,
    )
    seen: list[tuple[Tensor, Tensor]] = []
    layers[0].register_forward_hook(lambda layer, inputs, output: seen.append(inputs[:2]))
    with torch.no_grad():
        rows, prefix = encoded(policy, tmp_path)
        points, tau = rows["chain"][:, [1]], torch.tensor([0.75])
        cached = module.velocity(prefix, points, tau)[0][:, 0]
        (before, places), (after, more) = seen
        count, length = before.shape[:2]
        hidden = torch.cat([before, after], 1)
        places = torch.cat([places.expand(count, -1, -1), more], 1)
        index = torch.arange(hidden.shape[1])
        is_action = index >= length
        is_visible = (index[:, None] >= index) | (is_action[:, None] & is_action)
        there = F.pad(prefix.mask, (0, after.shape[1]), value=True)
        for layer in layers:
            inputs = layer.input_layernorm(hidden)
            attention = layer.self_attn
            heads = [
                projection(inputs).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            ]
            query, key = (rotated(states, places, layer) for states in heads[:2])
            key, value = (
                x.repeat_interleave(len(query[0]) // len(x[0]), 1) for x in (key, heads[2])
            )
            scores = query @ key.transpose(2, 3) / attention.head_dim**0.5
            scores = scores.masked_fill(~(is_visible & there[:, None, None]), -torch.inf)
            attended = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
            hidden = hidden + attention.o_proj(attended)
            inputs = layer.post_attention_layernorm(hidden)
            one, two = (expert(inputs) for expert in layer.moe["experts"])
            hidden = hidden + torch.where(is_action[:, None], two, one)
        full = -actions.action_proj_back(norm(hidden)[:, length:])
    assert not prefix.mask.all(), "prompts of different lengths"
    torch.testing.assert_close(cached, full, atol=1e-5, rtol=1e-5)
    assert cached.abs().mean() > 1e-2


def rotated(states: Tensor, places: Tensor, layer: Any) -> Tensor:
    """Rotary positions of three axes, frequency by frequency (arXiv 2409.12191)."""
    half = states.shape[-1] // 2
    sections, result = [2, 3, 3], states.clone()
    axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
    assert len(axes) == half
    for index, axis in enumerate(axes):
        angle = (places[..., axis] * 1e6 ** (-2 * index / states.shape[-1]))[:, None]
        one, two = states[..., index], states[..., half + index]
        result[..., index] = one * angle.cos() - two * angle.sin()
        result[..., half + index] = two * angle.cos() + one * angle.sin()
    return result


def test_padding_of_actions_is_not_trained(tmp_path: Path) -> None:
    write_folder(tmp_path / "source")
    policy = start(tmp_path / "policy", tmp_path / "source")
    random = np.random.default_rng(0)
    steps: dict[str, Any] = {
        "observations": random.normal(size=(5, 4)).astype(np.float32),
        "actions": random.normal(size=(5, 3)).astype(np.float32),
        INSTRUCTION_COLUMN: np.stack([encode_instruction("reach")] * 5),
        "images.front": random.integers(0, 256, (5, 40, 40, 3), np.uint8),
        "images.wrist": random.integers(0, 256, (5, 28, 28, 3), np.uint8),
    }
    shown = policy.prepare_demonstration(Trajectory(identity=RecordId(0, 0), **step_fields(steps)))
    policy.evaluate(policy.collate([shown]), 1.0).logprobs.sum().backward()
    back: Any = policy.module.model.action_preprocessor.action_proj_back.weight.grad
    assert back[:3].any(1).all()
    assert not back[3:].any()


def test_the_prompt_has_the_published_form(tmp_path: Path) -> None:
    """Tokens of a new network are characters; an image has one token, which stands for all."""
    policy = made(tmp_path)
    tokenizer = read_tokenizer(tmp_path / "vlm")
    for text, task in (
        ("put the mug down", "put the mug down."),
        ("Put it down.", "Put it down."),
        ("", "Execute the robot action."),
    ):
        rows = encode_instruction(text)[None, None]
        tokens, mask = policy.tokenize_prompts(rows, torch.zeros(1, 1, 2))
        image = "<|vision_start|><|image_pad|><|vision_end|>"
        assert tokenizer.decode(tokens[0, 0].tolist(), skip_special_tokens=False) == (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\nObservation: front view: {image} wrist view: {image}\n"
            f"Instruction: {task}\nPredict the next action in robot action.\n"
            "Proprioception: <|propri|>\n<|im_end|>\n<|im_start|>assistant\n"
        )
        assert mask.all()


@pytest.mark.parametrize(("height", "width"), [(96, 96), (48, 64), (300, 200)])
def test_images_are_resized_as_by_the_original_code(height: int, width: int) -> None:
    """Pillow rounds and clips between its passes, so a level more or less is equal, and the edges
    of these images do not overshoot the range."""
    random = np.random.default_rng(0)
    image = (
        random.integers(64, 192, (height // 8, width // 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    )
    processor = ImageProcessor(0, ())
    sizes = resized_shapes(*image.shape[:2], 256, processor)
    known = Image.fromarray(image)
    for rows, columns in sizes:
        assert max(rows, columns) in (252, 256)
        known = known.resize((columns, rows))
    wanted = processor.to_patches([np.asarray(known)])
    found, rows, columns = to_patches(torch.tensor(image)[None], 256, processor)
    assert (rows * 14, columns * 14) == sizes[1]
    level = 1 / 255 / min(processor.image_std)
    assert np.abs(found.numpy() - wanted).max() < 2.5 * level
    assert np.abs(found.numpy() - wanted).mean() < 0.2 * level


def test_patches_are_those_of_the_image_processor() -> None:
    image = np.random.default_rng(0).integers(0, 256, (28, 56, 3), np.uint8)
    processor = ImageProcessor(0, (), patch_size=7)
    found, rows, columns = to_patches(torch.tensor(image)[None], 56, processor)
    assert (rows, columns) == (4, 8)
    np.testing.assert_allclose(found.numpy(), processor.to_patches([image]), atol=1e-5)


def test_times_are_told_apart_by_slow_and_fast_waves() -> None:
    found = time_code(torch.tensor([0.0, 0.5, 1.0]), 8)
    assert found.shape == (3, 8)
    assert found[0].tolist() == [0] * 4 + [1] * 4
    torch.testing.assert_close(
        found[2, :4], torch.tensor([1, 1e4 ** (-1 / 3), 1e4 ** (-2 / 3), 1e-4]).sin()
    )
