"""Folders of WALL-OSS: those of LeRobot and original ones, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf.errors import ConfigError, DataError
from rlinf.models.checkpoint_tensors import network_shapes
from rlinf.models.flow_vla import HEADS_FILE
from rlinf.models.wall_oss import WallOSSPolicy
from rlinf.models.wall_oss_folder import PUBLISHED_NETWORK, WallOSSConfig, network_tensors
from rlinf.models.wall_oss_network import WallModel
from tests.rlinf.models import acting
from tests.rlinf.models.acting import SPEC as TWO_CAMERAS
from tests.rlinf.models.pi0_folders import CAMERAS, SPEC, statistics
from tests.rlinf.models.test_pi0_folder import acted, expanded
from tests.rlinf.models.test_wall_oss import made
from tests.rlinf.models.wall_oss_folders import SIZES, start, to_original, write_folder

MANIFEST = Path(__file__).with_name("wall_oss_tensors.json")


def test_the_published_size_has_exactly_the_published_tensors() -> None:
    """Those of the original folder, whose head is tied and whose normalizers are statistics."""
    stored = dict(expanded(json.loads(MANIFEST.read_text())))
    with torch.device("meta"):
        shapes, _ = network_shapes(WallModel(PUBLISHED_NETWORK))
    wanted = network_tensors(stored, is_tied=True)
    assert wanted == {f"model.{name}": shape for name, shape in shapes.items()}
    assert sum(map(math.prod, wanted.values())) == pytest.approx(4.22e9, rel=2e-3)


def test_an_original_folder_acts_as_that_of_lerobot(tmp_path: Path) -> None:
    """With the statistics of its normalizer, and other names of its tensors."""
    write_folder(tmp_path / "source")
    to_original(tmp_path / "source", tmp_path / "original", ("lab", "kitchen"))
    options: dict[str, Any] = {"chunk_size": 4, "denoising_steps": 5}
    policy = start(tmp_path / "found", tmp_path / "original", normalizer="lab", **options)
    known = start(tmp_path / "known", tmp_path / "source", **options)
    state, found = known.module.state_dict(), policy.module.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in state.items())
    stored = load_file(tmp_path / "original" / "model.safetensors")
    low, delta = (
        stored[f"action_preprocessor.normalizer_propri.{name}.lab"][:4] for name in ("min", "delta")
    )
    ends = policy.scale_state(torch.stack([low, low + delta]))[:, :4]
    torch.testing.assert_close(ends, torch.tensor([[-1.0], [1.0]]).expand(-1, 4))
    low, delta = (
        stored[f"action_preprocessor.normalizer_action.{name}.lab"][:3] for name in ("min", "delta")
    )
    middle = policy.to_actions(torch.zeros(1, 32, 20), torch.zeros(1, 4))
    torch.testing.assert_close(middle[0, 0], low + delta / 2)
    assert middle.shape == (1, 4, 3)
    assert acted(policy).shape == acted(known).shape


def test_statistics_of_a_data_set_replace_a_normalizer(tmp_path: Path) -> None:
    write_folder(tmp_path / "source")
    to_original(tmp_path / "source", tmp_path / "original", ("lab", "kitchen"))
    (tmp_path / "stats.json").write_text(json.dumps(statistics()))
    options: dict[str, Any] = {"chunk_size": 4, "norm_stats": tmp_path / "stats.json"}
    policy = start(tmp_path / "found", tmp_path / "original", **options)
    known = start(tmp_path / "known", tmp_path / "source", chunk_size=4)
    seen = torch.randn(2, 4)
    torch.testing.assert_close(policy.scale_state(seen), known.scale_state(seen))


@pytest.mark.parametrize("layout", ["both copies", "only the head", "a text_config", "more tokens"])
def test_layouts_of_names_and_settings_are_read(tmp_path: Path, layout: str) -> None:
    write_folder(tmp_path / "source")
    known = start(tmp_path / "known", tmp_path / "source").module.state_dict()
    path, settings = (
        tmp_path / "source" / "model.safetensors",
        tmp_path / "source" / "vlm" / "config.json",
    )
    stored, values = load_file(path), json.loads(settings.read_text())
    embeddings = stored["model.model.embed_tokens.weight"]
    if layout == "a text_config":
        names = ("hidden_size", "num_hidden_layers", "vocab_size", "experts", "rope_scaling")
        values["text_config"] = {name: values.pop(name) for name in names}
    elif layout == "more tokens":
        # As the original code does, which does not write the number.
        values["vocab_size"] -= 100
    else:
        stored["model.lm_head.weight"] = embeddings.clone()
        if layout == "only the head":
            stored.pop("model.model.embed_tokens.weight")
    settings.write_text(json.dumps(values))
    save_file(stored, path)
    found = start(tmp_path / "found", tmp_path / "source").module.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in known.items())


def test_a_head_that_is_not_tied_is_kept(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", tie_word_embeddings=False)
    path = tmp_path / "source" / "model.safetensors"
    stored = load_file(path)
    with pytest.raises(DataError, match=r"missing: lm_head\.weight"):
        start(tmp_path / "none", tmp_path / "source")
    head = torch.randn_like(stored["model.model.embed_tokens.weight"])
    save_file({**stored, "model.lm_head.weight": head}, path)
    policy = start(tmp_path / "found", tmp_path / "source")
    assert torch.equal(policy.module.state_dict()["model.lm_head.weight"], head)


def test_a_saved_folder_is_a_start_for_another_run(tmp_path: Path) -> None:
    first = made(tmp_path / "trained", noise_method="learned")
    heads = {name.split(".")[0] for name in load_file(tmp_path / "trained" / HEADS_FILE)}
    assert heads == {"value_head", "noise_head"}
    (tmp_path / "copy").mkdir()
    config = WallOSSConfig(path=tmp_path / "trained", denoising_steps=7, noise_method="learned")
    WallOSSPolicy.create(config, TWO_CAMERAS, 5, tmp_path / "copy")
    loaded = WallOSSPolicy.load(tmp_path / "copy", config)
    assert loaded.num_denoising_steps == 7
    state = loaded.module.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in first.module.state_dict().items())


def test_a_folder_that_values_chunks_is_a_start_for_one_that_values_actions(tmp_path: Path) -> None:
    state = made(tmp_path / "one").module.state_dict()
    acting.assert_values_begin_anew(WallOSSPolicy, tmp_path, state)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({}, {"images": {}}, r"task\.images: model\.name=wall_oss reads images"),
        ({}, {"action": {"kind": "discrete", "size": 3}}, r"model\.name: wall_oss .*discrete"),
        ({"proprio_dim": 5}, {}, r"model\.proprio_dim: 5 numbers, and the state has 4"),
    ],
)
def test_a_task_that_does_not_fit_is_refused(
    options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    config = WallOSSConfig(**{**SIZES, **options})
    with pytest.raises(ConfigError, match=message):
        WallOSSPolicy.check_spec(config, {**SPEC, **changes})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 40, "heads": 8}, "heads: 40 / 8 heads is not an even number"),
        ({"vision_hidden": 20, "vision_heads": 2}, "vision_heads: .* multiple of 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WallOSSConfig(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "pi05"}, r"of the type 'pi05'; model\.name=wall_oss takes original .*'wall_x'"),
        ({"prediction_mode": "fast"}, r"config\.json: prediction_mode is fast"),
        ({"output_features": {}}, r"no output_features"),
        ({"max_action_dim": 18}, r"dof_config has 20 components, and max_action_dim .* is 18"),
    ],
)
def test_a_folder_of_another_kind_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_folder(tmp_path / "source", changes)
    with pytest.raises(DataError, match=message):
        start(tmp_path / "policy", tmp_path / "source")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": None}, r"vlm/config\.json \('qwen2_5_vl'\) has no experts"),
        ({"dof_config": {"arm": "7"}}, r"dof_config must map names to numbers .*'7'"),
        ({"dof_config": {"arm": 7}}, r"dof_config has 7 components, and max_action_dim .* is 20"),
        ({"agent_pos_config": {"arm": 7}}, r"agent_pos_config has 7 components, .* is 20"),
        ({"dim_inputs": [48]}, r"experts have the widths \[48, 48\], and dim_inputs are \[48\]"),
        ({"attention_moe": True}, r"attention_moe is True; .* supports False"),
        ({"mlp_moe": False}, r"mlp_moe is False; .* supports True"),
        ({"hidden_size": 40}, r"the weights are not those .*\n.*of another shape: "),
    ],
)
def test_a_network_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_folder(tmp_path / "source", **changes)
    with pytest.raises(DataError, match=message):
        start(tmp_path / "policy", tmp_path / "source")


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def without_token(folder: Path) -> None:
    path = folder / "vlm" / "tokenizer.json"
    path.write_text(path.read_text().replace("<|propri|>", "<|other|>"))


def with_other_tensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    stored = load_file(path)
    stored["model.adapter.weight"] = stored.pop("model.action_preprocessor.w3.weight")
    save_file(stored, path)


def without_network(folder: Path) -> None:
    (folder / "vlm").rename(folder / "other")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("vlm/tokenizer.json"), r"vlm has no tokenizer\.json; copy it from x-square"),
        (without("vlm/preprocessor_config.json"), r"vlm has no preprocessor_config\.json"),
        (without("policy_postprocessor.json"), r"policy_postprocessor\.json, .*normalization"),
        (without_token, r"tokenizer\.json has no token <\|propri\|>; take the tokenizer of"),
        (with_other_tensors, r"missing: action_preprocessor\.w3\.weight\nnot .*: adapter\.weight"),
        (without_network, r"model\.vlm_path: .*no folder 'vlm'; .*config\.json"),
    ],
)
def test_files_tokens_and_tensors_that_are_not_there_are_named(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    write_folder(tmp_path / "source")
    spoil(tmp_path / "source")
    with pytest.raises(DataError, match=message):
        WallOSSPolicy.check_spec(WallOSSConfig(path=tmp_path / "source", camera_map=CAMERAS), SPEC)


def test_the_normalizer_of_an_original_folder_is_chosen(tmp_path: Path) -> None:
    write_folder(tmp_path / "source")
    to_original(tmp_path / "source", tmp_path / "original", ("lab", "kitchen"))
    with pytest.raises(ConfigError, match=r"model\.normalizer: is not set; .*kitchen, lab"):
        start(tmp_path / "one", tmp_path / "original")
    with pytest.raises(ConfigError, match=r"model\.normalizer: 'garden' is unknown"):
        start(tmp_path / "two", tmp_path / "original", normalizer="garden")
    path = tmp_path / "original" / "model.safetensors"
    stored = load_file(path)
    stored.pop("action_preprocessor.normalizer_propri.delta.lab")
    save_file(stored, path)
    with pytest.raises(DataError, match=r"no tensor .*normalizer_propri\.delta\.lab"):
        start(tmp_path / "three", tmp_path / "original", normalizer="lab")
    save_file({name: t for name, t in stored.items() if "normalizer" not in name}, path)
    with pytest.raises(DataError, match=r"no tensors .*normalizer_action\.min\.NAME"):
        start(tmp_path / "four", tmp_path / "original")


def test_the_sums_of_normalizers_are_exact(tmp_path: Path) -> None:
    write_folder(tmp_path / "source")
    to_original(tmp_path / "source", tmp_path / "original")
    policy = start(tmp_path / "policy", tmp_path / "original")
    known = load_file(tmp_path / "original" / "model.safetensors")
    low = known["action_preprocessor.normalizer_action.min.lab"][:3].numpy()
    first = policy.to_actions(-torch.ones(1, 32, 20), torch.zeros(1, 4))[0, 0].numpy()
    np.testing.assert_allclose(first, low, atol=1e-6)
