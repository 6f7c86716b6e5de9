"""The fused step computes what the library's modules do, with the weights that they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf.engines.fused_decoding import FusedDecodeStep
from rlinf.engines.transformers import TransformersConfig, TransformersEngine
from rlinf.models.causal_lm import CausalLM, CausalLMConfig

FAMILIES = ("qwen2", "qwen3", "llama")


def engine_of(folder: Path, architecture: Any, **more: Any) -> TransformersEngine:
    config = CausalLMConfig(
        architecture=architecture, hidden=32, layers=3, heads=4, kv_heads=2, intermediate=48
    )
    folder.mkdir(exist_ok=True)
    CausalLM.create(config, {"alphabet": "0123456789"}, 7, folder)
    engine = TransformersEngine(TransformersConfig(**more), CausalLM, config)
    engine.load(folder, 0)
    return engine


def prefill(engine: TransformersEngine, contexts: list[Any], free_columns: int) -> Any:
    """Compute contexts, and return logits, cache and mask."""
    computation = engine.prefill(contexts, free_columns)
    while True:
        try:
            next(computation)
        except StopIteration as end:
            return end.value


def steps(engine: TransformersEngine) -> list[Tensor]:
    """Logits of five tokens after contexts of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    contexts = [
        torch.randint(2, 12, (length,), generator=generator).numpy() for length in (3, 7, 5, 7)
    ]
    with torch.inference_mode():
        logits, cache, attend = prefill(engine, contexts, 6)
        found = [logits]
        position = torch.tensor([[len(context)] for context in contexts])
        for _ in range(5):
            attend[:, cache.length] = True
            tokens = torch.randint(2, 12, (4, 1), generator=generator)
            visible = attend[:, None, None, : cache.length + 1]
            found.append(engine.forward(tokens, position, visible, cache))
            position = position + 1
    return found


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_are_those_of_the_modules(tmp_path: Path, architecture: str) -> None:
    engine = engine_of(tmp_path, architecture)
    assert engine._fused_step is not None
    found = steps(engine)
    engine._fused_step = None
    for ours, theirs in zip(found, steps(engine), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_weights_that_come_later_are_those_it_computes_with(
    tmp_path: Path, architecture: str
) -> None:
    engine, other = (engine_of(tmp_path / name, architecture) for name in ("a", "b"))
    before = steps(engine)
    generator = torch.Generator().manual_seed(1)
    changed = [
        (name, tensor + 0.1 * torch.randn(tensor.shape, generator=generator))
        for name, tensor in engine._module.state_dict().items()
    ]
    engine.load_state(changed, 1)
    other.load_state(changed, 1)
    other._fused_step = None
    after = steps(engine)
    for ours, theirs, old in zip(after, steps(other), before, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(ours, old, atol=1e-3)


def test_its_weights_take_no_memory_of_their_own(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "qwen2")
    storages = {t.untyped_storage() for t in engine._module.state_dict().values()}
    chosen = sum(storage.nbytes() for storage in storages)
    assert chosen == sum(p.nbytes for p in engine._module.parameters())


def test_what_has_left_the_device_comes_back_for_it(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "qwen2")
    before = steps(engine)
    with torch.no_grad():
        engine.offload("weights", 1 << 40)
        engine.onload(["weights"], copy_data=True)
    for ours, old in zip(steps(engine), before, strict=True):
        assert torch.equal(ours, old)


def test_weights_that_are_put_in_the_place_of_its_own_are_computed_with(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "qwen2")
    layer = engine._module.model.layers[1].self_attn
    layer.q_proj.weight = torch.nn.Parameter(2 * layer.q_proj.weight.detach())
    assert engine._fused_step is not None
    assert not engine._fused_step.is_valid
    found = steps(engine)
    assert engine._fused_step is None
    for ours, theirs in zip(found, steps(engine), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_in_bfloat16_it_is_as_near_as_the_modules_are(tmp_path: Path) -> None:
    exact = steps(engine_of(tmp_path, "qwen3"))
    engine = engine_of(tmp_path, "qwen3", dtype="bfloat16")
    fused = steps(engine)
    engine._fused_step = None
    for ours, theirs, wanted in zip(fused, steps(engine), exact, strict=True):
        gap = float((theirs - wanted).abs().max())
        assert float((ours - wanted).abs().max()) <= 2 * gap + 1e-3


@pytest.mark.parametrize(
    "change", [{"hidden_act": "gelu"}, {"layer_types": ["sliding_attention"]}, {"mlp_bias": True}]
)
def test_other_networks_go_their_own_way(tmp_path: Path, change: dict[str, Any]) -> None:
    module = engine_of(tmp_path, "qwen2")._module
    assert FusedDecodeStep.from_module(module) is not None
    for name, value in change.items():
        setattr(module.config, name, value)
    assert FusedDecodeStep.from_module(module) is None
