"""Generation on a GPU: tokens and actions are those of a CPU, with and without CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.channels.channel import LocalChannel
from rlinf.data.record import Record, RecordId
from rlinf.device_memory import DeviceMemoryManager
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.engines.transformers import TransformersConfig, TransformersEngine
from rlinf.models.actor_critic import MLPPolicy
from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig
from tests.gpu.devices import CUDA
from tests.rlinf.engines import test_direct as direct

ROWS, PROMPT = 24, 12


def make_folder(folder: Path, architecture: Any) -> CausalLMConfig:
    config = CausalLMConfig(
        architecture=architecture, hidden=64, layers=3, heads=4, kv_heads=2, intermediate=96
    )
    folder.mkdir(exist_ok=True)
    CausalLM.create(config, {"alphabet": "0123456789+="}, 7, folder)
    return config


def make_engine(folder: Path, config: Any, **options: Any) -> TransformersEngine:
    engine = TransformersEngine(
        TransformersConfig(max_num_seqs=ROWS // 4, **options), CausalLM, config
    )
    engine.load(folder, 0)
    return engine


def generate(engine: TransformersEngine, horizon: int) -> dict[int, Any]:
    """Return tokens and log-probabilities by sample; a fourth of the rows may be decoded at once,
    so rows join and leave the batch."""
    random = np.random.default_rng(0)
    steps = {
        "sample": np.arange(ROWS),
        "prompt": random.integers(2, 12, (ROWS, PROMPT)),
        "prompt_length": random.integers(3, PROMPT, ROWS),
    }
    requests = LocalChannel()
    requests.put(Record(RecordId(0, 0), steps, info={"horizon": horizon, "temperature": 1.0}))
    requests.close()
    found = {}
    for reply in engine.generate(requests, seed=0, stage="rollout"):
        columns = (reply.steps[name] for name in ("sample", "length", "tokens", "logprobs"))
        for sample, length, tokens, logprobs in zip(*columns, strict=True):
            found[int(sample)] = (tokens[:length], logprobs[:length])
    assert len(found) == ROWS
    return found


def assert_equal(ours: dict[int, Any], theirs: dict[int, Any]) -> None:
    """A random number may fall between two roundings of one boundary, after which rows differ."""
    differing = 0
    for sample, (tokens, logprobs) in theirs.items():
        other_tokens, other_logprobs = ours[sample]
        count = min(len(tokens), len(other_tokens))
        changed = np.flatnonzero(tokens[:count] != other_tokens[:count])
        stop = int(changed[0]) if len(changed) else count
        differing += stop < count or len(tokens) != len(other_tokens)
        np.testing.assert_allclose(other_logprobs[:stop], logprobs[:stop], rtol=0, atol=1e-4)
    assert differing <= 2


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("horizon", [24, 300])
def test_tokens_are_those_of_a_cpu(
    tmp_path: Path, device: str, architecture: str, horizon: int
) -> None:
    config = make_folder(tmp_path, architecture)
    cpu = generate(make_engine(tmp_path, config, device="cpu"), horizon)
    for graphs in (True, False):
        engine = make_engine(tmp_path, config, device=device, cuda_graphs=graphs)
        assert_equal(generate(engine, horizon), cpu)


def test_a_graph_computes_with_the_weights_that_came_later(tmp_path: Path, device: str) -> None:
    config = make_folder(tmp_path, "qwen2")
    cpu, gpu = (make_engine(tmp_path, config, device=name) for name in ("cpu", device))
    generate(gpu, 24)
    generator = torch.Generator().manual_seed(1)
    changed = [
        (name, tensor.cpu() + 0.05 * torch.randn(tensor.shape, generator=generator))
        for name, tensor in cpu._module.state_dict().items()
    ]
    for engine in (cpu, gpu):
        engine.load_state(changed, 1)
    assert_equal(generate(gpu, 24), generate(cpu, 24))


def test_weights_that_were_offloaded_are_those_of_the_graph(tmp_path: Path, device: str) -> None:
    config = make_folder(tmp_path, "qwen2")
    gpu = make_engine(tmp_path, config, device=device)
    before = generate(gpu, 24)
    manager = DeviceMemoryManager(torch.device(device), 1 << 30)
    manager.acquire(gpu)
    manager.offload_all()
    assert not any(size.on_device for size in gpu.group_sizes().values())
    torch.empty(1 << 24, device=device)  # so that the weights come back to other addresses
    manager.acquire(gpu)
    assert_equal(generate(gpu, 24), before)


@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_actions_are_those_of_a_cpu(tmp_path: Path, device: str, kind: str) -> None:
    cpu = direct.make(kind, tmp_path)
    gpu = DirectEngine(DirectConfig(device=device), MLPPolicy, direct.CONFIG)
    gpu.load(tmp_path, 3)
    mine, right = (direct.ask(e, range(5), direct.seen(5)) for e in (gpu, cpu))
    assert mine.keys() == right.keys()
    for name, column in right.items():
        np.testing.assert_allclose(mine[name], column, rtol=0, atol=1e-5)
