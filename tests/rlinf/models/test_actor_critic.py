"""Actor-critic networks: distributions, padding, folders, observation statistics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, Normal

from rlinf.config import validate
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, DataError
from rlinf.models.actor_critic import MLPActorCritic, MLPConfig, MLPPolicy

DISCRETE = {"observation": 3, "action": {"kind": "discrete", "size": 4}}
BOX = {"observation": 3, "action": {"kind": "box", "size": 2}}


def policy(spec: dict[str, Any], **options: Any) -> MLPPolicy:
    chosen = {**spec, **MLPConfig(hidden=(8, 8), **options).model_dump(mode="json")}
    torch.manual_seed(0)
    return MLPPolicy(MLPActorCritic(chosen), chosen)


def trajectory(spec: dict[str, Any], length: int, sample: int = 0) -> Trajectory:
    random = np.random.default_rng(sample)
    size = spec["action"]["size"]
    actions: Any = random.normal(size=(length, size)).astype(np.float32)
    if spec is DISCRETE:
        actions = random.integers(0, size, length)
    observations = random.normal(2, 3, size=(length, 3)).astype(np.float32)
    return Trajectory(identity=RecordId(0, sample), observations=observations, actions=actions)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_choices_are_judged_as_by_torch(temperature: float) -> None:
    out = torch.randn(6, 4)
    actions = torch.arange(6) % 4
    logprobs, entropy = policy(DISCRETE).logprobs_and_entropy(
        out, torch.zeros(4), actions, temperature
    )
    known = Categorical(logits=out / temperature)
    torch.testing.assert_close(logprobs, known.log_prob(actions))
    torch.testing.assert_close(entropy, known.entropy())


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_vectors_are_judged_as_by_torch(temperature: float) -> None:
    out, actions = torch.randn(5, 7, 2), torch.randn(5, 7, 2)
    log_std = torch.tensor([-1.0, 0.5])
    logprobs, entropy = policy(BOX).logprobs_and_entropy(out, log_std, actions, temperature)
    known = Normal(out, log_std.exp() * temperature)
    torch.testing.assert_close(logprobs, known.log_prob(actions).sum(-1))
    torch.testing.assert_close(entropy, known.entropy().sum(-1))


@pytest.mark.parametrize("spec", [DISCRETE, BOX])
def test_padding_changes_nothing_and_counts_for_nothing(spec: dict[str, Any]) -> None:
    one = policy(spec)
    records = [trajectory(spec, length, i) for i, length in enumerate((5, 2, 9))]
    together = one.evaluate(one.collate(records), 1.0, entropy=True)
    assert together.entropy is not None
    assert together.values is not None
    for i, record in enumerate(records):
        alone = one.evaluate(one.collate([record]), 1.0, entropy=True)
        for name in ("logprobs", "entropy", "values"):
            whole, part = getattr(together, name)[i], getattr(alone, name)[0]
            torch.testing.assert_close(whole[: len(record)], part)
            assert not whole[len(record) :].any()


@pytest.mark.parametrize("shared", [False, True])
def test_a_value_error_moves_the_policy_only_through_a_shared_trunk(shared: bool) -> None:
    one = policy(DISCRETE, shared_trunk=shared)
    observations = torch.randn(4, 3)
    before = one.module(observations)[0].detach()
    one.module(observations)[2].square().sum().backward()
    with torch.no_grad():
        for parameter in one.module.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
    assert torch.equal(one.module(observations)[0], before) is not shared


def test_only_a_gaussian_policy_learns_its_deviation() -> None:
    assert policy(BOX).module.log_std.requires_grad
    assert not policy(DISCRETE).module.log_std.requires_grad


def test_parameters_in_half_precision_give_outputs_in_single() -> None:
    one = policy(BOX, normalize_observations=True)
    exact = [part.detach().clone() for part in one.module(torch.ones(2, 3))]
    for parameter in one.module.parameters():
        parameter.data = parameter.data.bfloat16()
    for rough, value in zip(one.module(torch.ones(2, 3)), exact, strict=True):
        assert rough.dtype == torch.float32
        torch.testing.assert_close(rough, value, atol=0.05, rtol=0.05)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_statistics_are_exact_however_the_steps_were_batched(lengths: list[int]) -> None:
    one = policy(DISCRETE, normalize_observations=True)
    records = [trajectory(DISCRETE, length, i) for i, length in enumerate(lengths)]
    for record in records:
        one.update_observation_stats([record])
    whole = np.concatenate([r.observations for r in records]).astype(np.float64)
    np.testing.assert_allclose(one.module.mean, whole.mean(0), rtol=1e-9)
    np.testing.assert_allclose(one.module.square, whole.var(0), rtol=1e-7, atol=1e-12)
    assert one.module.seen.item() == len(whole)


def test_statistics_are_of_steps_that_count() -> None:
    """An episode that could not begin shows zeros."""
    one, other = (policy(BOX, normalize_observations=True) for _ in range(2))
    record = trajectory(BOX, 6)
    one.update_observation_stats([record.slice_steps(0, 4)])
    before = {name: value.clone() for name, value in one.module.state_dict().items()}
    mask = np.array([1, 1, 1, 1, 0, 0], np.float32)
    other.update_observation_stats([replace(record, mask=mask)])
    for name in ("mean", "square", "seen"):
        assert torch.equal(getattr(other.module, name), before[name])
    one.update_observation_stats([replace(record, mask=0 * mask)])
    assert torch.equal(one.module.mean, before["mean"])


def test_normalised_networks_do_not_see_scale_or_shift() -> None:
    plain, shifted = (policy(BOX, normalize_observations=True) for _ in range(2))
    record = trajectory(BOX, 50)
    moved = replace(record, observations=record.observations * 8 + 100)
    plain.update_observation_stats([record])
    shifted.update_observation_stats([moved])
    out = plain.module(torch.from_numpy(record.observations))[0]
    same = shifted.module(torch.from_numpy(moved.observations))[0]
    torch.testing.assert_close(out, same, atol=1e-5, rtol=1e-4)


def test_statistics_stay_untouched_unless_asked_for() -> None:
    one = policy(DISCRETE)
    one.update_observation_stats([trajectory(DISCRETE, 20)])
    assert one.module.seen.item() == 0
    assert not one.module.mean.any()


@pytest.mark.parametrize("shared", [False, True])
def test_a_saved_policy_comes_back_with_its_statistics(tmp_path: Path, shared: bool) -> None:
    one = policy(BOX, normalize_observations=True, shared_trunk=shared)
    one.update_observation_stats([trajectory(BOX, 20)])
    one.save(tmp_path, dict(one.module.state_dict()))
    # The folder says what the network is; the run's options may have changed since.
    again = MLPPolicy.load(tmp_path, MLPConfig(hidden=(3,)))
    observations = torch.randn(5, 3)
    for a, b in zip(one.module(observations), again.module(observations), strict=True):
        assert torch.equal(a, b)


def test_the_seed_alone_decides_the_first_weights(tmp_path: Path) -> None:
    written = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        torch.rand(3)
        MLPPolicy.create(MLPConfig(), BOX, seed, tmp_path / name)
        written.append((tmp_path / name / "model.safetensors").read_bytes())
    assert written[0] == written[1] != written[2]


@pytest.mark.parametrize("damage", ["no settings", "cut weights", "other sizes", "not a mapping"])
def test_a_damaged_folder_is_named(tmp_path: Path, damage: str) -> None:
    MLPPolicy.create(MLPConfig(), BOX, 0, tmp_path)
    values, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    if damage == "no settings":
        values.unlink()
    elif damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "other sizes":
        values.write_text(json.dumps({**json.loads(values.read_text()), "hidden": [5]}))
    else:
        values.write_text("[]")
    message = r"not a policy folder|not those that config.json describes"
    with pytest.raises(DataError, match=message):
        MLPPolicy.load(tmp_path, MLPConfig())


def test_a_layer_without_units_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.hidden"):
        validate(MLPConfig, {"hidden": [64, 0]}, "model")


@pytest.mark.parametrize("spec", [DISCRETE, BOX])
def test_demonstrations_for_chunks_are_the_actions_that_follow(spec: dict[str, Any]) -> None:
    made = policy(spec, chunk_size=3)
    record = trajectory(spec, 4)
    shown = made.prepare_demonstration(record)
    actions = record.actions
    np.testing.assert_array_equal(shown.actions[0], actions[:3])
    np.testing.assert_array_equal(shown.actions[2, :2], actions[2:])
    assert shown.choice_mask.sum((1, 2)).tolist() == [
        count * (1 if spec is DISCRETE else 2) for count in (3, 3, 2, 1)
    ]
    outputs = made.evaluate(made.collate([shown]), 1.0)
    assert outputs.logprobs.shape == (1, *shown.choice_mask.shape)
    assert policy(spec).prepare_demonstration(record) is record


def test_a_run_begins_with_the_weights_of_a_folder(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    MLPPolicy.create(MLPConfig(hidden=(8,)), BOX, 3, old)
    # The standard deviation is one of the weights.
    config = MLPConfig(hidden=(8,), path=old, initial_log_std=-2.0)
    MLPPolicy.create(config, BOX, 4, new)
    first, second = (MLPPolicy.load(folder, config).module.state_dict() for folder in (old, new))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert json.loads((new / "config.json").read_text())["hidden"] == [8]


@pytest.mark.parametrize(
    ("options", "spec", "message"),
    [
        ({"hidden": (9,)}, BOX, r"model\.path: .*old: its hidden is \[8\], and this run has \[9\]"),
        ({"hidden": (8,)}, DISCRETE, r"model\.path: .*: its action is .*'box'"),
        ({"hidden": (8,)}, {**BOX, "observation": 4}, r"its observation is 3, and this run has 4"),
    ],
)
def test_a_folder_of_another_policy_is_refused(
    tmp_path: Path, options: dict[str, Any], spec: dict[str, Any], message: str
) -> None:
    (tmp_path / "old").mkdir()
    MLPPolicy.create(MLPConfig(hidden=(8,)), BOX, 3, tmp_path / "old")
    with pytest.raises(ConfigError, match=message):
        MLPPolicy.check_spec(MLPConfig(path=tmp_path / "old", **options), spec)


def test_a_folder_without_a_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none: not a policy folder"):
        MLPPolicy.check_spec(MLPConfig(path=tmp_path / "none"), BOX)
