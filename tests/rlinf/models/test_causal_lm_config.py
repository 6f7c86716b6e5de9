"""Each architecture trains, packs and takes adapters; windows, caps and experts are its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors import safe_open

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.engines.fused_decoding import FUSED_FAMILIES, FusedDecodeStep
from rlinf.engines.transformers import TransformersConfig, TransformersEngine
from rlinf.errors import ConfigError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.causal_lm_config import MOE_FAMILIES, SLIDING_WINDOW_FAMILIES, Architecture
from rlinf.models.causal_lm_critic import CausalLMCritic, CausalLMCriticConfig
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from tests.rlinf.trainers.test_threaded_data_parallel import loss, records

ALL = get_args(Architecture)
SIZES: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64}
LR = 1e-2


def config_of(architecture: str, cls: type[CausalLMConfig] = CausalLMConfig) -> CausalLMConfig:
    window = {"sliding_window": 4} if architecture in SLIDING_WINDOW_FAMILIES else {}
    return cls(architecture=architecture, **SIZES, **window)  # type: ignore[arg-type]


def folder_of(architecture: str, path: Path) -> Path:
    CausalLM.create(config_of(architecture), {"alphabet": "0123456789+="}, 0, path)
    return path


def trainer(folder: Path, **options: Any) -> FSDPTrainer:
    config = FSDPConfig.model_validate(
        {"device": "cpu", "max_tokens_per_microbatch": 40, **options}
    )
    policy = CausalLM.load(folder, CausalLMConfig())
    return FSDPTrainer(policy, config, OptimizerSection(lr=LR, name="sgd"), ProcessGroupInfo())


def change(made: FSDPTrainer) -> dict[str, torch.Tensor]:
    """What an update adds to the weights."""
    before = {name: tensor.clone() for name, tensor in made.full_state_dict().items()}
    made.step(records(), loss, lr=LR)
    return {name: tensor - before[name] for name, tensor in made.full_state_dict().items()}


@pytest.mark.parametrize("architecture", ALL)
def test_packed_rows_train_as_padded_ones(architecture: str, tmp_path: Path) -> None:
    folder = folder_of(architecture, tmp_path)
    packed, padded = (change(trainer(folder, packing=packing)) for packing in (True, False))
    largest = max(float(tensor.abs().max()) for tensor in padded.values())
    assert largest > 1e-4
    for name, tensor in padded.items():
        torch.testing.assert_close(packed[name], tensor, rtol=0, atol=1e-4 * largest, msg=name)


@pytest.mark.parametrize("architecture", ALL)
def test_adapters_are_merged_into_what_others_load(architecture: str, tmp_path: Path) -> None:
    start, merged = tmp_path / "start", tmp_path / "merged"
    start.mkdir()
    merged.mkdir()
    made = trainer(folder_of(architecture, start), lora={"rank": 4, "alpha": 8.0})
    changed = {name for name, tensor in change(made).items() if tensor.any()}
    assert changed
    assert all("_proj" in name for name in changed)
    # Weights of experts are no linear layers of their own, and stay as they are.
    assert not any("experts" in name for name in changed)
    made.policy.save_state(merged, made.stream_weights())
    outputs = [made.forward(records(), 1.0), trainer(merged).forward(records(), 1.0)]
    for (_, one), (_, other) in zip(*outputs, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ALL)
def test_a_saved_folder_has_the_names_of_a_published_one(architecture: str, tmp_path: Path) -> None:
    start, saved = tmp_path / "start", tmp_path / "saved"
    start.mkdir()
    saved.mkdir()
    made = trainer(folder_of(architecture, start))
    change(made)
    made.policy.save_state(saved, made.stream_weights())
    known = []
    for folder in (start, saved):
        with safe_open(folder / "model.safetensors", "pt") as file:
            known.append({name: file.get_slice(name).get_shape() for name in file.keys()})  # noqa: SIM118
    assert known[0] == known[1]
    if architecture in MOE_FAMILIES:
        assert any(".experts.3." in name for name in known[1])
    again = trainer(saved).full_state_dict()
    for name, tensor in made.full_state_dict().items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize("architecture", ALL)
def test_the_fused_step_is_for_the_architectures_it_computes(
    architecture: str, tmp_path: Path
) -> None:
    folder = folder_of(architecture, tmp_path)
    engine = TransformersEngine(TransformersConfig(device="cpu"), CausalLM, CausalLMConfig())
    engine.load(folder, 0)
    assert isinstance(engine._fused_step, FusedDecodeStep) is (architecture in FUSED_FAMILIES)


def test_a_cap_on_logits_is_none_on_values(tmp_path: Path) -> None:
    config = config_of("gemma2", CausalLMCriticConfig)
    CausalLMCritic.create(config, {"alphabet": "0123456789+="}, 0, tmp_path)
    policy = CausalLMCritic.load(tmp_path, config)
    assert policy.network.config.final_logit_softcapping == 30
    with torch.no_grad():
        policy.module.value_head.weight.fill_(1.0).mul_(1e3 * torch.randn(32))
        outputs = policy.evaluate(policy.collate(records()), 1.0)
    assert outputs.values is not None
    assert float(outputs.values.abs().max()) > 100


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"architecture": "gemma"}, "Input should be 'qwen2'"),
        ({"sliding_window": 4}, r"model\.sliding_window: qwen2 has no layers with a window"),
        ({"num_experts": 4}, r"model\.num_experts: qwen2 has no experts"),
        (
            {"architecture": "olmoe", "num_experts": 2, "num_experts_per_tok": 3},
            r"model\.num_experts_per_tok: a token cannot have 3 of model\.num_experts=2",
        ),
    ],
)
def test_what_an_architecture_does_not_have_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=words):
        CausalLM.check_spec(CausalLMConfig(**SIZES, **given), {"alphabet": "01"})
