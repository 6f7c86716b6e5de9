"""A critic beside a language model: where it begins, what it sees, and where it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.errors import DataError
from rlinf.models.base import StepOutputs
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.causal_lm_critic import (
    CausalLMCritic,
    CausalLMCriticConfig,
    CriticType,
    split_state,
)
from rlinf.safetensors_io import StreamedState

SIZES = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64}
kinds = pytest.mark.parametrize("kind", get_args(CriticType))


def made(folder: Path, kind: CriticType, trained: bool = True) -> CausalLMCritic:
    config = CausalLMCriticConfig(**SIZES, critic=kind)
    CausalLMCritic.create(config, {"alphabet": "0123456789+="}, 0, folder)
    policy = CausalLMCritic.load(folder, config)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in policy.module.parameters() if trained else ():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=random))
    return policy


def record(actions: list[int], prompt: tuple[int, ...] = (2, 3, 4)) -> Trajectory:
    return Trajectory(identity=RecordId(0, 0), actions=np.array(actions), prompt=np.array(prompt))


def evaluate(policy: CausalLM, *records: Record) -> StepOutputs:
    with torch.no_grad():
        return policy.evaluate(policy.collate(records), 1.0)


def values(policy: CausalLM, *records: Record) -> Tensor:
    found = evaluate(policy, *records).values
    assert found is not None
    return found


@kinds
def test_it_begins_as_the_language_model_and_values_everything_0(
    kind: CriticType, tmp_path: Path
) -> None:
    policy = made(tmp_path, kind, trained=False)
    batch = policy.collate([record([5, 6, 7])])
    found = policy.evaluate(batch, 1.0)
    assert found.values is not None
    assert found.values.requires_grad
    assert not found.values.any()
    assert not values(policy, record([5, 6, 7])).any()
    if kind == "own":
        state = policy.module.state_dict()
        for name, tensor in state.items():
            if name.startswith("critic.") and "lm_head" not in name:
                assert torch.equal(tensor, state["policy." + name.removeprefix("critic.")])


@kinds
def test_the_language_model_says_what_it_says_alone(kind: CriticType, tmp_path: Path) -> None:
    (folder := tmp_path / "saved").mkdir()
    policy = made(tmp_path, kind)
    policy.save(folder, dict(policy.module.state_dict()))
    alone = CausalLM.load(folder, CausalLMConfig())
    rows = [record([5, 6, 7, 8]), record([9], (3,))]
    assert torch.equal(evaluate(policy, *rows).logprobs, evaluate(alone, *rows).logprobs)
    served = dict(CausalLMCritic.engine_weights(policy.module.state_dict().items()))
    assert served.keys() == alone.module.state_dict().keys()
    assert all(torch.equal(t, served[name]) for name, t in alone.module.state_dict().items())


@kinds
def test_a_value_is_of_the_state_that_the_token_was_chosen_in(
    kind: CriticType, tmp_path: Path
) -> None:
    policy = made(tmp_path, kind)
    one, other = values(policy, record([5, 6, 7, 8])), values(policy, record([5, 6, 9, 8]))
    torch.testing.assert_close(one[0, :3], other[0, :3])
    assert abs(float(one[0, 3] - other[0, 3])) > 1e-4
    another = values(policy, record([5, 6, 7, 8], (2, 3, 9)))
    assert abs(float(one[0, 0] - another[0, 0])) > 1e-4


@kinds
def test_packed_rows_have_the_same_values(kind: CriticType, tmp_path: Path) -> None:
    policy = made(tmp_path, kind)
    rows = [record([5, 6, 7]), record([8, 9, 5, 6]), record([7], (4, 4))]
    plain = values(policy, *rows)
    policy.enable_packing(torch.device("cpu"), torch.float32)
    torch.testing.assert_close(values(policy, *rows), plain, atol=1e-5, rtol=1e-5)


@kinds
def test_its_error_trains_the_language_model_where_they_share_it(
    kind: CriticType, tmp_path: Path
) -> None:
    policy = made(tmp_path, kind)
    found = policy.evaluate(policy.collate([record([5, 6, 7])]), 1.0).values
    assert found is not None
    found.sum().backward()
    trained = {n: p.grad is not None for n, p in policy.module.named_parameters()}
    groups = {policy.parameter_group(name) for name, there in trained.items() if there}
    assert groups == ({"value"} if kind == "own" else {"policy", "value"})
    assert all(there for name, there in trained.items() if policy.parameter_group(name) == "value")


@kinds
def test_a_folder_keeps_what_it_learned_and_nothing_before(
    kind: CriticType, tmp_path: Path
) -> None:
    policy = made(tmp_path, kind, trained=False)
    for name in ("new", "trained"):
        (tmp_path / name).mkdir()
    policy.save(tmp_path / "new", dict(policy.module.state_dict()))
    assert not (tmp_path / "new" / "critic").exists()
    with torch.no_grad():
        policy.module.value_head.bias.fill_(0.5)
    policy.save(tmp_path / "trained", dict(policy.module.state_dict()))
    again = CausalLMCritic.load(tmp_path / "trained", CausalLMCriticConfig(critic=kind))
    assert values(again, record([5, 6])).tolist() == [[0.5, 0.5]]
    state, its = policy.module.state_dict(), again.module.state_dict()
    assert all(torch.equal(tensor, its[name]) for name, tensor in state.items())
    assert state.keys() == its.keys()


def test_a_checkpoint_brings_its_critic_along(tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    (folder := tmp_path / "folder").mkdir()
    policy = made(tmp_path, "own")
    policy.save(source, dict(policy.module.state_dict()))
    config = CausalLMCriticConfig(path=source)
    CausalLMCritic.create(config, {}, 0, folder)
    rows = [record([5, 6, 7])]
    again = CausalLMCritic.load(folder, config)
    assert torch.equal(values(again, *rows), values(policy, *rows))


def test_the_folder_of_another_critic_is_refused(tmp_path: Path) -> None:
    (folder := tmp_path / "saved").mkdir()
    policy = made(tmp_path, "own")
    policy.save(folder, dict(policy.module.state_dict()))
    with pytest.raises(DataError, match=r"critic \(model\.critic\)"):
        CausalLMCritic.load(folder, CausalLMCriticConfig(critic="shared"))


def test_a_state_may_come_in_any_order() -> None:
    whole = {name: torch.tensor(float(i)) for i, name in enumerate(["critic.a", "policy.a"])}
    whole |= {"critic.b": torch.tensor(3.0)}
    policy, critic = split_state(StreamedState.from_tensors(whole))
    assert dict(policy.stream) == {"a": torch.tensor(1.0)}
    assert dict(critic.stream) == {"a": torch.tensor(0.0), "b": torch.tensor(3.0)}
