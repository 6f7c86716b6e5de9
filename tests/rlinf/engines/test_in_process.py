"""Engines of other projects in the process of the stage: what else is in it is as it was.

Run in the environments that have them (:mod:`tests.contracts.test_environments`).
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.engines import engines
from rlinf.engines.resumable import SegmentRequest
from rlinf.engines.token_sampling import SamplingParams
from rlinf.engines.vllm import vllm_sampling_params
from rlinf.errors import ConfigError, DataError, StageError
from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig
from tests.contracts.test_engine import TOKENS, Tried, assert_alike
from tests.rlinf.engines.test_external import engine_of, skips, tried

__all__ = ["tried"]
NAMES = ["sglang_in_process", "vllm_in_process"]


@pytest.fixture(scope="module", params=map(skips, NAMES))
def opened(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tried]:
    yield from engine_of(request.param, tmp_path_factory.mktemp("engine"))


def network_of(inner: Any) -> Any:
    """The module that an engine of the other project computes with."""
    if hasattr(inner, "model_executor"):
        return inner.model_executor.driver_worker.worker.model_runner.get_model()
    return inner.model


def test_requests_that_are_there_from_the_beginning_give_the_same_bytes_again(tried: Tried) -> None:
    requests = [tried.request(range(9)), tried.request(range(9, 20), temperature=0.7)]
    tried.engine.load(tried.folder, 3)  # nothing is cached
    first = tried.answers(*requests)
    tried.engine.load(tried.folder, 3)
    for number, row in tried.answers(*requests).items():
        for name, column in row.items():
            assert column.tobytes() == first[number][name].tobytes()


def test_its_start_leaves_the_process_as_it_was(tried: Tried) -> None:
    own: Any = tried.engine
    own.close()
    threads, gone, root = torch.set_num_threads, set(os.environ), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    children = psutil.Process().children(recursive=True)
    own.load(tried.folder, 3)
    assert torch.set_num_threads is threads
    new = set(os.environ) - gone
    assert {name for name in new if not name.startswith(("SGLANG_", "VLLM_"))} == set()
    assert "LD_PRELOAD" not in os.environ
    assert (root.handlers, root.level) == (handlers, level)
    assert gc.get_freeze_count() == 0
    assert psutil.Process().children(recursive=True) == children
    shared = [path.name for path in Path("/dev/shm").glob("rlinf-*")]
    assert not [name for name in shared if f"-{os.getpid()}-" in name]


def test_the_process_group_of_a_trainer_outlives_it(tried: Tried) -> None:
    """And the weights do not."""
    own: Any = tried.engine
    assert dist.get_world_size() == 1
    network = weakref.ref(network_of(own.backend))
    assert network() is not None
    own.close()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 1
    assert network() is None
    own.load(tried.folder, 3)


def test_weights_that_do_not_fit_close_it(tried: Tried) -> None:
    """And it can be loaded again."""
    request = tried.request()
    before = tried.answers(request)
    state = dict(tried.policy.module.state_dict())
    name = next(name for name in state if "mlp" in name)
    wrong = {**state, name: state[name][:1]}
    lacks = {n: tensor for n, tensor in state.items() if n != name}
    for tensors in (wrong, lacks):
        with pytest.raises(DataError, match=name):
            tried.engine.load_state(tensors.items(), 4)
        assert tried.engine.version == -1
        with pytest.raises(DataError, match="load a folder first"):
            tried.engine.load_state(state.items(), 4)
        tried.engine.load(tried.folder, 3)
        assert_alike(tried.answers(request), before, tried)


def test_a_network_that_passes_over_weights_closes_it(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each update: such weights would stay those of an older version."""
    own: Any = tried.engine
    request = tried.request()
    before = tried.answers(request)
    network = type(network_of(own.backend))
    load = network.load_weights

    def some(self: Any, weights: Any) -> Any:
        return load(self, ((name, w) for name, w in weights if "down_proj" not in name))

    with monkeypatch.context() as patched:
        patched.setattr(network, "load_weights", some)
        with pytest.raises(RuntimeError, match=r"weights for .*down_proj"):
            own.load_state(tried.policy.module.state_dict().items(), 4)
    assert own.backend is None
    own.load(tried.folder, 3)
    assert_alike(tried.answers(request), before, tried)


def test_a_step_that_fails_is_told_and_closes_it(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests would be half done in it."""
    own: Any = tried.engine
    request = tried.request(range(6), horizon=40, min_tokens=40)
    before = tried.answers(request)
    for last in (1, 3):
        own.load(tried.folder, 3)  # nothing is cached
        steps, step = itertools.count(1), own.backend.step

        def fails(step: Any = step, steps: Any = steps, last: int = last) -> Any:
            if next(steps) == last:
                raise ValueError("no memory")
            return step()

        monkeypatch.setattr(own.backend, "step", fails)
        with pytest.raises(ValueError, match="no memory"):
            tried.answers(request)
        assert own.version == -1
        own.load(tried.folder, 3)
        assert_alike(tried.answers(request), before, tried)


def test_a_start_that_fails_leaves_the_process_group(tried: Tried) -> None:
    own: Any = tried.engine
    own.close()
    cls = type(own)
    engine: Any = cls(cls.Config(extra_args=("--no-such-word",)), CausalLM, TOKENS)
    with pytest.raises(
        ConfigError, match=r"engine\.extra_args: .*does not accept all of .*no-such"
    ):
        engine.load(tried.folder, 3)
    assert dist.get_world_size() == 1
    own.load(tried.folder, 3)


def test_another_network_takes_its_place(tried: Tried, tmp_path: Path) -> None:
    narrow = TOKENS.model_copy(update={"layers": 1})
    CausalLM.create(narrow, {"alphabet": "0123456789+="}, 1, tmp_path)
    other = Tried(tried.engine, "tokens", tmp_path, CausalLM.load(tmp_path, narrow))
    other.engine.load(tmp_path, 4)
    request = other.request(range(4))
    got = other.answers(request)
    expected_logprobs = other.logprobs_of(
        request, [other.actions_and_logprobs(got[n])[0] for n in range(4)], 1.0
    )
    for number, expected in enumerate(expected_logprobs):
        np.testing.assert_allclose(other.actions_and_logprobs(got[number])[1], expected, atol=1e-5)


@pytest.mark.parametrize("name", map(skips, NAMES))
def test_it_is_in_no_process_with_a_trainer_of_several(name: str, tmp_path: Path) -> None:
    """Whichever of the two comes first."""
    CausalLM.create(TOKENS, {"alphabet": "0123456789+="}, 0, tmp_path)
    ProcessGroupInfo().init_process_group("cpu")
    with pytest.raises(StageError, match="process group of 1, and its stage has 2 processes"):
        ProcessGroupInfo(0, 2).init_process_group("cpu")
    cls = engines.get(name)
    engine = cls(cls.Config(), CausalLM, TOKENS)
    engine.world = ProcessGroupInfo(0, 2)
    with pytest.raises(ConfigError, match=rf"engine\.name: {name} cannot share a process"):
        engine.load(tmp_path, 1)


@pytest.mark.parametrize("index", [0, 3])
def test_vllm_computes_on_the_gpu_whose_index_its_device_has(index: int) -> None:
    """This is how ranks that see all GPUs of their job get different ones."""
    executors = pytest.importorskip("vllm.v1.executor.uniproc_executor")
    device_config = SimpleNamespace(device=torch.device("cuda", index))
    executor = SimpleNamespace(vllm_config=SimpleNamespace(device_config=device_config))
    *_, local_rank = executors.UniProcExecutor._distributed_args(executor)
    assert local_rank == index


@pytest.mark.parametrize(("seeds", "seed"), [(True, 17), (False, None)])
def test_vllm_gets_seeds_of_requests_unless_they_are_switched_off(
    seeds: bool, seed: int | None, tmp_path: Path
) -> None:
    cls = engines.get("vllm_in_process")
    engine: Any = cls(cls.Config(request_seeds=seeds), CausalLM, CausalLMConfig(path=tmp_path))
    request = SegmentRequest([1, 2], 4, 1, 17, SamplingParams(4))
    assert vllm_sampling_params(engine, request)["seed"] == seed
