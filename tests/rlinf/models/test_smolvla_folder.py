"""The folder of the policy that denoises chunks: what it holds, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf.errors import ConfigError, DataError
from rlinf.models.flow_vla import HEADS_FILE
from rlinf.models.smolvla import SmolVLAPolicy
from rlinf.models.smolvla_folder import SmolVLAConfig
from tests.rlinf.models import acting
from tests.rlinf.models.acting import SPEC
from tests.rlinf.models.test_smolvla import SIZES, made, rolled_out


def test_a_folder_is_lerobots_with_the_heads_apart(tmp_path: Path) -> None:
    policy = made(tmp_path, noise_method="learned")
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["type"] == "smolvla"
    assert settings["input_features"]["observation.images.wrist"]["shape"] == [3, 16, 24]
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[0] for name in tensors} == {"model"}
    assert {n.split(".")[0] for n in load_file(tmp_path / HEADS_FILE)} == {
        "value_head",
        "noise_head",
    }
    (tmp_path / HEADS_FILE).unlink()
    again = SmolVLAPolicy.load(tmp_path, SmolVLAConfig(noise_method="learned"))
    batch = policy.collate(rolled_out(tmp_path, noise_method="learned"))
    outputs = again.evaluate(batch, 1.0)
    assert outputs.values is not None
    assert not outputs.values.any(), "a value head begins anew, at zero"
    kept = {n: t for n, t in again.module.state_dict().items() if n.startswith("model.")}
    assert all(torch.equal(t, tensors[n]) for n, t in kept.items())


def test_a_folder_is_a_start_for_another_run(tmp_path: Path) -> None:
    first = made(tmp_path / "trained")
    (tmp_path / "copy").mkdir()
    config = SmolVLAConfig(path=tmp_path / "trained", denoising_steps=7)
    SmolVLAPolicy.create(config, SPEC, 5, tmp_path / "copy")
    loaded = SmolVLAPolicy.load(tmp_path / "copy", config)
    assert loaded.num_denoising_steps == 7
    state = loaded.module.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in first.module.state_dict().items())


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({}, {"images": {}}, r"task\.images: .*reads images"),
        ({}, {"action": {"kind": "discrete", "size": 3}}, r"model\.name: .*discrete"),
        ({"patch_size": 5}, {}, r"model\.image_size: .*24 x 24.*2 x 2 patches of 5"),
        ({"proprio_dim": 6}, {}, r"model\.proprio_dim: 6 numbers.*5"),
        ({"camera_map": {"top": "front"}}, {}, r"model\.camera_map: top is none.*front, wrist"),
    ],
)
def test_what_cannot_work_is_refused(
    options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SmolVLAPolicy.check_spec(SmolVLAConfig(**{**SIZES, **options}), {**SPEC, **changes})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, r"heads: 32 is no multiple of 5"),
        ({"heads": 4, "kv_heads": 3}, r"kv_heads: 4 is no multiple of 3"),
        ({"heads": 32}, r"heads: .*1 numbers.*even"),
        (
            {"expert_width_multiplier": 0.78125},
            r"expert_width_multiplier: a width of 25 is not even",
        ),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SmolVLAConfig(**{**SIZES, **options})


def test_a_folder_for_another_task_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    config = SmolVLAConfig(path=tmp_path)
    with pytest.raises(ConfigError, match=r"task\.action\.size: 2.* 3 numbers"):
        SmolVLAPolicy.check_spec(config, {**SPEC, "action": {"kind": "box", "size": 2}})
    top = {**SPEC, "images": {"top": [16, 24]}}
    with pytest.raises(ConfigError, match=r"the model sees front, wrist.*model\.camera_map"):
        SmolVLAPolicy.check_spec(config, top)
    SmolVLAPolicy.check_spec(SmolVLAConfig(path=tmp_path, camera_map={"wrist": "top"}), top)
    with pytest.raises(ConfigError, match=r"model\.camera_map: the task shows no side, only top"):
        SmolVLAPolicy.check_spec(SmolVLAConfig(path=tmp_path, camera_map={"wrist": "side"}), top)
    with pytest.raises(ConfigError, match=r"model\.chunk_size: 9, .*4"):
        SmolVLAPolicy.check_spec(SmolVLAConfig(path=tmp_path, chunk_size=9), SPEC)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "act"}, r"model\.path: .*'act'.*'smolvla'"),
        ({"add_image_special_tokens": True}, r"add_image_special_tokens is True"),
        ({"num_expert_layers": 1}, r"num_expert_layers is 1"),
        ({"output_features": {}}, r"no output_features"),
        ({"normalization_mapping": {"VISUAL": "MEAN_STD"}}, r"normalization_mapping is .*MEAN_STD"),
        ({"max_state_dim": 9}, r"of another shape: model\.state_proj"),
    ],
)
def test_a_folder_of_another_kind_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    made(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(DataError, match=message):
        SmolVLAPolicy.load(tmp_path, SmolVLAConfig())


def test_a_folder_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    config = SmolVLAConfig(path=tmp_path)
    shutil.move(tmp_path / "vlm", tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"model\.vlm_path: .*tokenizer\.json of vlm"):
        SmolVLAPolicy.check_spec(config, SPEC)
    SmolVLAPolicy.check_spec(SmolVLAConfig(path=tmp_path, vlm_path=tmp_path / "elsewhere"), SPEC)
    (tmp_path / "elsewhere" / "tokenizer.json").rename(tmp_path / "words.json")
    with pytest.raises(DataError, match=r"model\.vlm_path: .*no tokenizer\.json"):
        SmolVLAPolicy.check_spec(
            SmolVLAConfig(path=tmp_path, vlm_path=tmp_path / "elsewhere"), SPEC
        )
    (tmp_path / "words.json").rename(tmp_path / "elsewhere" / "tokenizer.json")
    shutil.move(tmp_path / "elsewhere", tmp_path / "vlm")
    (tmp_path / "model.safetensors").rename(tmp_path / "other")
    with pytest.raises(DataError, match=r"has no model\.safetensors"):
        SmolVLAPolicy.check_spec(config, SPEC)
    (tmp_path / "other").rename(tmp_path / "model.safetensors")
    (tmp_path / "policy_postprocessor.json").unlink()
    with pytest.raises(DataError, match=r"policy_postprocessor\.json.*LeRobot before 0\.4"):
        SmolVLAPolicy.check_spec(config, SPEC)


def test_statistics_that_scale_nothing_are_refused_at_the_door(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    path.write_text(json.dumps({n: {"mean": [0, 0, 0]} for n in ("action", "observation.state")}))
    with pytest.raises(DataError, match=r"model\.norm_stats: .*observation\.state: no std"):
        SmolVLAPolicy.check_spec(SmolVLAConfig(**SIZES, norm_stats=path), SPEC)


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "vlm" / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"model\.path: .*tokenizer\.json is no tokenizer"):
        SmolVLAPolicy.load(tmp_path, SmolVLAConfig())


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in tensors:
        if "embed_tokens" in name or "lm_head" in name:
            tensors[name] = tensors[name][:50].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    path = tmp_path / "vlm" / "config.json"
    vlm = json.loads(path.read_text())
    vlm["text_config"]["vocab_size"] = 50
    path.write_text(json.dumps(vlm))
    with pytest.raises(DataError, match=r"tokens and the model 50; they do not belong together"):
        SmolVLAPolicy.load(tmp_path, SmolVLAConfig())


def test_a_folder_that_values_chunks_is_a_start_for_one_that_values_actions(tmp_path: Path) -> None:
    state = made(tmp_path / "one").module.state_dict()
    acting.assert_values_begin_anew(SmolVLAPolicy, tmp_path, state)
