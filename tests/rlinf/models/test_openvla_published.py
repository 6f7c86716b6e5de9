"""Folders as OpenVLA and OpenVLA-OFT published them: two towers, statistics, names of tensors."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors

from rlinf.algorithms.learner import Learner
from rlinf.algorithms.ppo import PPO, PPOConfig
from rlinf.errors import ConfigError, DataError
from rlinf.models.action_encoding import STATISTICS_FILE, ActionBins
from rlinf.models.character_tokenizer import (
    DEFAULT_ALPHABET,
    TOKENIZER_FILE,
    write_character_tokenizer,
)
from rlinf.models.images import PREPROCESSOR_FILE
from rlinf.models.openvla import OpenVLAOFTPolicy, OpenVLAPolicy
from rlinf.models.openvla_folder import (
    OpenVLAOFTConfig,
    missing_settings,
    new_meta_network,
    read_openvla_config,
)
from tests.rlinf.models import acting, test_vision_tower
from tests.rlinf.models.acting import SPEC, stirred

SIZES: dict[str, Any] = {
    "use_fused_vision_backbone": True,
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "intermediate": 48,
    "vision_hidden": 16,
    "vision_layers": 3,
    "vision_heads": 2,
    "chunk_size": 4,
}
WHOLE_SPEC: dict[str, Any] = {
    "observation": 8,
    "action": {"kind": "box", "size": 7},
    "images": {"front": [224, 224]},
}
BEGIN = "<s>"


def made(folder: Path, **options: Any) -> OpenVLAOFTPolicy:
    """A small policy whose weights make something of everything."""
    config = OpenVLAOFTConfig(**SIZES, **options)
    first = folder / "first"
    first.mkdir(parents=True)
    OpenVLAOFTPolicy.create(config, SPEC, 0, first)
    policy = OpenVLAOFTPolicy.load(first, config)
    stirred(policy)
    policy.save(folder, policy.module.state_dict())
    return policy


def published(folder: Path, **options: Any) -> OpenVLAOFTConfig:
    """A small folder as it is published: nothing of ours in it but the sizes of its towers."""
    made(folder, **options)
    settings = json.loads((folder / "config.json").read_text())
    ours = ("cameras", "prompt", "num_actions_chunk", "action_dim", "proprio_dim", "unnorm_key")
    settings = {name: value for name, value in settings.items() if name not in ours}
    statistics = {"q01": [-0.5, 0.0, 0.0], "q99": [1.5, 2.0, 1.0], "mask": [True, True, False]}
    proprio = {"q01": [-1.0, -0.5], "q99": [1.0, 2.5]}
    settings["norm_stats"] = {
        name: {"action": statistics, "proprio": proprio} for name in ("one", "other")
    }
    settings["auto_map"] = {"AutoModelForVision2Seq": "modeling_prismatic.OpenVLA"}
    (folder / "modeling_prismatic.py").write_text("raise SystemExit\n")
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / STATISTICS_FILE).unlink()
    # Llama's begins a text with a token of its own.
    known = write_character_tokenizer(DEFAULT_ALPHABET, folder, special_tokens=[BEGIN])
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, known[BEGIN])]
    )
    tokenizer.save(str(folder / TOKENIZER_FILE))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "value_head" not in name}
    names = sorted(tensors)
    cut = len(names) // 2
    for part, own in enumerate((names[:cut], names[cut:]), 1):
        target = folder / f"model-0000{part}-of-00002.safetensors"
        save_file({name: tensors[name] for name in own}, target, {"format": "pt"})
    places = {n: f"model-0000{1 if n in names[:cut] else 2}-of-00002.safetensors" for n in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "model.safetensors").unlink()
    return OpenVLAOFTConfig(
        path=folder,
        unnorm_key="one",
        chunk_size=4,
        center_crop=False,
        gripper="simulator",
        **options,
    )


def evaluate(policy: OpenVLAOFTPolicy, seed: int = 0) -> dict[str, torch.Tensor]:
    seen = {n: torch.tensor(c) for n, c in acting.request(3, 0, seed=seed).steps.items()}
    noise = torch.tensor(policy.draw_noise(np.random.default_rng(0), 3))
    with torch.no_grad():
        return policy.act(seen, noise, 0.7)


def test_a_policy_made_of_a_published_folder_says_the_same_wherever_it_is_saved(
    tmp_path: Path,
) -> None:
    config = published(tmp_path / "published")
    OpenVLAOFTPolicy.check_spec(config, SPEC)
    first, again = tmp_path / "run", tmp_path / "again"
    first.mkdir()
    again.mkdir()
    OpenVLAOFTPolicy.create(config, SPEC, 0, first)
    policy = OpenVLAOFTPolicy.load(first, config)
    policy.save(again, policy.module.state_dict())
    other = OpenVLAOFTPolicy.load(again, config)
    one, two = evaluate(policy), evaluate(other)
    assert all(torch.equal(one[name], two[name]) for name in one)
    published_names = json.loads(
        (tmp_path / "published" / "model.safetensors.index.json").read_text()
    )["weight_map"]
    saved = load_file(again / "model.safetensors")
    assert {name for name in saved if not name.startswith("value_head.")} == published_names.keys()
    settings = json.loads((again / "config.json").read_text())
    assert settings["norm_stats"]["one"]["action"]["q99"] == [1.5, 2.0, 1.0]
    assert (settings["unnorm_key"], settings["num_actions_chunk"]) == ("one", 4)
    assert settings["prompt"].endswith("\nOut: ")
    # The last number is not scaled.
    assert one["action"][..., 0].min() >= -0.5
    assert one["action"][..., 1].min() >= 0
    assert one["action"][..., 2].min() < 0


def test_the_trainer_recomputes_what_was_sampled_of_both_towers(tmp_path: Path) -> None:
    made(tmp_path)
    config = OpenVLAOFTConfig(**SIZES)
    records = acting.rolled_out(OpenVLAOFTPolicy, config, tmp_path)
    learns = acting.trainer(OpenVLAOFTPolicy, config, tmp_path)
    acting.assert_recomputed(learns, records, 1.0)
    learns.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_update_trains_every_part_and_leaves_alone_what_is_never_run(
    tmp_path: Path, dtype: str
) -> None:
    made(tmp_path, proprio_dim=2)
    config = OpenVLAOFTConfig(**SIZES, proprio_dim=2)
    records = acting.rolled_out(OpenVLAOFTPolicy, config, tmp_path)
    learns = acting.trainer(OpenVLAOFTPolicy, config, tmp_path, param_dtype=dtype)
    before = {
        n: t.clone() for n, t in OpenVLAOFTPolicy.load(tmp_path, config).module.state_dict().items()
    }
    learner = Learner(learns, {"policy": 1e-2, "value": 1e-2}, temperature=1.0)
    algorithm = PPO(PPOConfig(logprob_level="token", old_logprobs="rollout", value_loss_coef=1.0))
    algorithm.update(learner, [acting.rewarded(records)])
    saved = tmp_path / "saved"
    saved.mkdir()
    learns.policy.save(saved, learns.full_state_dict())
    after = load_file(saved / "model.safetensors")
    unread = {name for name, _ in OpenVLAOFTPolicy.load(tmp_path, config).module.named_buffers()}
    still = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    assert still == {name for name in unread if name in before}
    towers = {name.split(".")[1] for name in before.keys() - still if "vision_backbone" in name}
    assert towers == {"featurizer", "fused_featurizer"}
    learns.close()


def regression(head: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """OpenVLA-OFT's head of two residual blocks, for hidden states ``[C, D * width]``."""
    state = {name.removeprefix("model."): t for name, t in head.state_dict().items()}

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    x = linear(normed(hidden, "layer_norm1"), "fc1").relu()
    for block in ("mlp_resnet_blocks.0.ffn", "mlp_resnet_blocks.1.ffn"):
        x = linear(normed(x, f"{block}.0"), f"{block}.1").relu() + x
    return linear(normed(x, "layer_norm2"), "fc2")


@pytest.mark.parametrize(
    "options",
    [{}, {"proprio_dim": 2}, {"use_film": True}, {"action_head": "l1", "proprio_dim": 2}],
    ids=lambda options: "+".join(options) or "plain",
)
def test_what_the_language_model_reads_is_laid_out_as_in_openvla_oft(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """First token, patches of each picture, state, rest of the prompt, no placeholders, end."""
    config = published(tmp_path / "published", **options)
    (tmp_path / "run").mkdir()
    OpenVLAOFTPolicy.create(config, SPEC, 0, tmp_path / "run")
    policy = OpenVLAOFTPolicy.load(tmp_path / "run", config)
    network = policy.module
    found = evaluate(policy)
    steps = acting.request(3, 0).steps
    tokenizer = Tokenizer.from_file(str(tmp_path / "run" / TOKENIZER_FILE))
    model = network.language_model
    means = torch.tensor([[0.485, 0.456, 0.406], [0.5] * 3]).reshape(2, 3, 1, 1)
    deviations = torch.tensor([[0.229, 0.224, 0.225], [0.5] * 3]).reshape(2, 3, 1, 1)
    towers = network.vision_backbone
    for row, text in enumerate((acting.TEXTS[0], acting.TEXTS[1], acting.TEXTS[0])):
        words = f"In: What action should the robot take to {text}?\nOut: "
        ids = torch.tensor([tokenizer.encode(words).ids])
        with torch.no_grad():
            embedded = model.get_input_embeddings()(ids)
            end = model.get_input_embeddings()(torch.tensor([[1]]))
            condition = torch.cat([embedded, end], 1).mean(1) if "use_film" in options else None
            patches = []
            for camera in ("front", "wrist"):
                picture = torch.tensor(steps[f"images.{camera}"][row]).permute(2, 0, 1) / 255
                dino, siglip = ((picture - means) / deviations).split(1)
                pair = zip(
                    (towers.featurizer, towers.fused_featurizer), (dino, siglip), strict=True
                )
                features = torch.cat([tower(pixels, condition) for tower, pixels in pair], -1)
                patches.append(network.projector(features))
            if "proprio_dim" in options:
                # Quantiles -1 and 1 of the first number, -0.5 and 2.5 of the second one.
                numbers = torch.tensor(steps["observation"][row, :2])
                scaled = ((numbers - torch.tensor([0.0, 1.0])) / torch.tensor([1.0, 1.5])).clamp(
                    -1, 1
                )
                patches.append(network.proprio_projector(scaled)[None, None])
            places = torch.zeros(1, 12, 32)
            inputs = torch.cat([embedded[:, :1], *patches, embedded[:, 1:], places, end], 1)
            every = torch.zeros(1, 1, inputs.shape[1], inputs.shape[1])
            hidden = model.model(inputs_embeds=inputs, attention_mask=every, use_cache=False)[0]
        begin = inputs.shape[1] - 14
        predictors = hidden[0, begin : begin + 12]
        if network.action_head is not None:
            normalized = regression(network.action_head, predictors.reshape(4, 96)).detach()
            low, high = torch.tensor([[-0.5, 0.0], [1.5, 2.0]])
            scaled = (normalized[:, :2] + 1) / 2 * (high - low) + low
            actions = torch.cat([scaled, normalized[:, 2:]], 1)
            assert torch.allclose(found["action"][row], actions, atol=1e-5)
            continue
        of_actions = F.linear(predictors, model.lm_head.weight)[:, -256:] / 0.7
        logprobs = F.log_softmax(of_actions, -1).reshape(4, 3, 256)
        tokens = found["tokens"][row] - network.first_action_token_id
        wanted = logprobs.gather(-1, tokens[..., None])[..., 0]
        assert torch.allclose(found["logprob"][row], wanted, atol=1e-5)


def test_tokens_and_actions_are_those_of_the_published_formula() -> None:
    """By hand, of a vocabulary of 32064 tokens of which 64 fill it up: the token of an action is
    32000 less the number of its bin from 1, bins being 2/255 wide; the action of a token the middle
    of bin 31999 - token (the last one's, of token 31744), taken to the quantiles where masked."""
    statistics = {"q01": [-0.5, -1.0], "q99": [1.5, 3.0], "mask": [True, False]}
    bins = ActionBins.from_statistics(statistics, 32064 - 64 - 256, 256)
    actions = np.array([[-0.5, -1.0], [1.5, 1.0], [0.5, 0.0], [-9.0, 9.0], [0.0, -0.5]])
    # -0.5 is a quarter of [-1, 1]: 63.75 bins of 2/255, the 64th. A quantile's own number is just
    # inside the last bin, for 1e-8 is added to the width.
    wanted = [[31999] * 2, [31745, 31744], [31872] * 2, [31999, 31744], [31936, 31936]]
    assert bins.encode(actions).tolist() == wanted
    found = bins.decode(torch.tensor([[31999] * 2, [31872] * 2, [31744] * 2, [31745] * 2]))
    near = 254 / 255
    middles = [[1 - near - 0.5, -near], [0.5, 0.0], [1 + near - 0.5, near], [1 + near - 0.5, near]]
    np.testing.assert_allclose(found.numpy(), middles, atol=1e-6)


def dropped(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for path in folder.glob("*.safetensors"):
            tensors = load_file(path)
            save_file({n: t for n, t in tensors.items() if n != name}, path, {"format": "pt"})

    return change


def enlarged(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if (name := "projector.fc2.weight") in tensors:
            tensors[name] = torch.zeros(32, 64)
            save_file(tensors, path, {"format": "pt"})


def changed(file: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        settings = {**json.loads((folder / file).read_text()), **values}
        settings = {name: value for name, value in settings.items() if value is not None}
        (folder / file).write_text(json.dumps(settings))

    return change


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (dropped("projector.fc3.bias"), r"model-00001.*\nmissing: projector\.fc3\.bias"),
        (
            dropped("vision_backbone.fused_featurizer.pos_embed"),
            r"model-00002.*\nmissing: vision_backbone\.fused_featurizer\.pos_embed",
        ),
        (enlarged, r"model-00001.*\nof another shape: projector\.fc2\.weight \[32, 64\]"),
        (lambda f: (f / PREPROCESSOR_FILE).unlink(), r"preprocessor_config\.json"),
        (
            changed(PREPROCESSOR_FILE, tvf_normalize_params=[{"mean": [0, 0, 0]}]),
            r"preprocessor_config\.json: tvf_normalize_params.*std",
        ),
        (changed("config.json", norm_stats=None), r"dataset_statistics\.json"),
        (changed("config.json", norm_stats={"one": {}}), r"norm_stats in .*config\.json.*action"),
        (changed("config.json", n_action_bins=None), r"config\.json has no n_action_bins"),
        (
            changed("config.json", vision_config={"featurizer": {}}),
            r"config\.json has no vision_config\.featurizer\.hidden_size",
        ),
        (
            changed("config.json", vision_config=None, timm_model_ids=["a", "b"], image_sizes=[1]),
            r"config\.json: timm_model_ids: \['a', 'b'\]",
        ),
        (
            changed("config.json", text_config={"model_type": "mistral"}),
            r"config\.json: text_config\.model_type: 'mistral'",
        ),
        (
            changed("config.json", text_config={"vocab_size": "many"}),
            r"config\.json describes no network .*vocab_size",
        ),
        (lambda f: (f / TOKENIZER_FILE).unlink(), r"tokenizer\.json"),
        (
            lambda f: (f / "action_head--100_checkpoint.pt").touch(),
            r"action_head--100_checkpoint\.pt.*rlinf convert .*published NEW_FOLDER",
        ),
        (
            lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
            r"lacks model-00002-of-00002\.safetensors",
        ),
    ],
)
def test_a_folder_that_lacks_something_is_refused_by_file_and_key(
    change: Callable[[Path], None], wanted: str, tmp_path: Path
) -> None:
    config = published(tmp_path / "published")
    change(tmp_path / "published")
    with pytest.raises(DataError, match=wanted):
        OpenVLAOFTPolicy.check_spec(config, SPEC)


def test_a_data_set_is_chosen_where_there_are_several(tmp_path: Path) -> None:
    published(tmp_path / "published")
    with pytest.raises(DataError, match=r"model\.unnorm_key: .*one, other"):
        OpenVLAOFTPolicy.check_spec(
            OpenVLAOFTConfig(path=tmp_path / "published", center_crop=False, gripper="simulator"),
            SPEC,
        )
    # What OpenVLA-OFT writes beside counts before what OpenVLA has inside.
    statistics = {"late": {"action": {"q01": [0.0] * 3, "q99": [9.0] * 3}}}
    (tmp_path / "published" / STATISTICS_FILE).write_text(json.dumps(statistics))
    (tmp_path / "run").mkdir()
    config = OpenVLAOFTConfig(
        path=tmp_path / "published", chunk_size=4, center_crop=False, gripper="simulator"
    )
    OpenVLAOFTPolicy.create(config, SPEC, 0, tmp_path / "run")
    assert OpenVLAOFTPolicy.load(tmp_path / "run", config).bins.high.tolist() == [9.0] * 3


@pytest.mark.parametrize(
    ("options", "error", "wanted"),
    [
        ({"center_crop": None}, ConfigError, r"model\.center_crop: .*published.* set true"),
        ({"gripper": None}, ConfigError, r"model\.gripper: .*published.* set openvla"),
        (
            {"proprio_dim": 3},
            DataError,
            r"model\.proprio_dim: .*data set one has no quantiles q01 and q99 of 3 numbers",
        ),
        ({"unnorm_key": "two"}, DataError, r"model\.unnorm_key: .*one, other"),
    ],
)
def test_options_that_a_published_folder_does_not_answer_are_needed(
    options: dict[str, Any], error: type[Exception], wanted: str, tmp_path: Path
) -> None:
    config = published(tmp_path / "published").model_copy(update=options)
    with pytest.raises(error, match=wanted):
        OpenVLAOFTPolicy.check_spec(config, SPEC)


def test_a_gripper_of_openvla_must_not_be_scaled(tmp_path: Path) -> None:
    config = published(tmp_path / "published").model_copy(update={"gripper": "openvla"})
    OpenVLAOFTPolicy.check_spec(config, SPEC)
    statistics = {"one": {"action": {"q01": [0.0] * 3, "q99": [1.0] * 3}}}
    (tmp_path / "published" / STATISTICS_FILE).write_text(json.dumps(statistics))
    with pytest.raises(DataError, match=r"model\.gripper: .*scales the gripper.*simulator"):
        OpenVLAOFTPolicy.check_spec(config, SPEC)


def test_new_parts_of_published_weights_are_initialized(tmp_path: Path) -> None:
    """As OpenVLA-OFT's fine-tuning of openvla-7b begins."""
    config = published(tmp_path / "published").model_copy(
        update={"action_head": "l1", "use_film": True, "proprio_dim": 2}
    )
    (tmp_path / "run").mkdir()
    OpenVLAOFTPolicy.create(config, SPEC, 0, tmp_path / "run")
    policy = OpenVLAOFTPolicy.load(tmp_path / "run", config)
    again = OpenVLAOFTPolicy.load(tmp_path / "run", config)
    state, other = policy.module.state_dict(), again.module.state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in state.items())
    assert state["action_head.model.fc1.weight"].std() > 0
    assert state["vision_backbone.featurizer.blocks.0.scale.weight"].std() > 0
    assert torch.isfinite(evaluate(policy)["action"]).all()


def test_two_towers_need_a_layer_that_is_run() -> None:
    with pytest.raises(ConfigError, match=r"model\.vision_layers: "):
        OpenVLAOFTPolicy.check_spec(OpenVLAOFTConfig(**{**SIZES, "vision_layers": 1}), SPEC)


def llama() -> dict[str, list[int]]:
    """The tensors of Llama-2-7B with OpenVLA's vocabulary."""
    found = {"lm_head.weight": [32064, 4096], "model.embed_tokens.weight": [32064, 4096]}
    found["model.norm.weight"] = [4096]
    for layer in range(32):
        at = f"model.layers.{layer}"
        found |= {f"{at}.self_attn.{part}_proj.weight": [4096, 4096] for part in "qkvo"}
        found |= {f"{at}.mlp.{part}_proj.weight": [11008, 4096] for part in ("gate", "up")}
        found[f"{at}.mlp.down_proj.weight"] = [4096, 11008]
        found |= {f"{at}.{norm}_layernorm.weight": [4096] for norm in ("input", "post_attention")}
    return found


def whole() -> dict[str, list[int]]:
    """The tensors of openvla-7b: 982, of 7,541,237,184 numbers."""
    towers = test_vision_tower.FOUND["whole"]
    found = {f"vision_backbone.{t}.{n}": shape for t in towers for n, shape in towers[t].items()}
    sizes = [2176, 8704, 4096, 4096]
    for layer in (1, 2, 3):
        found[f"projector.fc{layer}.weight"] = [sizes[layer], sizes[layer - 1]]
        found[f"projector.fc{layer}.bias"] = [sizes[layer]]
    return found | {f"language_model.{name}": shape for name, shape in llama().items()}


def write_outline(path: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file of bfloat16 tensors that are all hole: it takes no room."""
    header, at = dict[str, Any](), 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def finetuned() -> dict[str, list[int]]:
    """The tensors that OpenVLA-OFT adds for LIBERO: L1 head, projector of the state and FiLM."""
    added = {"proprio_projector.fc1.weight": [4096, 8], "proprio_projector.fc2.weight": [4096] * 2}
    added |= {f"proprio_projector.fc{layer}.bias": [4096] for layer in (1, 2)}
    head = {"layer_norm1.weight": [28672], "fc1.weight": [4096, 28672], "fc2.weight": [7, 4096]}
    head |= {"layer_norm1.bias": [28672], "fc1.bias": [4096], "fc2.bias": [7]}
    head |= {"layer_norm2.weight": [4096], "layer_norm2.bias": [4096]}
    for block in (0, 1):
        head |= {f"mlp_resnet_blocks.{block}.ffn.0.{name}": [4096] for name in ("weight", "bias")}
        head[f"mlp_resnet_blocks.{block}.ffn.1.weight"] = [4096, 4096]
        head[f"mlp_resnet_blocks.{block}.ffn.1.bias"] = [4096]
    added |= {f"action_head.model.{name}": shape for name, shape in head.items()}
    for tower, width, blocks in (("featurizer", 1024, 24), ("fused_featurizer", 1152, 27)):
        for block in range(blocks):
            for name in ("scale", "shift"):
                place = f"vision_backbone.{tower}.blocks.{block}.{name}"
                added |= {f"{place}.weight": [width, 4096], f"{place}.bias": [width]}
    return added


def write_whole(folder: Path, **added: Any) -> None:
    """``config.json``, statistics and tokenizer of a published folder of 7 B parameters."""
    proprio = {"q01": [-1.0] * 8, "q99": [1.0] * 8}
    statistics = {"q01": [-1.0] * 7, "q99": [1.0] * 7, "mask": [True] * 6 + [False]}
    settings = {
        "architectures": ["OpenVLAForActionPrediction"],
        "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
        "image_sizes": [224, 224],
        "model_type": "openvla",
        "n_action_bins": 256,
        "norm_stats": {"libero_10_no_noops": {"action": statistics, "proprio": proprio}},
        "pad_to_multiple_of": 64,
        "pad_token_id": 32000,
        "text_config": {
            "model_type": "llama",
            "pad_token_id": 32000,
            "torch_dtype": "bfloat16",
            "vocab_size": 32064,
        },
        "timm_model_ids": [
            "vit_large_patch14_reg4_dinov2.lvd142m",
            "vit_so400m_patch14_siglip_224",
        ],
        "use_fused_vision_backbone": True,
        **added,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    scaling = [{"mean": [0.5] * 3, "std": [0.5] * 3, "inplace": False}] * 2
    (folder / PREPROCESSOR_FILE).write_text(json.dumps({"tvf_normalize_params": scaling}))
    write_character_tokenizer(DEFAULT_ALPHABET, folder)


def test_a_finetuned_folder_of_the_published_size_has_the_tensors_of_our_network(
    tmp_path: Path,
) -> None:
    added = finetuned()
    write_whole(tmp_path, action_head="l1", use_film=True, proprio_dim=8, decoding="parallel")
    write_outline(tmp_path / "model.safetensors", whole() | added)
    config = OpenVLAOFTConfig(path=tmp_path, center_crop=True, gripper="openvla")
    spec = {**WHOLE_SPEC, "images": {"agentview": [256, 256], "wrist": [256, 256]}}
    OpenVLAOFTPolicy.check_spec(config, spec)
    del added["vision_backbone.fused_featurizer.blocks.26.shift.bias"]
    added["action_head.model.fc3.bias"] = [7]
    write_outline(tmp_path / "model.safetensors", whole() | added)
    wanted = (
        r"missing: vision_backbone\.fused_featurizer\.blocks\.26\.shift\.bias\n"
        r"not of this network: action_head\.model\.fc3\.bias\n"
    )
    with pytest.raises(DataError, match=wanted):
        OpenVLAOFTPolicy.check_spec(config, spec)


@pytest.mark.parametrize(
    ("policy", "places"),
    [(OpenVLAPolicy, 256 + 7), (OpenVLAOFTPolicy, 256 + 56 + 1)],
    ids=["openvla", "openvla_oft"],
)
def test_a_folder_of_the_published_size_has_the_tensors_of_our_network(
    policy: type[OpenVLAPolicy], places: int, tmp_path: Path
) -> None:
    tensors = whole()
    assert len(tensors) == 982
    assert sum(map(math.prod, tensors.values())) == 7_541_237_184
    write_whole(tmp_path)
    write_outline(tmp_path / "model.safetensors", tensors)
    config = policy.Config(path=tmp_path, center_crop=True, gripper="openvla")
    policy.check_spec(config, WHOLE_SPEC)
    missing = missing_settings(tmp_path, config, WHOLE_SPEC)
    network = new_meta_network(tmp_path, read_openvla_config(tmp_path, policy.name, missing))
    assert (network.first_action_token_id, network.num_positions) == (31744, places)
    del tensors["language_model.model.layers.31.mlp.up_proj.weight"]
    write_outline(tmp_path / "model.safetensors", tensors)
    with pytest.raises(
        DataError, match=r"missing: language_model\.model\.layers\.31\.mlp\.up_proj"
    ):
        policy.check_spec(config, WHOLE_SPEC)
