"""The policy that generates the tokens of an action one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from rlinf.errors import DataError
from rlinf.models.character_tokenizer import TOKENIZER_FILE
from rlinf.models.openvla import OpenVLAOFTPolicy, OpenVLAPolicy
from rlinf.models.openvla_folder import OpenVLAConfig, OpenVLAOFTConfig
from tests.rlinf.models import acting
from tests.rlinf.models.acting import SPEC, stirred

SIZES: dict[str, Any] = {
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "intermediate": 48,
    "vision_hidden": 16,
    "vision_layers": 3,
    "vision_heads": 2,
}
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["one_tower", "two_towers"])


def made(folder: Path, **options: Any) -> tuple[OpenVLAPolicy, OpenVLAConfig]:
    config = OpenVLAConfig(**{**SIZES, **options})
    first = folder / "first"
    first.mkdir(parents=True)
    OpenVLAPolicy.create(config, SPEC, 0, first)
    policy = OpenVLAPolicy.load(first, config)
    stirred(policy)
    policy.save(folder, policy.module.state_dict())
    return policy, config


@FUSED
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_the_trainer_recomputes_what_was_generated_with_a_cache(
    tmp_path: Path, temperature: float, fused: bool
) -> None:
    _, config = made(tmp_path, use_fused_vision_backbone=fused)
    records = acting.rolled_out(OpenVLAPolicy, config, tmp_path, temperature)
    assert records[0].logprobs.shape == (3, 1, 3)
    learns = acting.trainer(OpenVLAPolicy, config, tmp_path)
    acting.assert_recomputed(learns, records, temperature)
    learns.close()


def test_a_first_update_has_ratios_of_one_and_a_gradient(tmp_path: Path) -> None:
    _, config = made(tmp_path)
    records = acting.rolled_out(OpenVLAPolicy, config, tmp_path)
    acting.assert_first_update(acting.trainer(OpenVLAPolicy, config, tmp_path), records, "token")


def test_two_processes_that_share_a_policy_learn_what_one_learns(tmp_path: Path) -> None:
    made(tmp_path)
    acting.assert_shares_learn_what_one_learns(OpenVLAPolicy, __name__, tmp_path)


@FUSED
def test_a_component_depends_on_those_before_it(tmp_path: Path, fused: bool) -> None:
    policy, config = made(tmp_path, use_fused_vision_backbone=fused)
    batch = policy.collate(acting.rolled_out(OpenVLAPolicy, config, tmp_path))
    with torch.no_grad():
        before = policy.evaluate(batch, 1.0).logprobs
        for component in range(3):
            tokens = batch["actions"].clone()
            first = policy.module.first_action_token_id
            tokens[..., component] = first + (tokens[..., component] - first + 100) % 256
            after = policy.evaluate({**batch, "actions": tokens}, 1.0).logprobs
            is_equal = [bool((after == before)[..., k].all()) for k in range(3)]
            assert is_equal == [k < component for k in range(3)]


def test_the_language_model_reads_what_openvla_reads(tmp_path: Path) -> None:
    """First token, patches of each picture, rest of the prompt, then the tokens, causally."""
    policy, _ = made(tmp_path, use_fused_vision_backbone=True)
    network = policy.module
    steps = acting.request(3, 0).steps
    seen = {name: torch.tensor(column) for name, column in steps.items()}
    with torch.no_grad():
        found = policy.act(seen, None, 1.0)
    tokenizer = Tokenizer.from_file(str(tmp_path / TOKENIZER_FILE))
    model, towers = network.language_model, network.vision_backbone
    means = torch.tensor([[0.485, 0.456, 0.406], [0.5] * 3]).reshape(2, 3, 1, 1)
    deviations = torch.tensor([[0.229, 0.224, 0.225], [0.5] * 3]).reshape(2, 3, 1, 1)
    for row, text in enumerate((acting.TEXTS[0], acting.TEXTS[1], acting.TEXTS[0])):
        words = f"In: What action should the robot take to {text}?\nOut:"
        embed = model.get_input_embeddings()
        ids = torch.tensor([tokenizer.encode(words).ids])
        tokens = found["tokens"][row : row + 1, 0]
        with torch.no_grad():
            patches = []
            for camera in ("front", "wrist"):
                picture = torch.tensor(steps[f"images.{camera}"][row]).permute(2, 0, 1) / 255
                dino, siglip = ((picture - means) / deviations).split(1)
                features = torch.cat([towers.featurizer(dino), towers.fused_featurizer(siglip)], -1)
                patches.append(network.projector(features))
            prompt = embed(ids)
            inputs = torch.cat([prompt[:, :1], *patches, prompt[:, 1:], embed(tokens)], 1)
            logits = model(inputs_embeds=inputs, use_cache=False).logits[0, -4:-1]
        logprobs = F.log_softmax(logits[:, -256:], -1)
        assert torch.equal(logprobs.argmax(-1) + network.first_action_token_id, tokens[0])
        wanted = logprobs.max(-1).values
        assert torch.allclose(found["logprob"][row, 0], wanted, atol=1e-5)


def test_a_folder_that_decodes_otherwise_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(DataError, match=r"config\.json: .*set model\.name=openvla$"):
        OpenVLAOFTPolicy.check_spec(OpenVLAOFTConfig(path=tmp_path), SPEC)
