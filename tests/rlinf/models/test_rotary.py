"""Rotary frequencies that depend on a length are those of the run, not of a call's longest row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.engines.sglang import SGLangEngine
from rlinf.engines.vllm import VLLMConfig, VLLMEngine
from rlinf.errors import ConfigError, DataError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.packed_attention import PACKABLE_FAMILIES
from rlinf.models.rotary import freeze_rotary, length_scaling
from tests.rlinf.models import tiny
from tests.rlinf.models.tiny_families import tiny_settings

LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + k for k in range(8)],
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONG, "original_max_position_embeddings": 16},
    "llama": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "max_position_embeddings": 16,
    },
    "gemma3_text": {
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": LONG,
        },
    },
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    return tiny.write(folder, request.param, **FAMILIES[request.param])


@pytest.mark.parametrize("context", [None, 48])
def test_a_sample_draws_the_same_tokens_alone_and_beside_longer_ones(
    family: CausalLMConfig, context: int | None
) -> None:
    served = tiny.engine(family.model_copy(update={"max_model_len": context}))
    request = tiny.requests([3, 12, 5, 30], horizon=10)
    together = tiny.generate(served, request)
    for row in range(4):
        alone = tiny.generate(served, tiny.rows_of(request, [row]))[row]
        np.testing.assert_array_equal(alone[0], together[row][0])
        np.testing.assert_allclose(alone[1], together[row][1], atol=1e-6)


@pytest.mark.parametrize("context", [None, 48])
def test_engine_and_trainer_have_the_same_frequencies_across_the_threshold(
    family: CausalLMConfig, context: int | None
) -> None:
    config = family.model_copy(update={"max_model_len": context})
    assert config.path is not None
    request = tiny.requests([3, 12, 5, 30], horizon=10)
    records = tiny.trajectories(request, tiny.generate(tiny.engine(config), request))
    policy = CausalLM.load(config.path, config)
    found = policy.evaluate(policy.collate(records), 1.0).logprobs
    for row, record in zip(found, records, strict=True):
        expected = record.logprobs
        np.testing.assert_allclose(row[: len(expected)].detach(), expected, atol=1e-5)


def test_an_update_is_the_same_however_it_is_cut(family: CausalLMConfig) -> None:
    assert family.path is not None
    request = tiny.requests([3, 12, 5, 30], horizon=10)
    records = tiny.trajectories(request, tiny.generate(tiny.engine(family), request))

    def gradients(cuts: list[list[int]], packed: bool) -> dict[str, torch.Tensor]:
        assert family.path is not None
        policy = CausalLM.load(family.path, family)
        if packed:
            policy.enable_packing(torch.device("cpu"), torch.float32)
        for cut in cuts:
            batch = policy.collate([records[row] for row in cut])
            (-policy.evaluate(batch, 1.0).logprobs.sum() / 40).backward()  # type: ignore[no-untyped-call]
        return {n: p.grad for n, p in policy.module.named_parameters() if p.grad is not None}

    whole = gradients([[0, 1, 2, 3]], packed=False)
    cuts = [([[3], [0, 2], [1]], False)]
    if "phi3" in str(family.path):
        assert "phi3" in PACKABLE_FAMILIES
        cuts += [([[0, 1, 2, 3]], True), ([[0, 1], [2, 3]], True)]
    for cut, packed in cuts:
        for name, gradient in gradients(cut, packed).items():
            torch.testing.assert_close(gradient, whole[name], rtol=1e-5, atol=1e-6)


def test_the_length_of_the_run_chooses_the_frequencies(tmp_path: Path) -> None:
    tiny.write(tmp_path, "phi3", **FAMILIES["phi3"])
    found = {}
    for context in (None, 16, 17, 64):
        policy = CausalLM.load(tmp_path, CausalLMConfig(path=tmp_path, max_model_len=context))
        network: Any = policy.module
        network.model.rotary_emb(torch.zeros(1), torch.arange(60)[None])
        found[context] = network.model.rotary_emb.inv_freq.clone()
    assert torch.equal(found[None], found[16])
    assert torch.equal(found[17], found[64])
    assert not torch.equal(found[16], found[17])


def test_without_a_length_a_model_reads_as_far_as_its_plain_frequencies_reach(
    tmp_path: Path,
) -> None:
    phi = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    phi |= {"rope_scaling": {"type": "longrope"}}  # type: ignore[dict-item]
    scaling = length_scaling(phi)
    assert scaling is not None
    assert (scaling.original_length, scaling.max_length) == (4096, 131072)
    assert length_scaling({**phi, "rope_scaling": {"type": "su"}}) == scaling
    linear = {"max_position_embeddings": 8, "rope_scaling": {"type": "linear", "factor": 2}}
    assert length_scaling(linear) is None
    for name, settings in FAMILIES.items():
        config = tiny.write(tmp_path / name, name, **settings)
        assert CausalLM.max_model_len(config) == 16
        assert CausalLM.max_model_len(config.model_copy(update={"max_model_len": 40})) == 40


def test_a_length_beyond_the_model_is_refused(tmp_path: Path) -> None:
    tiny.write(tmp_path, "phi3", **FAMILIES["phi3"])
    with pytest.raises(ConfigError, match=r"model.max_model_len: 65 tokens do not fit into the 64"):
        CausalLM.check_spec(CausalLMConfig(path=tmp_path, max_model_len=65), {})
    with pytest.raises(
        ConfigError, match=r"model.max_model_len: 600 .* 512 .*model.max_position_embeddings"
    ):
        CausalLM.check_spec(CausalLMConfig(max_model_len=600), {"alphabet": "01"})


def test_engines_that_choose_other_frequencies_are_refused(tmp_path: Path) -> None:
    config = tiny.write(tmp_path / "a", "phi3", **FAMILIES["phi3"])
    VLLMEngine.check_rotary(VLLMConfig(), config)
    with pytest.raises(ConfigError, match=r"engine.name: SGLang .*longrope"):
        SGLangEngine.check_rotary(SGLangEngine.Config(), config)
    with pytest.raises(ConfigError, match=r"engine.max_model_len: .* set model.max_model_len=32"):
        VLLMEngine.check_rotary(VLLMConfig(max_model_len=32), config)
    config = tiny.write(tmp_path / "b", "llama", **FAMILIES["llama"])
    with pytest.raises(ConfigError, match=r"engine.name: VLLM .*dynamic"):
        VLLMEngine.check_rotary(VLLMConfig(), config)


def test_model_code_that_cannot_be_fixed_is_refused(tmp_path: Path) -> None:
    settings = {"max_position_embeddings": 8, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    with pytest.raises(DataError, match=r"no rotary embedding .* dynamic scaling"):
        freeze_rotary(torch.nn.Linear(2, 2), settings, None, "folder")


def phimoe(folder: Path) -> CausalLMConfig:
    """Write a mixture of experts as published: its scaling has magnitudes of its own."""
    rope = {**LONG, "short_mscale": 1.2, "long_mscale": 1.5}
    made = tiny_settings("phimoe", len(tiny.ALPHABET) + 2)
    made |= {"rope_parameters": rope, "original_max_position_embeddings": 16}
    return tiny.write(folder, "phimoe", made=made)


def test_a_rope_that_depends_on_the_longest_row_is_refused_at_loading(
    tmp_path: Path,
) -> None:
    config = phimoe(tmp_path)
    assert config.path is not None
    longer = config.model_copy(update={"max_model_len": 17})
    for refuse in (
        lambda: CausalLM.check_spec(longer, {}),
        lambda: CausalLM.load(tmp_path, longer),
    ):
        with pytest.raises(
            DataError, match=r"PhimoeRotaryEmbedding .* model.max_model_len .* to 16"
        ):
            refuse()


@pytest.mark.parametrize("family", [*FAMILIES, "phimoe"])
def test_a_row_has_the_same_log_probs_alone_and_beside_the_longest(
    tmp_path: Path, family: str
) -> None:
    if family == "phimoe":
        config = phimoe(tmp_path)
    else:
        config = tiny.write(tmp_path, family, **FAMILIES[family])
        config = config.model_copy(update={"max_model_len": 40})
    CausalLM.check_spec(config, {})
    longest = CausalLM.max_model_len(config)
    assert longest is not None
    policy = CausalLM.load(tmp_path, config)
    request = tiny.requests([3, longest - 6], horizon=6)
    records = tiny.trajectories(request, tiny.generate(tiny.engine(config), request))
    together = policy.evaluate(policy.collate(records), 1.0).logprobs
    for row, record in zip(together, records, strict=True):
        alone = policy.evaluate(policy.collate([record]), 1.0).logprobs[0]
        torch.testing.assert_close(row[: len(record)], alone, rtol=0, atol=1e-5)
        expected = record.logprobs
        np.testing.assert_allclose(alone.detach(), expected, atol=1e-5)


@pytest.mark.parametrize("family", ["hunyuan_v1_dense", "hunyuan_v1_moe"])
def test_a_dynamic_scaling_with_an_alpha_is_the_same_for_all_lengths(
    tmp_path: Path, family: str
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0}
    made = tiny_settings(family, len(tiny.ALPHABET) + 2)
    config = tiny.write(tmp_path, family, made={**made, "rope_parameters": rope})
    CausalLM.check_spec(config, {})
    VLLMEngine.check_rotary(VLLMConfig(), config)
    assert CausalLM.max_model_len(config) == 64
    policy = CausalLM.load(tmp_path, config)
    network: Any = policy.module
    size = network.config.head_dim
    base = 10000.0 * 1000.0 ** (size / (size - 2))
    expected = base ** (-torch.arange(0, size, 2) / size)
    torch.testing.assert_close(network.model.rotary_emb.inv_freq, expected)


def test_a_scaling_that_no_part_of_the_network_has_is_refused_at_the_door(tmp_path: Path) -> None:
    made = tiny_settings("gptj", len(tiny.ALPHABET) + 2)
    scaling = {"type": "dynamic", "factor": 2.0}
    tiny.write(tmp_path, "gptj", made=made)
    file = tmp_path / "config.json"
    known = {"max_position_embeddings": 64, "rope_scaling": scaling}
    file.write_text(json.dumps(json.loads(file.read_text()) | known))
    with pytest.raises(DataError, match=r"model.path: .* no rotary embedding .* dynamic scaling"):
        CausalLM.check_spec(CausalLMConfig(path=tmp_path), {})
