"""The policy that acts by tokens: what it sees, what it samples, what its folder holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, DataError
from rlinf.models.action_encoding import STATISTICS_FILE
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
        ({}, {"images": {"a": [16, 16], "b": [16, 24]}}, r"task\.images\.b: 16 x 24"),
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
