"""Co-training: the gradient of RL and that of demonstrations add up, for every kind of policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rlinf.algorithms.group_relative import GRPO, GRPOConfig
from rlinf.algorithms.learner import Learner
from rlinf.algorithms.losses import sft_loss
from rlinf.algorithms.policy_gradient import PolicyGradient
from rlinf.algorithms.ppo import PPO, PPOConfig
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.data.episodes import INSTRUCTION_COLUMN
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory, step_fields
from rlinf.errors import ConfigError
from rlinf.models.causal_lm import CausalLM
from rlinf.models.openvla import OpenVLAOFTPolicy
from rlinf.models.pi0 import Pi0Policy
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from tests.contracts.test_policy import SMALL
from tests.rlinf.algorithms.test_update import SCORES, samples
from tests.rlinf.models import acting
from tests.rlinf.trainers.ranks import run_ranks
from tests.rlinf.trainers.test_threaded_data_parallel import CONFIG, folder, records

__all__ = ["folder"]
BETA = 0.7


class Guided(Learner):
    """A learner with given demonstrations, which notes the batches that are requested."""

    def __init__(self, trainer: FSDPTrainer, shown: Sequence[Trajectory], **options: Any) -> None:
        super().__init__(trainer, dict.fromkeys(trainer.policy.parameter_groups, 1.0), **options)
        self.shown, self.requests = list(shown), list[tuple[int, int]]()

    def demonstrations(self, step: int, count: int) -> list[Trajectory]:
        self.requests.append((step, count))
        return self.shown


def plain_trainer(
    cls: Any,
    config: Any,
    folder: Path,
    world: ProcessGroupInfo | None = None,
    **options: Any,
) -> FSDPTrainer:
    """A trainer whose step subtracts the gradient."""
    optimizer = OptimizerSection(name="sgd", lr=1.0, betas=(0.0, 0.9), clip_grad=1e9)
    settings = FSDPConfig(device="cpu", max_tokens_per_microbatch=400, **options)
    world = world or ProcessGroupInfo()
    return FSDPTrainer(cls.load(folder, config), settings, optimizer, world)


def change(made: FSDPTrainer, step: Any) -> dict[str, Tensor]:
    """The change of the weights by a step, which closes the trainer."""
    before = made.full_state_dict(copy=True)
    step(made)
    after = made.full_state_dict(copy=True)
    made.close()
    return {name: tensor - before[name] for name, tensor in after.items()}


def shown_actions(count: int) -> list[Trajectory]:
    """Demonstrations of a robot with cameras and instructions, in the units of the task."""
    random = np.random.default_rng(9)
    found = []
    for number in range(count):
        steps: dict[str, Any] = {
            n: c for n, c in acting.request(4, 0, seed=number).steps.items() if n != "sample"
        }
        steps["observations"] = steps.pop("observation")
        steps["actions"] = random.uniform(-0.5, 0.5, (4, 3)).astype(np.float32)
        assert INSTRUCTION_COLUMN in steps
        found.append(Trajectory(identity=RecordId(7, number), **step_fields(steps)))
    return found


def robot_case(cls: Any, name: str, folder: Path) -> Any:
    sizes = {**SMALL[name], "patch_size": 8, "chunk_size": 4}
    config = cls.Config(**sizes | ({"image_size": 24} if name == "pi0" else {}))
    (folder / "first").mkdir()
    cls.create(config, acting.SPEC, 0, folder / "first")
    policy = cls.load(folder / "first", config)
    acting.stirred(policy)
    policy.save(folder, policy.module.state_dict())
    learned = acting.rewarded(acting.rolled_out(cls, config, folder))
    settings = {"logprob_level": "action", "old_logprobs": "rollout"}
    demonstrations = [policy.prepare_demonstration(each, 3) for each in shown_actions(3)]
    return cls, config, PPO, PPOConfig, settings, learned, demonstrations


def text_case(**settings: Any) -> Any:
    demonstrations = [replace(each, identity=RecordId(7, 0)) for each in records(7)[2:]]
    return CausalLM, CONFIG, GRPO, GRPOConfig, settings, samples(SCORES), demonstrations


CASES = ["text", "text, streamed", "tokens", "flow"]


def case(name: str, folder: Path) -> Any:
    if name.startswith("text"):
        return text_case(whiten_advantages=name == "text")
    cls, model = (OpenVLAOFTPolicy, "openvla_oft") if name == "tokens" else (Pi0Policy, "pi0")
    return robot_case(cls, model, folder)


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_the_sum_of_both(name: str, folder: Path, tmp_path: Path) -> None:
    cls, config, algorithm, options, settings, learned, shown = case(name, tmp_path)
    source = folder if cls is CausalLM else tmp_path
    found = {}
    for beta in (0.0, BETA, 2 * BETA):
        learner: Any = None

        def update(made: FSDPTrainer, beta: float = beta) -> None:
            nonlocal learner
            learner = Guided(made, shown)
            own: PolicyGradient = algorithm(options(sft_loss_coef=beta, **settings))
            assert own.supports_streaming == (name == "text, streamed")
            half = len(learned) // 2
            own.update(learner, [learned[:half], learned[half:]])

        found[beta] = change(plain_trainer(cls, config, source), update), learner.metrics
    metrics = {}

    def imitate(made: FSDPTrainer) -> None:
        metrics.update(made.step(shown, sft_loss(shown), lr=1.0))

    imitated = change(plain_trainer(cls, config, source), imitate)
    assert max(float(tensor.abs().max()) for tensor in imitated.values()) > 1e-3
    (alone, rl_metrics), (both, joint), (twice, _) = found.values()
    assert max(float(tensor.abs().max()) for tensor in alone.values()) > 1e-4
    for weight in alone:
        for beta, tensor in ((BETA, both[weight]), (2 * BETA, twice[weight])):
            wanted = alone[weight] + beta * imitated[weight]
            torch.testing.assert_close(tensor, wanted, rtol=1e-3, atol=2e-6, msg=weight)
    assert joint["sft_loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    assert joint["loss"] == pytest.approx(rl_metrics["loss"] + BETA * metrics["loss"], rel=1e-4)
    assert joint["policy_loss"] == pytest.approx(rl_metrics["policy_loss"], rel=1e-4, abs=1e-6)
    assert "sft_loss" not in rl_metrics


def test_each_optimizer_step_has_a_batch_of_its_own(folder: Path) -> None:
    """Iteration and step number it, so a resumed run continues with the next batch."""
    made = plain_trainer(CausalLM, CONFIG, folder)
    settings: Any = {"epochs": 2, "minibatches": 2, "old_logprobs": "rollout"}
    for iteration in (0, 3):
        learner = Guided(made, records(3), iteration=iteration)
        config = GRPOConfig(sft_loss_coef=1e-6, sft_batch_size=5, **settings)
        GRPO(config).update(learner, [samples(SCORES)])
        assert learner.requests == [(4 * iteration + step, 5) for step in range(4)]
    made.close()


def test_micro_batches_do_not_change_the_sum(folder: Path) -> None:
    found = []
    for budget, threads in ((400, 1), (20, 2)):
        made = plain_trainer(CausalLM, CONFIG, folder, cpu_threads=threads)
        made.config = made.config.model_copy(update={"max_tokens_per_microbatch": budget})
        found.append(
            change(
                made,
                lambda made: GRPO(GRPOConfig(sft_loss_coef=BETA)).update(
                    Guided(made, records(9)), [samples(SCORES)]
                ),
            )
        )
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-3, atol=2e-6, msg=name)


SHARED = """
import sys
from pathlib import Path
import torch
from rlinf.channels.process_group import ProcessGroupInfo
from tests.rlinf.algorithms.test_co_training import BETA, Guided, case, change, plain_trainer

folder, own, name, rank = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
(own / str(rank)).mkdir()
cls, config, algorithm, options, settings, learned, shown = case(name, own / str(rank))
source = folder if name == "text" else own / str(rank)

def stepped(world):
    made = plain_trainer(cls, config, source, world, fsdp_wrap_min_mb=0)
    own_algorithm = algorithm(options(sft_loss_coef=BETA, **settings))
    return change(made, lambda made: own_algorithm.update(Guided(made, shown), [learned]))

shared = stepped(ProcessGroupInfo(rank, 2, rendezvous_file=own / "channels" / "group-t.json"))
alone = stepped(ProcessGroupInfo())
assert any(tensor.abs().max() > 1e-3 for tensor in alone.values())
for key, tensor in alone.items():
    torch.testing.assert_close(shared[key], tensor, rtol=1e-3, atol=2e-6, msg=key)
print("ok")
"""


@pytest.mark.parametrize("name", ["text", "flow"])
def test_two_processes_add_what_one_adds(name: str, folder: Path, tmp_path: Path) -> None:
    run_ranks(SHARED, 2, folder, tmp_path, name)


def test_a_task_without_demonstrations_is_refused(folder: Path) -> None:
    made = plain_trainer(CausalLM, CONFIG, folder)
    with pytest.raises(ConfigError, match=r"algorithm\.sft_loss_coef: .* no demonstrations"):
        GRPO(GRPOConfig(sft_loss_coef=0.1)).update(Guided(made, []), [samples(SCORES)])
    made.close()


def test_a_batch_size_without_a_coefficient_is_refused() -> None:
    with pytest.raises(ValidationError, match="sft_batch_size needs sft_loss_coef above 0"):
        GRPOConfig(sft_batch_size=4)
