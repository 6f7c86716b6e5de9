"""Folders of pi-0 and pi-0.5: those of LeRobot and of openpi, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf.envs.observations import encode_instruction
from rlinf.errors import ConfigError, DataError
from rlinf.models import pi0_folder
from rlinf.models.checkpoint_tensors import network_shapes
from rlinf.models.flow_vla import HEADS_FILE
from rlinf.models.pi0_folder import (
    DEFAULTS,
    KIND_DEFAULTS,
    PiConfig,
    network_names,
    network_sizes,
)
from rlinf.models.pi0_network import PiNetwork
from tests.rlinf.models import acting
from tests.rlinf.models.acting import SPEC as TWO_CAMERAS
from tests.rlinf.models.pi0_folders import CAMERAS, POLICIES, SIZES, SPEC, start, write_folder
from tests.rlinf.models.test_pi0 import made

KINDS = sorted(POLICIES)
MANIFEST = Path(__file__).with_name("pi0_tensors.json")
SENTENCEPIECE = Path(__file__).with_name("sentencepiece")
EMBEDDINGS = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
LM_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
OPENPI_CAMERAS = {"base_0_rgb": "front", "left_wrist_0_rgb": "wrist"}


def expanded(manifest: Mapping[str, list[int]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names in which ``{a,b}`` stands for each of them and ``{3}`` for 0 to 2."""
    for name, shape in manifest.items():
        texts = re.split(r"\{(.*?)\}", name)
        choices = [
            [str(i) for i in range(int(text))] if text.isdigit() else text.split(",")
            for text in texts[1::2]
        ]
        for chosen in product(*choices):
            parts = [*chosen, ""]
            yield "".join(a + b for a, b in zip(texts[::2], parts, strict=True)), tuple(shape)


@pytest.mark.parametrize("kind", KINDS)
def test_the_published_size_has_exactly_the_published_tensors(kind: str) -> None:
    manifest = json.loads(MANIFEST.read_text())
    stored = {f"model.{n}": s for n, s in expanded(manifest["both"] | manifest[kind])}
    settings = {"type": kind, **DEFAULTS, **KIND_DEFAULTS[kind]}
    network = PiNetwork(settings, network_sizes(settings), learned_noise=False, device="meta")
    shapes, _ = network_shapes(network.model)
    assert {target: stored[name] for name, target in network_names(stored).items()} == {
        f"model.{name}": shape for name, shape in shapes.items()
    }
    unused = math.prod(stored["model.paligemma_with_expert.gemma_expert.lm_head.weight"])
    total = sum(math.prod(shape) for shape in stored.values()) - unused
    assert 3.2e9 < total < 3.4e9


def to_openpi(source: Path, folder: Path) -> None:
    """Write a folder of LeRobot as openpi does: other names, other statistics, no tokenizer."""
    folder.mkdir()
    settings = json.loads((source / "config.json").read_text())
    stored = load_file(source / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    tensors[LM_HEAD] = tensors.pop(EMBEDDINGS)
    save_file(tensors, folder / "model.safetensors")
    content = {
        "action_dim": settings["max_action_dim"],
        "action_horizon": settings["chunk_size"],
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "precision": "float32",
    }
    (folder / "config.json").write_text(json.dumps(content))
    known = load_file(next(source.glob("policy_preprocessor_step_*.safetensors")))
    rows = {
        name: {
            statistic: known[f"{feature}.{statistic}"].tolist()
            for statistic in ("mean", "std", "q01", "q99")
        }
        for name, feature in (("state", "observation.state"), ("actions", "action"))
    }
    (folder / "assets" / "lab").mkdir(parents=True)
    (folder / "assets" / "lab" / "norm_stats.json").write_text(json.dumps({"norm_stats": rows}))


@pytest.fixture
def small_variants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The published variants in the sizes of small folders, which openpi cannot describe."""
    write_folder(tmp_path / "sizes", "pi0")
    sizes = json.loads((tmp_path / "sizes" / "config.json").read_text())["sizes"]
    monkeypatch.setitem(pi0_folder.GEMMA_SIZES, "gemma_2b", sizes["language"])
    monkeypatch.setitem(pi0_folder.GEMMA_SIZES, "gemma_300m", sizes["expert"])
    monkeypatch.setattr(pi0_folder, "SIGLIP_SIZES", sizes["vision"])
    monkeypatch.setattr(pi0_folder, "VOCABULARY_SIZE", sizes["vocab_size"])
    monkeypatch.setitem(pi0_folder.DEFAULTS, "image_resolution", [28, 28])


def acted(policy: Any) -> Tensor:
    random = np.random.default_rng(0)
    seen = {
        "observation": random.normal(size=(2, 4)).astype(np.float32),
        "instruction": np.frombuffer(b"reachpush ", np.uint8).reshape(2, 5).copy(),
        "images.front": random.integers(0, 256, (2, 40, 40, 3), np.uint8),
        "images.wrist": random.integers(0, 256, (2, 28, 28, 3), np.uint8),
    }
    noise = torch.tensor(policy.draw_noise(random, 2))
    columns = {name: torch.tensor(column) for name, column in seen.items()}
    with torch.no_grad():
        found: Tensor = policy.act(columns, noise, 1.0)["action"]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["older", "both copies", "only the head", "no expert head"])
def test_names_of_both_layouts_are_read(tmp_path: Path, kind: str, layout: str) -> None:
    write_folder(tmp_path / "source", kind)
    known = start(tmp_path / "known", tmp_path / "source", kind).module.state_dict()
    path = tmp_path / "source" / "model.safetensors"
    stored = load_file(path)
    embeddings = f"model.{EMBEDDINGS}"
    if layout == "older":
        stored = {
            name.replace("paligemma.model.language_model", "paligemma.language_model.model")
            .replace("paligemma.model.", "paligemma.")
            .removeprefix("model."): tensor
            for name, tensor in stored.items()
        }
    elif layout == "no expert head":
        stored.pop("model.paligemma_with_expert.gemma_expert.lm_head.weight")
    else:
        stored[f"model.{LM_HEAD}"] = stored[embeddings].clone()
        if layout == "only the head":
            stored.pop(embeddings)
    save_file(stored, path)
    found = start(tmp_path / "found", tmp_path / "source", kind).module.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in known.items())


@pytest.mark.usefixtures("small_variants")
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_openpi_acts_as_that_of_lerobot(tmp_path: Path, kind: str) -> None:
    """With its third camera masked, and the constant of its statistics added."""
    write_folder(tmp_path / "source", kind, max_state_dim=5)
    to_openpi(tmp_path / "source", tmp_path / "openpi")
    known = start(tmp_path / "known", tmp_path / "source", kind, state_in_prompt=False)
    options = {"tokenizer_path": tmp_path / "source" / "tokenizer", "chunk_size": 4}
    config = PiConfig(
        path=tmp_path / "openpi",
        camera_map=OPENPI_CAMERAS,
        denoising_steps=5,
        state_in_prompt=False if kind == "pi05" else None,
        **options,
    )
    (tmp_path / "found").mkdir()
    POLICIES[kind].create(config, SPEC, 0, tmp_path / "found")
    policy = POLICIES[kind].load(tmp_path / "found", config)
    torch.testing.assert_close(acted(policy), acted(known), atol=1e-4, rtol=0)
    scaled = policy.scale_state(torch.ones(1, 4))
    rows = json.loads((tmp_path / "openpi" / "assets" / "lab" / "norm_stats.json").read_text())
    state = {name: torch.tensor(row) for name, row in rows["norm_stats"]["state"].items()}
    wanted = (1 - state["mean"]) / (state["std"] + 1e-6)
    if kind == "pi05":
        wanted = (1 - state["q01"]) / (state["q99"] - state["q01"] + 1e-6) * 2 - 1
    torch.testing.assert_close(scaled[0, :4], wanted)


def test_a_sentencepiece_model_of_the_folder_is_the_tokenizer(tmp_path: Path) -> None:
    """In the new policy's folder, and in one that was saved from it, it is a tokenizer.json."""
    write_folder(tmp_path / "source", "pi0")
    shutil.rmtree(tmp_path / "source" / "tokenizer")
    shutil.copyfile(SENTENCEPIECE / "without_bytes.model", tmp_path / "source" / "tokenizer.model")
    policy = start(tmp_path / "new", tmp_path / "source", "pi0")
    (tmp_path / "saved").mkdir()
    policy.save(tmp_path / "saved", policy.module.state_dict())
    reference = json.loads((SENTENCEPIECE / "tokens.json").read_text())
    text = "put the cup on the plate\n"
    wanted = reference["tokens"]["without_bytes"][reference["texts"].index(text)]
    rows = encode_instruction(text.strip())[None, None]
    for folder in ("new", "saved"):
        loaded = POLICIES["pi0"].load(tmp_path / folder, PiConfig(camera_map=CAMERAS))
        tokens, mask = loaded.tokenize_prompts(rows, torch.zeros(1, 1, 4))
        assert tokens[0, 0].tolist() == wanted
        assert mask.all()


@pytest.mark.usefixtures("small_variants")
def test_openpi_says_nothing_of_the_state_in_the_prompt_so_it_is_asked_for(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", "pi05")
    to_openpi(tmp_path / "source", tmp_path / "openpi")
    options: dict[str, Any] = {
        "path": tmp_path / "openpi",
        "tokenizer_path": tmp_path / "source" / "tokenizer",
        "camera_map": OPENPI_CAMERAS,
    }
    with pytest.raises(ConfigError, match=r"model\.state_in_prompt: .*pi05_libero: false"):
        POLICIES["pi05"].check_spec(PiConfig(**options), SPEC)
    POLICIES["pi05"].check_spec(PiConfig(**options, state_in_prompt=True), SPEC)
    with pytest.raises(ConfigError, match=r"model\.state_in_prompt: model\.name=pi0 reads"):
        POLICIES["pi0"].check_spec(PiConfig(**SIZES, state_in_prompt=True), SPEC)


def test_the_prompt_of_a_folder_can_be_changed(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", "pi05")
    start(tmp_path / "off", tmp_path / "source", "pi05", state_in_prompt=False)
    steps = json.loads((tmp_path / "off" / "policy_preprocessor.json").read_text())["steps"]
    assert "pi0_new_line_processor" in [step["registry_name"] for step in steps]
    on = start(tmp_path / "on", tmp_path / "off", "pi05", state_in_prompt=True)
    known = start(tmp_path / "known", tmp_path / "source", "pi05")
    assert torch.equal(acted(on), acted(known))


def test_a_saved_folder_is_a_start_for_another_run(tmp_path: Path) -> None:
    first = made(tmp_path / "trained", "pi05", noise_method="learned")
    heads = {name.split(".")[0] for name in load_file(tmp_path / "trained" / HEADS_FILE)}
    assert heads == {"value_head", "noise_head"}
    (tmp_path / "copy").mkdir()
    config = PiConfig(path=tmp_path / "trained", denoising_steps=7, noise_method="learned")
    POLICIES["pi05"].create(config, TWO_CAMERAS, 5, tmp_path / "copy")
    loaded = POLICIES["pi05"].load(tmp_path / "copy", config)
    assert loaded.num_denoising_steps == 7
    state = loaded.module.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in first.module.state_dict().items())


def test_a_folder_that_values_chunks_is_a_start_for_one_that_values_actions(tmp_path: Path) -> None:
    state = made(tmp_path / "one", "pi05").module.state_dict()
    acting.assert_values_begin_anew(POLICIES["pi05"], tmp_path, state)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({}, {"images": {}}, r"task\.images: model\.name=pi0 reads images"),
        ({}, {"action": {"kind": "discrete", "size": 3}}, r"model\.name: pi0 .*discrete"),
        ({"patch_size": 5}, {}, r"model\.image_size: .*28 x 28.*patches of 5 pixels"),
        ({"relative_action_dims": (3,)}, {}, r"model\.relative_action_dims: 3, .*0 to 2"),
    ],
)
def test_a_task_that_does_not_fit_is_refused(
    options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    config = PiConfig(**{**SIZES, **options})
    with pytest.raises(ConfigError, match=message):
        POLICIES["pi0"].check_spec(config, {**SPEC, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "pi05"}, r"of the type 'pi05'; model\.name=pi0 takes .*'pi0'.*openpi"),
        ({"paligemma_variant": "gemma_7b"}, r"paligemma_variant is 'gemma_7b'; known are gemma_2b"),
        ({"time_sampling_beta_alpha": 1.0}, r"time_sampling_beta_alpha is 1\.0"),
        ({"use_relative_actions": True}, r"use_relative_actions .*model\.relative_action_dims"),
        ({"output_features": {}}, r"no output_features"),
        ({"max_state_dim": 9}, r"of another shape: state_proj\.weight \[32, 7\], not \[32, 9\]"),
    ],
)
def test_a_folder_of_another_kind_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_folder(tmp_path / "source", "pi0")
    path = tmp_path / "source" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(DataError, match=message):
        POLICIES["pi0"].check_spec(PiConfig(path=tmp_path / "source", camera_map=CAMERAS), SPEC)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", "pi0")
    path, config = (
        tmp_path / "source" / "model.safetensors",
        PiConfig(path=tmp_path / "source", camera_map=CAMERAS),
    )
    stored = load_file(path)
    stored["model.adapter.weight"] = stored.pop("model.state_proj.bias")
    save_file(stored, path)
    with pytest.raises(DataError, match=r"missing: state_proj\.bias\nnot .*: adapter\.weight"):
        POLICIES["pi0"].check_spec(config, SPEC)


@pytest.mark.usefixtures("small_variants")
def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", "pi0")
    to_openpi(tmp_path / "source", tmp_path / "openpi")
    config = PiConfig(path=tmp_path / "openpi", camera_map=OPENPI_CAMERAS)
    with pytest.raises(DataError, match=r"tokenizer_path: .*neither tokenizer\.json"):
        POLICIES["pi0"].check_spec(config, SPEC)
    (tmp_path / "openpi" / "tokenizer.model").write_bytes(b"")
    with pytest.raises(DataError, match=r"tokenizer\.model: no SentencePiece model"):
        POLICIES["pi0"].check_spec(config, SPEC)
    shutil.copyfile(SENTENCEPIECE / "gemma.model", tmp_path / "openpi" / "tokenizer.model")
    (tmp_path / "openpi" / "assets" / "lab" / "norm_stats.json").rename(tmp_path / "stats.json")
    with pytest.raises(DataError, match=r"model\.norm_stats: .*found: none"):
        POLICIES["pi0"].check_spec(config, SPEC)
    (tmp_path / "stats.json").write_text('{"norm_stats": {"state": {}}}')
    named = PiConfig(path=tmp_path / "openpi", norm_stats=tmp_path / "stats.json")
    with pytest.raises(DataError, match=r"stats\.json is no norm_stats\.json of openpi"):
        POLICIES["pi0"].check_spec(named, SPEC)
    (tmp_path / "source" / "policy_preprocessor.json").write_text('{"steps": []}')
    with pytest.raises(DataError, match=r"neither the step pi0_new_line_processor"):
        POLICIES["pi0"].check_spec(PiConfig(path=tmp_path / "source", camera_map=CAMERAS), SPEC)
