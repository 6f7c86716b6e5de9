"""SAC, CrossQ, RLPD and IQL: whole losses against obvious ones, who learns when, what is drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.commands.experiment import compose
from pipeline.validate_config import load_components
from rlinf.algorithms import algorithms
from rlinf.algorithms.learner import Learner
from rlinf.algorithms.off_policy import OffPolicyAlgorithm
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection, RunConfig, validate
from rlinf.data.batch import TrainingSample
from rlinf.data.record import RecordId
from rlinf.data.trajectory import StepRewards, Trajectory
from rlinf.data.transitions import (
    ConcatenatedTransitions,
    InMemoryTransitions,
)
from rlinf.errors import ConfigError, DataError
from rlinf.models.tanh_normal_q import MLPQConfig, MLPQPolicy
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer

BOX = {"observation": 3, "action": {"kind": "box", "size": 2}}
SMALL: dict[str, Any] = {"hidden": (8,), "critic_hidden": (8,)}
OPTIONS: dict[str, dict[str, Any]] = {
    "sac": {},
    "crossq": {"critic_norm": "batch_renorm", "use_target_critics": False},
    "rlpd": {"critic_norm": "layer", "num_critics": 4},
    "iql": {"use_state_value": True},
}
B = 16


def policy_of(folder: Path, **options: Any) -> MLPQPolicy:
    folder.mkdir(exist_ok=True)
    MLPQPolicy.create(MLPQConfig(**{**SMALL, **options}), BOX, 1, folder)
    policy = MLPQPolicy.load(folder, MLPQConfig())
    if policy.module.targets is not None:
        with torch.no_grad():
            for number, tensor in enumerate(policy.module.targets.parameters()):
                tensor.add_(0.1 * torch.sin(torch.arange(tensor.numel()) + number).view_as(tensor))
    return policy


def batch_of(*, learns: bool = True) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(5)
    batch = {
        "observations": torch.randn(B, 3, generator=random),
        "actions": torch.rand(B, 2, generator=random) * 1.8 - 0.9,
        "rewards": torch.randn(B, generator=random),
        "next_observations": torch.randn(B, 3, generator=random),
        "terminated": (torch.arange(B) % 3 == 0).float(),
        "truncated": (torch.arange(B) % 3 == 1).float(),
        "next_noise": torch.randn(B, 2, generator=random),
    }
    return batch | ({"noise": torch.randn(B, 2, generator=random)} if learns else {})


def made(name: str, **settings: Any) -> OffPolicyAlgorithm:
    cls = algorithms.get(name)
    return cls(cls.Config(**settings))


def grown(module: torch.nn.Module) -> set[str]:
    """First words of the parameters that have a gradient."""
    return {n.partition(".")[0] for n, p in module.named_parameters() if p.grad is not None}


def test_the_loss_of_sac_is_the_sum_of_its_three_row_by_row(tmp_path: Path) -> None:
    """Each transition by itself, with torch's own distributions; actions and their entropies are
    those in [-1, 1], whatever the simulator's units are."""
    policy, batch = policy_of(tmp_path, action_scale=2.0, initial_temperature=0.3), batch_of()
    loss, metrics = made("sac", gamma=0.9, target_entropy=-1.5).loss(policy, batch)
    module, critic, actor, temperature = policy.module, 0.0, 0.0, 0.0
    assert module.targets is not None

    def drawn(seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = module(seen)
        plain = torch.distributions.Normal(mean, log_std.exp())
        squashed = torch.distributions.TransformedDistribution(
            plain, torch.distributions.TanhTransform()
        )
        action = torch.tanh(mean + noise * log_std.exp())
        return action, squashed.log_prob(action).sum()

    for row in range(B):
        one = {name: column[row] for name, column in batch.items()}
        action, logprob = drawn(one["next_observations"], one["next_noise"])
        after = module.targets(torch.cat([one["next_observations"], action])[None])[:, 0].min()
        target = one["rewards"] + 0.9 * (1 - one["terminated"]) * (after - 0.3 * logprob)
        outputs = module.critics(torch.cat([one["observations"], one["actions"]])[None])[:, 0]
        critic += ((outputs - target) ** 2).sum().item() / 2 / B
        action, logprob = drawn(one["observations"], one["noise"])
        value = module.critics(torch.cat([one["observations"], action])[None])[:, 0].min()
        actor += (0.3 * logprob - value).item() / B
        temperature += -0.3 * (logprob.item() - 1.5) / B
    assert metrics["critic_loss"].item() == pytest.approx(critic, rel=1e-4)
    assert metrics["policy_loss"].item() == pytest.approx(actor, rel=1e-4)
    assert loss.item() == pytest.approx(critic + actor + temperature, rel=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_who_learns(name: str, tmp_path: Path) -> None:
    """A policy's loss leaves no gradient in the critics, nor theirs one in it."""
    policy, algorithm = policy_of(tmp_path, **OPTIONS[name]), made(name)
    loss, _ = algorithm.loss(policy, batch_of(learns=False))
    loss.backward()  # type: ignore[no-untyped-call]
    assert grown(policy.module) == {"critics"} | ({"value"} if name == "iql" else set())
    alone = {n: p.grad.clone() for n, p in policy.module.named_parameters() if p.grad is not None}
    policy.module.zero_grad()
    # Batch statistics follow each pass; this one is to begin from the same.
    policy = policy_of(tmp_path, **OPTIONS[name])
    loss, _ = algorithm.loss(policy, batch_of())
    loss.backward()  # type: ignore[no-untyped-call]
    wanted = {"critics", "policy"} | ({"value"} if name == "iql" else {"log_temperature"})
    assert grown(policy.module) == wanted
    for n, p in policy.module.named_parameters():
        if n in alone:
            torch.testing.assert_close(p.grad, alone[n], msg=n)


def test_a_cut_is_no_end_to_any_of_them(tmp_path: Path) -> None:
    for name, options in OPTIONS.items():
        losses = {}
        for kind in ("truncated", "terminated", "neither"):
            policy = policy_of(tmp_path / name, **options)
            batch = batch_of() | {"terminated": torch.zeros(B), "truncated": torch.zeros(B)}
            if kind != "neither":
                batch[kind] = torch.ones(B)
            losses[kind] = made(name).loss(policy, batch)[1]["critic_loss"].item()
        assert losses["truncated"] == losses["neither"] != losses["terminated"], name


def test_crossq_normalises_what_was_done_and_what_follows_together(tmp_path: Path) -> None:
    policy, batch = policy_of(tmp_path, **OPTIONS["crossq"]), batch_of()
    values, later = made("crossq").critic_values(policy.module, batch, batch["actions"])  # type: ignore[attr-defined]
    again = policy_of(tmp_path, **OPTIONS["crossq"]).module.critics
    done = torch.cat([batch["observations"], batch["actions"]], -1)
    after = torch.cat([batch["next_observations"], batch["actions"]], -1)
    torch.testing.assert_close(values, again(torch.cat([done, after]))[:, :B])
    assert not torch.allclose(values, again(done)), "alone it has other statistics"
    assert values.requires_grad
    assert not later.requires_grad


def test_what_a_person_did_is_among_the_demonstrations(tmp_path: Path) -> None:
    policy: Any = policy_of(tmp_path, **OPTIONS["rlpd"])
    rows = np.zeros(5, policy.transition_dtype)
    rows["rewards"] = np.arange(5)
    none, some = InMemoryTransitions(rows[:0]), InMemoryTransitions(rows[3:])
    algorithm, helped = made("rlpd"), [some, none]
    learner: Any = SimpleNamespace(policy=policy, intervention_transitions=lambda: helped.pop(0))
    online, before = algorithm._sources(learner, InMemoryTransitions(rows[:3]))
    assert (len(online), len(before)) == (3, 2)
    assert before.take(np.array([1, 0, 1]))["rewards"].tolist() == [4, 3, 4]
    assert len(algorithm._sources(learner, online)[1]) == 0
    both = ConcatenatedTransitions(InMemoryTransitions(rows[:3]), some)
    assert both.take(np.array([4, 0, 3, 2]))["rewards"].tolist() == [4, 0, 3, 2]


def test_rlpd_takes_the_least_of_the_chosen_critics_and_no_entropy(tmp_path: Path) -> None:
    policy, batch = policy_of(tmp_path, **OPTIONS["rlpd"]), batch_of(learns=False)
    batch["critics"] = torch.tensor([3, 1])
    _, metrics = made("rlpd", gamma=0.9).loss(policy, batch)
    module = policy.module
    assert module.targets is not None
    action, _ = policy.rsample(batch["next_observations"], batch["next_noise"])
    after = module.targets(torch.cat([batch["next_observations"], action], -1))
    least = torch.minimum(after[3], after[1])
    target = batch["rewards"] + 0.9 * (1 - batch["terminated"]) * least
    outputs = module.critics(torch.cat([batch["observations"], batch["actions"]], -1))
    wanted = 0.5 * (outputs - target).square().mean(-1).sum()
    torch.testing.assert_close(metrics["critic_loss"], wanted.detach())


def test_the_loss_of_iql_is_the_sum_of_its_three(tmp_path: Path) -> None:
    policy, batch = policy_of(tmp_path, **OPTIONS["iql"]), batch_of()
    loss, _ = made("iql", gamma=0.9, expectile=0.8, beta=2.0).loss(policy, batch)
    module, wanted = policy.module, 0.0
    assert module.targets is not None
    assert module.value is not None
    for row in range(B):
        one = {name: column[row] for name, column in batch.items()}
        done = torch.cat([one["observations"], one["actions"]])[None]
        known = module.targets(done)[:, 0].min().item()
        value = module.value(one["observations"]).item()
        after = module.value(one["next_observations"]).item()
        target = one["rewards"].item() + 0.9 * (1 - one["terminated"].item()) * after
        wanted += sum((q - target) ** 2 for q in module.critics(done)[:, 0].tolist()) / 2
        wanted += abs(0.8 - (known < value)) * (known - value) ** 2
        logprob = policy.action_logprob(one["observations"], one["actions"]).item()
        wanted -= min(np.exp(2 * (known - value)), 100) * logprob
    assert loss.item() == pytest.approx(wanted / B, rel=1e-4)


class Recorded(OffPolicyAlgorithm):
    """Keeps what it is asked for; learns as SAC does."""

    Config = algorithms.get("sac").Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.batches: list[dict[str, Tensor]] = []
        self.sac = made("sac")

    def loss(self, policy: Any, batch: dict[str, Tensor]) -> Any:
        self.batches.append(batch)
        return self.sac.loss(policy, batch)


def sample(length: int, reward: float = 0.0) -> TrainingSample:
    random = np.random.default_rng(0)
    trajectory = Trajectory(
        identity=RecordId(0, 0),
        observations=random.normal(size=(length, 3)).astype(np.float32),
        actions=random.uniform(-1, 1, (length, 2)),
        terminated=np.zeros(length),
        truncation_steps=np.array([length - 1]),
        final_observations=np.zeros((1, 3), np.float32),
    )
    rewards = np.full(length, reward, np.float32)
    return TrainingSample(trajectory, StepRewards(identity=RecordId(0, 0), rewards=rewards))


def learned(
    folder: Path, parts: list[TrainingSample], **settings: Any
) -> tuple[Recorded, Learner, Any]:
    policy = policy_of(folder)
    trainer = FSDPTrainer(policy, FSDPConfig(device="cpu"), OptimizerSection(), ProcessGroupInfo())
    learner = Learner(trainer, dict.fromkeys(policy.parameter_groups, 1e-3), iteration=4, seed=7)
    algorithm = Recorded(Recorded.Config(**{"batch_size": 10, **settings}))
    algorithm.update(learner, [parts])
    return algorithm, learner, policy.module


def test_there_are_as_many_steps_as_new_transitions_ask_for(tmp_path: Path) -> None:
    algorithm, learner, _ = learned(tmp_path, [sample(20)], utd_ratio=2.5, policy_delay=3)
    assert learner.num_updates == len(algorithm.batches) == 50
    noisy = ["noise" in batch for batch in algorithm.batches]
    assert noisy[-6:] == [False, False, True] * 2, "the policy learns in the last step"
    assert noisy.count(True) == 17
    assert learner.metrics["steps"] == 50
    algorithm, _, _ = learned(tmp_path, [sample(20)], gradient_steps=2, policy_delay=20)
    assert ["noise" in batch for batch in algorithm.batches] == [False, True]
    algorithm, learner, _ = learned(tmp_path, [sample(20)], learning_starts=21)
    assert learner.num_updates == 0
    assert learned(tmp_path, [sample(20)], gradient_steps=3)[1].num_updates == 3


def test_the_same_transitions_are_drawn_again_and_others_in_other_steps(tmp_path: Path) -> None:
    one, other = (learned(tmp_path, [sample(20)], gradient_steps=40)[0].batches for _ in range(2))
    for batch, same in zip(one, other, strict=True):
        assert all(torch.equal(batch[name], same[name]) for name in batch)
    assert not torch.equal(one[0]["observations"], one[1]["observations"])
    assert not torch.equal(one[0]["observations"], one[32]["observations"]), "in the next chunk"


def test_targets_follow_the_critics_and_only_groups_that_learn_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = policy_of(tmp_path).module
    monkeypatch.setattr(Recorded, "_policy_learns", lambda *_: False)
    _, _, module = learned(tmp_path, [sample(20)], gradient_steps=1, tau=0.25)
    for name, tensor in module.policy.state_dict().items():
        assert torch.equal(tensor, before.policy.state_dict()[name])
    old, new = before.targets.state_dict(), module.critics.state_dict()  # type: ignore[union-attr]
    for name, tensor in module.targets.state_dict().items():
        torch.testing.assert_close(tensor, old[name] + 0.25 * (new[name] - old[name]))


def test_a_step_is_that_of_adam_on_the_loss_with_a_rate_for_each_group(tmp_path: Path) -> None:
    policy, batch, rates = policy_of(tmp_path), batch_of(), {"policy": 1e-2, "critic": 1e-3}
    rates |= {"value": 1.0, "temperature": 0.1}
    settings = OptimizerSection(clip_grad=1e6)
    trainer = FSDPTrainer(policy, FSDPConfig(device="cpu"), settings, ProcessGroupInfo())
    Learner(trainer, rates).run_steps([batch], made("sac").loss)
    plain = policy_of(tmp_path)
    groups = [
        {"params": [parameter], "lr": rates[plain.parameter_group(name)]}
        for name, parameter in plain.module.named_parameters()
        if parameter.requires_grad
    ]
    adam = torch.optim.AdamW(groups, betas=settings.betas, weight_decay=0)
    made("sac").loss(plain, batch)[0].backward()  # type: ignore[no-untyped-call]
    adam.step()
    for name, tensor in policy.module.state_dict().items():
        torch.testing.assert_close(tensor, plain.module.state_dict()[name], msg=name)


def test_half_of_each_batch_is_of_the_prior_transitions(tmp_path: Path) -> None:
    import h5py

    path = tmp_path / "prior.hdf5"
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = np.zeros((5, 3)), np.zeros((5, 2))
        file["next_observations"] = np.zeros((5, 3))
        file["rewards"], file["terminated"] = np.full(5, 9.0), np.zeros(5)
    settings: dict[str, Any] = {"offline_data": path, "offline_ratio": 0.5, "gradient_steps": 4}
    algorithm, _, _ = learned(tmp_path / "a", [sample(20, 1.0)], **settings)
    for batch in algorithm.batches:
        assert sorted(batch["rewards"].tolist()) == [1.0] * 5 + [9.0] * 5
    algorithm, _, _ = learned(tmp_path / "a", [], **settings)
    assert all((batch["rewards"] == 9).all() for batch in algorithm.batches), (
        "nothing else is there"
    )
    with h5py.File(path, "a") as file:
        del file["actions"]
        file["actions"] = np.zeros((5, 1))
    with pytest.raises(DataError, match=r"algorithm.offline_data: .* field 'actions'"):
        learned(tmp_path / "a", [sample(20)], **settings)


@pytest.mark.parametrize(
    ("name", "settings", "model", "words"),
    [
        ("sac", {}, {"use_target_critics": False}, "model.use_target_critics: SAC needs"),
        ("sac", {}, {"critic_norm": "batch_renorm"}, "model.critic_norm: "),
        ("sac", {"offline_ratio": 0.5}, {}, "algorithm.offline_ratio: "),
        ("crossq", {}, {"critic_norm": "batch_renorm"}, "model.use_target_critics: CrossQ has no"),
        ("crossq", {}, {"use_target_critics": False}, "set model.critic_norm=batch_renorm"),
        ("rlpd", {"offline_ratio": 0}, {}, "RLPD's critics have layer normalisation"),
        ("rlpd", {"offline_ratio": 0}, {"critic_norm": "layer"}, "algorithm.offline_data: RLPD"),
        ("iql", {"offline_ratio": 0}, {}, "model.use_state_value: IQL learns the value of states"),
        ("iql", {"offline_ratio": 0}, {"use_state_value": True}, "algorithm.offline_data: IQL"),
        ("sac", {"offline_data": "/nowhere.h5"}, {}, "algorithm.offline_data: /nowhere.h5"),
    ],
)
def test_a_policy_or_data_that_do_not_fit_are_refused(
    name: str, settings: dict[str, Any], model: dict[str, Any], words: str
) -> None:
    cls = algorithms.get(name)
    options = validate(cls.Config, settings, "algorithm")
    run = load_components(validate(RunConfig, compose(["experiment=pendulum_sac"])))
    run = replace(run, options={**run.options, "model": MLPQConfig(**model)})
    with pytest.raises((ConfigError, DataError), match=words):
        cls.check(options, run)
