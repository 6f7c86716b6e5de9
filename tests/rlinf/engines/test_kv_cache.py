"""The default context and KV cache of vLLM and SGLang fit the run, the model and the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlinf.config import RunConfig, validate
from rlinf.engines import engines
from rlinf.engines.sglang import sglang_args
from rlinf.engines.vllm import vllm_args
from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig
from stages.factory import required_context

GIB = 1 << 30
QWEN_7B = {"layers": 28, "heads": 28, "kv_heads": 4, "hidden": 3584}
EXTERNAL = ["vllm", "vllm_in_process", "sglang", "sglang_in_process"]


@pytest.fixture
def engine_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Create an engine for a model with the shape of Qwen2.5-7B and 32,768 positions."""
    small = CausalLMConfig(
        architecture="qwen2", hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64
    )
    small = small.model_copy(update={"max_position_embeddings": 32768})
    CausalLM.create(small, {"alphabet": "0123456789+="}, 0, tmp_path)

    def create(
        name: str, gpu_gib: float | None = None, context: int | None = None, **settings: Any
    ) -> Any:
        cls = engines.get(name)
        engine = cls(cls.Config(**settings), CausalLM, CausalLMConfig(path=tmp_path))
        engine.required_context = context
        if gpu_gib is not None:
            engine.device = torch.device("cuda:0")
            properties = SimpleNamespace(total_memory=int(gpu_gib * GIB))
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        engine._read_model(tmp_path)
        shape = {
            "num_hidden_layers": QWEN_7B["layers"],
            "num_attention_heads": QWEN_7B["heads"],
            "num_key_value_heads": QWEN_7B["kv_heads"],
            "hidden_size": QWEN_7B["hidden"],
            "head_dim": 128,
        }
        engine._text_config = SimpleNamespace(**shape)
        engine._policy_config = engine._policy_config.model_copy(update={"dtype": "bfloat16"})
        return engine

    return create


def value_after(arguments: list[str], flag: str) -> int:
    return int(arguments[arguments.index(flag) + 1])


def tokens_in_cache(engine: Any, name: str, folder: Path) -> tuple[int, int]:
    """Return the context length and the tokens of the cache on the command line."""
    if name.startswith("sglang"):
        arguments = sglang_args(engine, folder, engine._max_model_len)
        context = value_after(arguments, "--context-length") - 8
        return context, value_after(arguments, "--max-total-tokens")
    arguments = vllm_args(engine, folder, engine._max_model_len)
    cache = value_after(arguments, "--kv-cache-memory-bytes")
    return value_after(arguments, "--max-model-len"), cache // engine.kv_bytes_per_token()


@pytest.mark.parametrize("name", EXTERNAL)
def test_a_7b_model_starts_with_default_settings(
    name: str, engine_of: Callable[..., Any], tmp_path: Path
) -> None:
    engine = engine_of(name, gpu_gib=80, context=1024 + 512)
    assert engine.kv_bytes_per_token() == 2 * 28 * 4 * 128 * 2
    context, tokens = tokens_in_cache(engine, name, tmp_path)
    assert context == 1536
    assert 256 * 1536 <= tokens <= 256 * (1536 + 256), "all samples at once"
    engine = engine_of(name, gpu_gib=80)
    context, tokens = tokens_in_cache(engine, name, tmp_path)
    assert context == 32768, "unknown: the limit of the model"
    assert tokens * engine.kv_bytes_per_token() == pytest.approx(0.4 * 80 * GIB, rel=1e-3)


@pytest.mark.parametrize("name", ["vllm", "vllm_in_process"])
def test_vllm_starts_beside_a_trainer_that_keeps_most_of_the_gpu(
    name: str, engine_of: Callable[..., Any], tmp_path: Path
) -> None:
    engine = engine_of(name, gpu_gib=80, context=1536, kv_cache_gib=6)
    arguments = vllm_args(engine, tmp_path, 1536)
    share = float(arguments[arguments.index("--gpu-memory-utilization") + 1])
    assert engine.device_bytes() < share * 80 * GIB < engine.device_bytes() + 3 * GIB
    engine = engine_of(name, gpu_gib=8, context=1536, kv_cache_gib=6)
    arguments = vllm_args(engine, tmp_path, 1536)
    assert arguments[arguments.index("--gpu-memory-utilization") + 1] == "0.900"
    engine.device = torch.device("cpu")
    assert "--gpu-memory-utilization" not in vllm_args(engine, tmp_path, 1536)


@pytest.mark.parametrize("name", EXTERNAL)
def test_one_sample_always_fits(name: str, engine_of: Callable[..., Any], tmp_path: Path) -> None:
    context, tokens = tokens_in_cache(engine_of(name), name, tmp_path)
    assert tokens >= context == 32768, "the cache of a CPU would be too small with 1 GiB"
    context, tokens = tokens_in_cache(engine_of(name, max_model_len=2000), name, tmp_path)
    assert context == 2000
    engine = engine_of(name, context=100_000)
    assert engine._max_model_len == 32768, "not more than the model's"


def test_what_is_set_is_used(engine_of: Callable[..., Any], tmp_path: Path) -> None:
    engine = engine_of("vllm", gpu_gib=80, context=1536, kv_cache_gib=2.5)
    assert engine.kv_cache_bytes() == 2.5 * GIB
    engine = engine_of("sglang", gpu_gib=80, context=1536, max_total_tokens=5000)
    assert tokens_in_cache(engine, "sglang", tmp_path) == (1536, 5000)


def test_the_context_is_that_of_prompts_and_the_longest_response(
    compose: Callable[..., Any], tmp_path: Path
) -> None:
    words = [f"task.train={tmp_path}", f"task.test={tmp_path}", f"model.path={tmp_path}"]
    values = compose(*words, "evaluate.horizon=700", experiment="jsonl_grpo")
    assert required_context(validate(RunConfig, values)) == 1024 + 700
    assert required_context(validate(RunConfig, compose())) is None
