"""vLLM and SGLang on a device: they answer as the policy, make room, and take newer weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.device_memory import DeviceMemoryManager
from rlinf.engines import engines
from rlinf.models.causal_lm import CausalLM
from tests.contracts.test_engine import TOKENS, Rows, Tried
from tests.gpu.devices import need_interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def assert_of_policy(tried: Tried, got: Rows) -> None:
    """The log-probabilities of the answers are those of the policy on a CPU."""
    request = tried.request(range(6))
    pairs = [tried.actions_and_logprobs(got[number]) for number in range(6)]
    expected = tried.logprobs_of(request, [tokens for tokens, _ in pairs], 1.0)
    for (_, logprobs), right in zip(pairs, expected, strict=True):
        np.testing.assert_allclose(logprobs, right, atol=1e-3)


@pytest.mark.parametrize("name", ["sglang", "sglang_in_process", "vllm", "vllm_in_process"])
def test_an_engine_makes_room_and_takes_newer_weights(
    name: str, device: str, tmp_path: Path
) -> None:
    package, _, is_in_process = name.partition("_")
    options: dict[str, Any] = {"device": device, "kv_cache_gib": 0.25}
    if not is_in_process:
        options["server_python"] = need_interpreter(package, device)
    elif find_spec(package) is None:
        pytest.skip(f"the package {package} is not in this environment")
    folder = tmp_path / "model"
    folder.mkdir()
    CausalLM.create(TOKENS, {"alphabet": "0123456789+="}, 0, folder)
    policy = CausalLM.load(folder, TOKENS)
    cls = engines.get(name)
    engine = cls(cls.Config.model_validate(options), CausalLM, TOKENS)
    engine.log_folder = tmp_path / "logs"
    tried = Tried(engine, "tokens", folder, policy)
    try:
        engine.load(folder, 1)
        before = tried.answers(tried.request(range(6)))
        assert_of_policy(tried, before)
        manager = DeviceMemoryManager(torch.device(device), 1 << 40)
        manager.acquire(engine)
        free = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
        manager.offload_all()
        if device == "cuda":  # on a CPU, engines do not sleep
            assert not any(size.on_device for size in engine.group_sizes().values())
            assert torch.cuda.mem_get_info()[0] - free > 0.9 * 0.25 * 2**30
        manager.acquire(engine)
        assert_of_policy(tried, tried.answers(tried.request(range(6))))
        with torch.no_grad():
            for parameter in policy.module.parameters():
                parameter.mul_(1.5)
        weights = policy.module.state_dict().items()
        manager.offload_all()
        manager.acquire(engine, copy_data=False)
        engine.load_state(CausalLM.engine_weights(weights), 2)
        assert_of_policy(tried, tried.answers(tried.request(range(6))))
    finally:
        engine.close()
