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
from rlinf.models.denoising import noise_fractions
from rlinf.models.images import ImageProcessor
from rlinf.models.wall_oss import WallOSSPolicy
from rlinf.models.wall_oss_folder import WallOSSConfig
from rlinf.models.wall_oss_network import resized_shapes, time_code, to_patches
from rlinf.trainers.base import loss_from_steps
from tests.rlinf.models import acting
from tests.rlinf.models.acting import SPEC, request, stirred
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


@pytest.mark.parametrize(("noise", "temperature"), [("sde", 1.0), ("learned", 0.6), ("sde", 0.0)])
def test_the_trainer_recomputes_the_log_probabilities_of_what_was_sampled(
    tmp_path: Path, noise: str, temperature: float
) -> None:
    made(tmp_path, noise_method=noise)
    records = rolled_out(tmp_path, temperature, noise_method=noise)
    assert records[0].logprobs.shape == records[0].actions.shape == (3, 4, 3)
    config = WallOSSConfig(**{**SIZES, "noise_method": noise})
    learns = acting.trainer(WallOSSPolicy, config, tmp_path)
    acting.assert_recomputed(learns, records, temperature)
    learns.close()


def test_a_first_update_has_ratios_of_one_and_a_gradient(tmp_path: Path) -> None:
    made(tmp_path)
    learns = acting.trainer(WallOSSPolicy, WallOSSConfig(**SIZES), tmp_path)
    acting.assert_first_update(learns, rolled_out(tmp_path), "action")
    learns.close()


def test_a_value_for_each_action_is_recomputed_and_learned_from(tmp_path: Path) -> None:
    made(tmp_path, value_level="action")
    config = WallOSSConfig(**{**SIZES, "value_level": "action"})
    acting.assert_values_of_actions(WallOSSPolicy, config, tmp_path)


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
    tmp_path: Path, options: dict[str, Any], near: float
) -> None:
    if "lora" in options:
        pytest.importorskip("peft")
    policy, records = made(tmp_path), rolled_out(tmp_path)
    loss = loss_from_steps(lambda outputs, spans: (1e-3 * outputs.logprobs.square().sum(), {}))
    known, found = policy.module.state_dict(), []
    for each in ({}, options):
        learns = acting.trainer(WallOSSPolicy, WallOSSConfig(**SIZES), tmp_path, **each)
        found.append(learns.step(records, loss, lr=1e-2)["loss"])
        state = learns.full_state_dict()
        learns.close()
    assert found[1] == pytest.approx(found[0], rel=near)
    assert state.keys() == known.keys()
    moved = {name for name, tensor in state.items() if not torch.equal(tensor, known[name])}
    for part in ("visual.blocks", "self_attn.q_proj", "moe.experts.0", "moe.experts.1"):
        assert any(part in name for name in moved), part


def test_processes_that_share_it_out_learn_what_one_learns(tmp_path: Path) -> None:
    made(tmp_path)
    acting.assert_shares_learn_what_one_learns(WallOSSPolicy, __name__, tmp_path)


def test_all_parts_learn_from_what_is_said_of_actions(tmp_path: Path) -> None:
    policy = made(tmp_path, noise_method="learned")
    batch = policy.collate(rolled_out(tmp_path, noise_method="learned"))
    policy.evaluate(batch, 1.0).logprobs.square().sum().backward()
    moved = {n for n, t in policy.module.named_parameters() if t.grad is not None and t.grad.any()}
    for part in (*PARTS, "noise_head"):
        assert any(part in name for name in moved), part


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


def test_points_of_other_noise_fractions_do_not_matter(tmp_path: Path) -> None:
    """So one pass over the chain gives what the sampler got step by step."""
    policy = made(tmp_path)
    with torch.no_grad():
        rows, prefix = encoded(policy, tmp_path)
        points, tau = rows["chain"][:, :-1], noise_fractions(policy.num_denoising_steps)
        together = policy.module.velocity(prefix, points, tau)[0]
        for index in range(len(tau)):
            one = policy.module.velocity(prefix, points[:, [index]], tau[[index]])[0]
            torch.testing.assert_close(one[:, 0], together[:, index], atol=1e-5, rtol=0)


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


def test_all_actions_of_a_chunk_matter_to_the_first_ones(tmp_path: Path) -> None:
    """Also those that are not carried out: the whole chunk is denoised."""
    made(tmp_path / "whole")
    (tmp_path / "first").mkdir()
    config = WallOSSConfig(path=tmp_path / "whole", chunk_size=2)
    WallOSSPolicy.create(config, SPEC, 0, tmp_path / "first")
    policy = WallOSSPolicy.load(tmp_path / "first", config)
    seen = {n: torch.tensor(c) for n, c in request(5, 0).steps.items() if n != "sample"}
    noise = torch.tensor(policy.draw_noise(np.random.default_rng(0), 5))
    assert noise.shape == (5, 5, 4, 3)
    other = noise.clone()
    other[:, 0, 3] += 1
    with torch.no_grad():
        one, two = (policy.act(seen, drawn, 1.0)["action"] for drawn in (noise, other))
    assert one.shape == (5, 2, 3)
    assert ((one - two).abs() > 1e-6).any()


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


def test_imitation_makes_it_do_what_was_shown(tmp_path: Path) -> None:
    """One action for an instruction, another for the other one."""
    config = WallOSSConfig(**SIZES)
    WallOSSPolicy.create(config, SPEC, 0, tmp_path)
    policy = WallOSSPolicy.load(tmp_path, config)
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
