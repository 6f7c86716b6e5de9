"""The policy that acts by tokens: what it sees, what it samples, what its folder holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf.data.episodes import INSTRUCTION_COLUMN
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, DataError
from rlinf.models.action_encoding import STATISTICS_FILE
from rlinf.models.image_resampling import ImageResampler
from rlinf.models.openvla import OpenVLAOFTPolicy
from rlinf.models.openvla_folder import OpenVLAOFTConfig
from rlinf.trainers.fsdp import FSDPTrainer
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
    "chunk_size": 4,
    "proprio_dim": 2,
}


def made(folder: Path, **options: Any) -> OpenVLAOFTPolicy:
    config = OpenVLAOFTConfig(**SIZES, **options)
    folder.mkdir(exist_ok=True)
    first = folder / "first"
    first.mkdir()
    OpenVLAOFTPolicy.create(config, SPEC, 0, first)
    policy = OpenVLAOFTPolicy.load(first, config)
    stirred(policy)
    policy.save(folder, policy.module.state_dict())
    return policy


def rolled_out(folder: Path, temperature: float = 1.0) -> list[Trajectory]:
    return acting.rolled_out(OpenVLAOFTPolicy, OpenVLAOFTConfig(**SIZES), folder, temperature)


def trainer(folder: Path) -> FSDPTrainer:
    return acting.trainer(OpenVLAOFTPolicy, OpenVLAOFTConfig(**SIZES), folder)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_the_trainer_recomputes_the_log_probabilities_of_what_was_sampled(
    tmp_path: Path, temperature: float
) -> None:
    """Row by row, whatever the lengths of the prompts beside it."""
    made(tmp_path)
    records = rolled_out(tmp_path, temperature)
    assert records[0].logprobs.shape == (3, 4, 3)
    learns = trainer(tmp_path)
    acting.assert_recomputed(learns, records, temperature)
    learns.close()


def test_a_value_for_each_action_is_recomputed_and_learned_from(tmp_path: Path) -> None:
    made(tmp_path, value_level="action")
    acting.assert_values_of_actions(
        OpenVLAOFTPolicy, OpenVLAOFTConfig(**SIZES, value_level="action"), tmp_path
    )


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_a_first_update_has_ratios_of_one_and_a_gradient(tmp_path: Path, level: Any) -> None:
    made(tmp_path)
    records = rolled_out(tmp_path)
    acting.assert_first_update(trainer(tmp_path), records, level)


def test_tokens_are_drawn_as_often_as_the_network_says(tmp_path: Path) -> None:
    policy = made(tmp_path, n_action_bins=8)
    one = request(1, 0).steps
    count = 4000
    seen = {n: torch.tensor(c).expand(count, *c.shape[1:]) for n, c in one.items()}
    noise = torch.tensor(policy.draw_noise(np.random.default_rng(0), count))
    with torch.no_grad():
        found = policy.act(seen, noise, 0.7)
    place = found["tokens"][:, 1, 2] - policy.module.first_action_token_id
    share = torch.bincount(place, minlength=8) / count
    claimed = torch.zeros(8)
    claimed[place] = found["logprob"][:, 1, 2].exp()
    assert (share > 0).sum() > 3
    assert torch.allclose(share, claimed, atol=4 * 0.5 / count**0.5)


def test_everything_that_is_shown_matters_at_its_own_step_alone(tmp_path: Path) -> None:
    policy = made(tmp_path)
    batch = policy.collate(rolled_out(tmp_path))
    with torch.no_grad():
        before = policy.evaluate(batch, 1.0).logprobs
        for name in ("images.front", "images.wrist", "state", "prompt"):
            changed = {**batch, name: batch[name].clone()}
            changed[name][1, 2] = batch[name][2, 1] if name == "prompt" else 3
            after = policy.evaluate(changed, 1.0).logprobs
            moved = (after != before).flatten(2).any(-1).nonzero().tolist()
            assert moved == [[1, 2]], name


def test_a_place_has_the_probabilities_of_the_tokens_of_actions_alone(tmp_path: Path) -> None:
    policy = made(tmp_path, n_action_bins=8)
    record = rolled_out(tmp_path)[0]
    total = torch.zeros(3, 4, 3)
    with torch.no_grad():
        first = policy.module.first_action_token_id
        for token in range(first, first + 8):
            record.policy_columns["tokens"] = np.full((3, 4, 3), token)
            outputs = policy.evaluate(policy.collate([record]), 1.0, entropy=True)
            total += outputs.logprobs[0].exp()
    assert torch.allclose(total, torch.ones_like(total), atol=1e-5)
    assert outputs.entropy is not None
    assert (outputs.entropy <= np.log(8)).all()


def test_a_demonstration_is_learned_as_the_chunks_that_begin_at_its_steps(tmp_path: Path) -> None:
    policy = made(tmp_path)
    actions = np.random.default_rng(0).uniform(-1, 1, (6, 3)).astype(np.float32)
    found = (
        policy.prepare_demonstration(Trajectory(identity=RecordId(0, 0), actions=actions))
        .to_record()
        .steps
    )
    for t in range(6):
        for k in range(4):
            assert (found["submask"][t, k] == (t + k < 6)).all()
            if t + k < 6:
                np.testing.assert_array_equal(
                    found["tokens"][t, k], policy.bins.encode(actions[t + k])
                )


def test_a_folder_holds_what_the_format_says_and_begins_what_it_lacks(tmp_path: Path) -> None:
    policy = made(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    statistics = json.loads((tmp_path / STATISTICS_FILE).read_text())
    assert settings["model_type"] == "openvla"
    assert statistics[settings["unnorm_key"]]["action"]["q99"] == [1.0, 1.0, 1.0]
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[0] for name in tensors} >= {
        *("vision_backbone", "projector", "language_model", "value_head", "proprio_projector")
    }
    save_file(
        {n: t for n, t in tensors.items() if not n.startswith("value_head")},
        tmp_path / "model.safetensors",
    )
    again = OpenVLAOFTPolicy.load(tmp_path, OpenVLAOFTConfig())
    batch = policy.collate(rolled_out(tmp_path))
    with torch.no_grad():
        one, other = policy.evaluate(batch, 1.0), again.evaluate(batch, 1.0)
    assert torch.equal(one.logprobs, other.logprobs)
    assert other.values is not None
    assert not other.values.any()


def test_a_folder_is_a_start_for_another_run(tmp_path: Path) -> None:
    first = made(tmp_path / "trained")
    copy = tmp_path / "copy"
    copy.mkdir()
    config = OpenVLAOFTConfig(path=tmp_path / "trained")
    OpenVLAOFTPolicy.create(config, SPEC, 5, copy)
    loaded = OpenVLAOFTPolicy.load(copy, config).module.state_dict()
    assert all(torch.equal(t, loaded[n]) for n, t in first.module.state_dict().items())


def test_a_folder_that_lacks_a_tensor_is_refused_before_a_run(tmp_path: Path) -> None:
    made(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["projector.fc2.bias"], tensors["places"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"model\.safetensors: .*\nmissing: projector\.fc2\.bias\n"):
        OpenVLAOFTPolicy.check_spec(OpenVLAOFTConfig(path=tmp_path), SPEC)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({}, {"images": {}}, r"task\.images: .*reads images"),
        ({}, {"action": {"kind": "discrete", "size": 3}}, r"model\.name: .*discrete"),
        ({"patch_size": 5}, {}, r"model\.patch_size: images of 16 x 24"),
        ({"heads": 5}, {}, r"model\.heads: "),
        ({"proprio_dim": 6}, {}, r"model\.proprio_dim: 6 numbers.*5"),
    ],
)
def test_what_cannot_work_is_refused(
    options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenVLAOFTPolicy.check_spec(OpenVLAOFTConfig(**{**SIZES, **options}), {**SPEC, **changes})


def test_a_folder_for_another_task_or_model_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    config = OpenVLAOFTConfig(path=tmp_path)
    with pytest.raises(ConfigError, match=r"task\.action\.size: 2.* 3 numbers"):
        OpenVLAOFTPolicy.check_spec(config, {**SPEC, "action": {"kind": "box", "size": 2}})
    with pytest.raises(ConfigError, match=r"task\.images: the model sees front, wrist"):
        OpenVLAOFTPolicy.check_spec(config, {**SPEC, "images": {"top": [16, 24]}})
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match=r"vision_config.*two vision towers"):
        OpenVLAOFTPolicy.check_spec(config, SPEC)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(DataError, match=r"model\.path: .*'llama'"):
        OpenVLAOFTPolicy.check_spec(config, SPEC)


def test_a_folder_that_values_chunks_is_a_start_for_one_that_values_actions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = made(tmp_path / "one").module.state_dict()
    acting.assert_values_begin_anew(OpenVLAOFTPolicy, tmp_path, state)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, "each time that it began anew"
    assert "has 1 outputs, and 4 are needed (model.value_level" in messages[0]


def test_images_of_another_size_are_resized(tmp_path: Path) -> None:
    policy = made(tmp_path)
    spec = {**SPEC, "images": {"front": [32, 48], "wrist": [16, 24]}}
    OpenVLAOFTPolicy.check_spec(OpenVLAOFTConfig(path=tmp_path), spec)
    seen = {n: torch.tensor(c) for n, c in request(2, 0).steps.items()}
    larger = dict(seen)
    front = seen["images.front"]
    larger["images.front"] = front.repeat_interleave(2, 1).repeat_interleave(2, 2)
    with torch.no_grad():
        one, other = policy.act(seen, None, 1.0), policy.act(larger, None, 1.0)
    assert one["logprob"].shape == other["logprob"].shape
    assert torch.isfinite(other["logprob"]).all()


def test_a_center_crop_is_applied_to_each_camera(tmp_path: Path) -> None:
    policy = made(tmp_path)
    folder = tmp_path / "cropped"
    folder.mkdir()
    config = OpenVLAOFTConfig(path=tmp_path, center_crop=True)
    OpenVLAOFTPolicy.create(config, SPEC, 0, folder)
    cropping = OpenVLAOFTPolicy.load(folder, config)
    seen = {n: torch.tensor(c) for n, c in request(2, 0).steps.items()}
    crop = ImageResampler((16, 24), center_crop=True)
    images = {n: crop(c) for n, c in seen.items() if n.startswith("images.")}
    with torch.no_grad():
        found, plain = cropping.act(seen, None, 1.0), policy.act(seen, None, 1.0)
        wanted = policy.act({**seen, **images}, None, 1.0)
    assert torch.equal(found["logprob"], wanted["logprob"])
    assert not torch.equal(found["logprob"], plain["logprob"])


def test_weights_are_in_memory_as_dtype_says(tmp_path: Path) -> None:
    made(tmp_path)
    policy = OpenVLAOFTPolicy.load(tmp_path, OpenVLAOFTConfig(**SIZES, dtype="bfloat16"))
    assert {p.dtype for p in policy.module.parameters()} == {torch.bfloat16}
    seen = {n: torch.tensor(c) for n, c in request(2, 0).steps.items()}
    with torch.no_grad():
        found = policy.act(seen, None, 1.0)
    assert found["action"].dtype == found["logprob"].dtype == found["value"].dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"use_film": True}], ids=["plain", "film"])
def test_a_regression_head_learns_the_expert_by_the_l1_loss(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    policy = made(tmp_path, action_head="l1", **options)
    expert = np.random.default_rng(0).uniform(-1, 1, (3, 3)).astype(np.float32)
    demonstrations = []
    for row in range(2):
        columns = request(3, 0, seed=row).steps
        demonstrations.append(
            policy.prepare_demonstration(
                Trajectory(
                    identity=RecordId(0, row),
                    observations=columns["observation"],
                    actions=expert,
                    images={c: columns[f"images.{c}"] for c in ("front", "wrist")},
                    instruction=columns[INSTRUCTION_COLUMN],
                )
            )
        )
    batch = policy.collate(demonstrations)
    outputs = policy.evaluate(batch, 1.0, entropy=True)
    seen = {n: torch.tensor(c) for n, c in request(3, 0, seed=0).steps.items()}
    with torch.no_grad():
        acted = policy.act(seen, torch.zeros(3, 4, 3), 1.0)
    # The bounds of the task are -1 and 1, so actions are not scaled.
    errors = (acted["action"] - torch.tensor(demonstrations[0].actions)).abs()
    assert torch.allclose(outputs.logprobs[0], -errors, atol=1e-5)
    assert outputs.entropy is None
    assert not acted["logprob"].any()
    assert "tokens" not in acted
    optimizer = torch.optim.Adam(policy.module.parameters(), 3e-3)
    losses = []
    for _ in range(15):
        loss = -policy.evaluate(batch, 1.0).logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    unused = [n for n, p in policy.module.named_parameters() if p.grad is None]
    assert all(name.startswith("value_head.") for name in unused)


def test_a_new_policy_may_have_the_gripper_of_openvla(tmp_path: Path) -> None:
    policy = made(tmp_path, gripper="openvla")
    seen = {n: torch.tensor(c) for n, c in request(8, 0).steps.items()}
    noise = torch.tensor(policy.draw_noise(np.random.default_rng(0), 8))
    with torch.no_grad():
        found = policy.act(seen, noise, 1.0)["action"]
    assert set(found[..., 2].unique().tolist()) == {-1.0, 1.0}
    assert len(found[..., :2].unique()) > 2
