"""Folders of GR00T N1.5 and N1.7: what is read, and what is refused."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf.errors import ConfigError, DataError
from rlinf.models.checkpoint_tensors import network_shapes
from rlinf.models.gr00t import Gr00tPolicy, network_names
from rlinf.models.gr00t_folder import IMAGE_TOKENS, Gr00tConfig, head_sizes, prompt_ends
from rlinf.models.gr00t_network import Gr00tModel, Qwen3VLBackbone
from rlinf.models.loading import meta_parameters
from tests.rlinf.models import acting
from tests.rlinf.models.acting import SPEC as TWO_CAMERAS
from tests.rlinf.models.gr00t_folders import CAMERAS, SPEC, TAGS, VERSIONS, start, write_folder
from tests.rlinf.models.test_gr00t import made
from tests.rlinf.models.test_pi0_folder import expanded

MANIFEST = json.loads(Path(__file__).with_name("gr00t_tensors.json").read_text())
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_published_size_has_exactly_the_published_tensors(version: str) -> None:
    facts = MANIFEST[version]
    stored = dict(expanded(facts["tensors"]))
    settings = {**facts["config"], "image_resolution": [256, 256]}
    with meta_parameters():
        model = Gr00tModel(settings, facts["vlm"], head_sizes(settings))
    shapes, _ = network_shapes(model)
    assert stored == shapes
    published = stored | {name: tuple(shape) for name, shape in facts["unused"].items()}
    assert network_names(published) == {name: name for name in stored}
    total = sum(math.prod(shape) for shape in stored.values())
    assert 2.3e9 < total < 3.4e9


@pytest.mark.parametrize("version", VERSIONS)
def test_token_embeddings_may_have_the_name_of_the_head(version: str) -> None:
    facts = MANIFEST[version]
    stored = {name: None for name, _ in expanded(facts["tensors"])}
    (embeddings,) = (name for name in stored if name.endswith("embed_tokens.weight"))
    (head,) = (name for name in facts["unused"] if name.endswith("lm_head.weight"))
    renamed = {head if name == embeddings else name: None for name in stored}
    found = network_names(renamed)
    assert found[head] == embeddings
    assert set(found.values()) == stored.keys()


def acted(policy: Any) -> Tensor:
    random = np.random.default_rng(0)
    seen = {
        "observation": random.normal(size=(2, 5)).astype(np.float32),
        "instruction": np.frombuffer(b"reachpush ", np.uint8).reshape(2, 5).copy(),
        "images.front": random.integers(0, 256, (2, 40, 40, 3), np.uint8),
        "images.wrist": random.integers(0, 256, (2, 28, 28, 3), np.uint8),
    }
    noise = torch.tensor(policy.draw_noise(random, 2))
    columns = {name: torch.tensor(column) for name, column in seen.items()}
    with torch.no_grad():
        found: Tensor = policy.act(columns, noise, 1.0)["action"]
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_a_published_folder_is_a_start_and_what_is_saved_too(tmp_path: Path, version: str) -> None:
    write_folder(tmp_path / "source", version)
    policy = start(tmp_path / "policy", tmp_path / "source", version)
    # N1.7 executes as many actions as its embodiment has, and denoises all.
    assert policy.action_shape == ((6 if version == "n1.5" else 5), 3)
    assert policy.draw_noise(np.random.default_rng(0), 1).shape == (1, 6, 6, 5)
    stored: dict[str, Tensor] = {}
    for name in SHARDS:
        stored |= load_file(tmp_path / "source" / name)
    (tmp_path / "saved").mkdir()
    policy.save(tmp_path / "saved", policy.module.state_dict())
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in stored.items())
    again = start(tmp_path / "again", tmp_path / "saved", version, vlm_path=None)
    torch.testing.assert_close(acted(again), acted(policy))
    other = start(tmp_path / "other", tmp_path / "source", version, embodiment="new_embodiment")
    assert not torch.allclose(acted(other), acted(policy), atol=1e-2)


@pytest.mark.parametrize("version", VERSIONS)
def test_states_and_actions_are_scaled_by_the_statistics(tmp_path: Path, version: str) -> None:
    write_folder(tmp_path / "source", version)
    policy = start(tmp_path / "policy", tmp_path / "source", version)
    path = tmp_path / "source" / "experiment_cfg/metadata.json"
    names = ("min", "max")
    if version == "n1.7":
        path, names = tmp_path / "source" / "statistics.json", ("q01", "q99")
    entry = json.loads(path.read_text())[TAGS[version]]
    groups = entry.get("statistics", entry)
    low, high = (
        torch.tensor([*groups["state"]["arm"][name], *groups["state"]["gripper"][name]])
        for name in names
    )
    scaled = policy.scale_state(torch.stack([low, high, (low + high) / 2, high + 9]))
    wanted = torch.tensor([-1.0, 1.0, 0.0])[:, None].expand(3, 4)
    torch.testing.assert_close(scaled[:3, :4], wanted, atol=1e-6, rtol=0)
    assert not scaled[:, 4:].any()
    assert (scaled[3, :4] == 1).all() == (version == "n1.7"), "N1.7 clips"
    low = torch.tensor([*groups["action"]["arm"][names[0]], *groups["action"]["gripper"][names[0]]])
    points = torch.full((1, 6, 5), -1.0)
    torch.testing.assert_close(policy.to_actions(points, torch.zeros(1, 5))[0, 0], low)


def test_a_constant_component_of_the_state_becomes_zero(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", "n1.5")
    path = tmp_path / "source" / "experiment_cfg/metadata.json"
    metadata = json.loads(path.read_text())
    metadata["gr1"]["statistics"]["state"]["gripper"] |= {"min": [3.0], "max": [3.0]}
    path.write_text(json.dumps(metadata))
    policy = start(tmp_path / "policy", tmp_path / "source", "n1.5")
    assert policy.scale_state(torch.full((1, 5), 3.0))[0, 3] == 0


def prompt_text(policy: Gr00tPolicy, folder: Path, text: str) -> str:
    from rlinf.envs.observations import encode_instruction
    from rlinf.models.character_tokenizer import read_tokenizer

    tokens, mask = policy.tokenize_prompts(encode_instruction(text)[None, None], torch.zeros(0))
    assert mask.all()
    tokenizer = read_tokenizer(folder / "vlm")
    decoded: str = tokenizer.decode(tokens[0, 0].tolist(), skip_special_tokens=False)
    return decoded


def test_prompts_have_the_published_forms(tmp_path: Path) -> None:
    write_folder(tmp_path / "a" / "n15", "n1.5")
    write_folder(tmp_path / "b" / "n17", "n1.7")
    image = "<IMG_CONTEXT>" * 16
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    images = f"<image 1><img>{image}</img><image 2><img>{image}</img>"
    options = {"prompt": "['{instruction}']"}
    policy = start(tmp_path / "one", tmp_path / "a" / "n15", "n1.5", **options)
    wanted = f"{system}{images}['Pick up, slowly.']<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_text(policy, tmp_path / "one", "Pick up, slowly.") == wanted
    policy = start(tmp_path / "two", tmp_path / "b" / "n17", "n1.7")
    image = f"<|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>"
    wanted = f"<|im_start|>user\n{image * 2}pick up slowly<|im_end|>\n"
    assert prompt_text(policy, tmp_path / "two", "Pick up, slowly.") == wanted
    assert prompt_ends("n1.7", 1, 2)[0].count(IMAGE_TOKENS["n1.7"]) == 2


def test_the_features_of_qwen3_vl_are_those_of_transformers(tmp_path: Path) -> None:
    """Patches, positions and deep features, before the last norm."""
    from transformers import Qwen3VLConfig, Qwen3VLModel
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    write_folder(tmp_path / "source", "n1.7")
    policy = start(tmp_path / "policy", tmp_path / "source", "n1.7")
    backbone = policy.module.model.backbone
    assert isinstance(backbone, Qwen3VLBackbone)
    settings = json.loads((tmp_path / "vlm" / "config.json").read_text())
    model: Any = Qwen3VLModel._from_config(Qwen3VLConfig(**settings), dtype=torch.float32)
    model.load_state_dict(backbone.model["model"].state_dict())
    random = np.random.default_rng(0)
    pictures = random.integers(0, 256, (2, 32, 32, 3), np.uint8)
    rows = np.stack([np.frombuffer(t, np.uint8) for t in (b"reach", b"touch")])[None]
    prompt = policy.tokenize_prompts(rows, torch.zeros(0))[0][0]
    is_image = prompt == settings["image_token_id"]
    processor = Qwen2VLImageProcessorPil(
        patch_size=8,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 32 * 32, "longest_edge": 32 * 32},
    )
    shown = processor(images=[*pictures, *pictures[::-1]], return_tensors="pt")
    pixels = torch.tensor(pictures).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        found = backbone(prompt, is_image, torch.cat([pixels, pixels.flip(0)]))
        kept: list[Tensor] = []
        model.language_model.norm.register_forward_pre_hook(lambda _, x: kept.append(x[0]))
        model(
            input_ids=prompt,
            pixel_values=shown["pixel_values"],
            image_grid_thw=shown["image_grid_thw"],
            mm_token_type_ids=is_image.int(),
        )
    torch.testing.assert_close(found, kept[0], atol=1e-5, rtol=0)
    assert (found[0] - found[1]).abs().max() > 1e-2


@pytest.mark.parametrize("version", VERSIONS)
def test_a_saved_folder_is_a_start_for_another_run(tmp_path: Path, version: str) -> None:
    first = made(tmp_path / "trained", version, noise_method="learned")
    (tmp_path / "copy").mkdir()
    config = Gr00tConfig(path=tmp_path / "trained", denoising_steps=7, noise_method="learned")
    Gr00tPolicy.create(config, TWO_CAMERAS, 5, tmp_path / "copy")
    loaded = Gr00tPolicy.load(tmp_path / "copy", config)
    assert loaded.num_denoising_steps == 7
    state = loaded.module.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in first.module.state_dict().items())


def test_a_folder_that_values_chunks_is_a_start_for_one_that_values_actions(tmp_path: Path) -> None:
    state = made(tmp_path / "one", "n1.5").module.state_dict()
    acting.assert_values_begin_anew(Gr00tPolicy, tmp_path, state)


def test_statistics_of_a_data_set_replace_those_of_the_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", "n1.5")
    rows = {
        name: {"min": [0.0] * size, "max": [2.0] * size}
        for name, size in (("observation.state", 4), ("action", 3))
    }
    (tmp_path / "stats.json").write_text(json.dumps(rows))
    options = {"norm_stats": tmp_path / "stats.json"}
    policy = start(tmp_path / "policy", tmp_path / "source", "n1.5", **options)
    assert (policy.scale_state(torch.full((1, 5), 2.0))[0, :4] == 1).all()


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({}, {"images": {}}, r"task\.images: model\.name=gr00t reads images"),
        ({}, {"action": {"kind": "discrete", "size": 3}}, r"model\.name: gr00t .*discrete"),
        ({"patch_size": 5}, {}, r"model\.image_size: .*40 x 40|.* tokens of"),
        ({"version": "n1.7", "image_size": 24}, {}, r"model\.image_size: .*24 x 24.*16 pixels"),
        ({"proprio_dim": 6}, {}, r"model\.proprio_dim: 6 numbers"),
    ],
)
def test_tasks_that_do_not_fit_are_refused(
    options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    spec = {**SPEC, "images": {"front": [41, 41]}, **changes}
    with pytest.raises(ConfigError, match=message):
        Gr00tPolicy.check_spec(Gr00tConfig(**{"image_size": 41, **options}), spec)


@pytest.mark.parametrize(
    ("version", "options", "message"),
    [
        ("n1.5", {"embodiment": None}, r"model\.embodiment: choose one of .*metadata\.json: gr1"),
        ("n1.5", {"embodiment": "gr2"}, r"metadata\.json has no 'gr2'; did you mean 'gr1'"),
        ("n1.7", {"embodiment": "libero"}, r"processor_config\.json has no 'libero'; did you mean"),
        ("n1.7", {"proprio_dim": 3}, r"model\.proprio_dim: 3, and the folder .* of 4"),
        ("n1.5", {"chunk_size": 9}, r"model\.chunk_size: 9, .* 6 actions"),
        ("n1.7", {"chunk_size": 6}, r"model\.chunk_size: 6, .* 5 actions"),
        ("n1.5", {"camera_map": {"back": "front"}}, r"model\.camera_map: back is none"),
    ],
)
def test_options_that_a_folder_does_not_have_are_refused(
    tmp_path: Path, version: str, options: dict[str, Any], message: str
) -> None:
    write_folder(tmp_path / "source", version)
    with pytest.raises(ConfigError, match=message):
        start(tmp_path / "policy", tmp_path / "source", version, **options)


@pytest.mark.parametrize(
    ("version", "file", "keys", "value", "message"),
    [
        (
            "n1.5",
            "experiment_cfg/metadata.json",
            ("gr1", "statistics", "state"),
            None,
            r"metadata\.json: gr1\.statistics\.state is missing",
        ),
        (
            "n1.5",
            "experiment_cfg/metadata.json",
            ("gr1", "statistics", "action", "arm", "max"),
            None,
            r"gr1\.statistics\.action\.arm has no list max",
        ),
        (
            "n1.7",
            "statistics.json",
            ("libero_sim", "state", "gripper", "q99"),
            None,
            r"statistics\.json: libero_sim\.state\.gripper has no list q99",
        ),
        (
            "n1.7",
            "statistics.json",
            ("libero_sim", "action", "arm"),
            None,
            r"statistics\.json: libero_sim\.action has no arm",
        ),
        (
            "n1.7",
            "embodiment_id.json",
            ("libero_sim",),
            None,
            r"embodiment_id\.json has no 'libero_sim'",
        ),
        (
            "n1.7",
            "processor_config.json",
            ("processor_kwargs", "use_mean_std"),
            True,
            r"processor_config\.json: .*not support its use_mean_std",
        ),
        (
            "n1.7",
            "config.json",
            ("state_history_length",),
            2,
            r"config\.json: .*not support its state_history_length",
        ),
        ("n1.5", "config.json", ("model_type",), "gr00t_n1", r"of the type 'gr00t_n1'"),
        (
            "n1.5",
            "../vlm/config.json",
            ("use_pixel_shuffle",),
            True,
            r"model\.vlm_path: .*use_pixel_shuffle is True, not False",
        ),
        ("n1.5", "../vlm/config.json", ("model_type",), "qwen3", r"is a 'qwen3' model"),
    ],
)
def test_folders_that_lack_something_are_refused(
    tmp_path: Path, version: str, file: str, keys: tuple[str, ...], value: Any, message: str
) -> None:
    write_folder(tmp_path / "source", version)
    path = tmp_path / "source" / file
    content = inner = json.loads(path.read_text())
    for key in keys[:-1]:
        inner = inner[key]
    if value is None:
        inner.pop(keys[-1])
    else:
        inner[keys[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises((ConfigError, DataError), match=message):
        start(tmp_path / "policy", tmp_path / "source", version)
    assert not any((tmp_path / "policy").iterdir())


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", "n1.5")
    with pytest.raises(DataError, match=r"model\.vlm_path: .*no folder 'vlm'.*Eagle 2\.5"):
        start(tmp_path / "policy", tmp_path / "source", "n1.5", vlm_path=None)
    (tmp_path / "vlm" / "tokenizer.json").unlink()
    config = Gr00tConfig(
        path=tmp_path / "source", vlm_path=tmp_path / "vlm", camera_map=CAMERAS, embodiment="gr1"
    )
    with pytest.raises(DataError, match=r"model\.vlm_path: .*no tokenizer\.json"):
        Gr00tPolicy.check_spec(config, SPEC)
    (tmp_path / "source" / "experiment_cfg/metadata.json").unlink()
    with pytest.raises(DataError, match=r"model\.path: cannot read .*metadata\.json"):
        Gr00tPolicy.check_spec(config, SPEC)


@pytest.mark.parametrize("version", VERSIONS)
def test_tensors_that_are_missing_or_unexpected_are_named(tmp_path: Path, version: str) -> None:
    write_folder(tmp_path / "source", version)
    missing = "action_head.vlln.weight"
    index = json.loads((tmp_path / "source" / INDEX).read_text())
    path = tmp_path / "source" / index["weight_map"][missing]
    stored = load_file(path)
    stored["action_head.adapter.weight"] = stored.pop(missing)
    save_file(stored, path)
    found = rf"missing: {re.escape(missing)}\nnot .*: action_head\.adapter\.weight"
    with pytest.raises(DataError, match=found):
        start(tmp_path / "policy", tmp_path / "source", version)
