"""Each family of flow-matching policies samples and learns in the same ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rlinf.data.episodes import INSTRUCTION_COLUMN
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory, step_fields
from rlinf.envs.observations import encode_instruction
from rlinf.models.denoising import noise_fractions
from rlinf.models.gr00t import Gr00tPolicy
from rlinf.models.pi0 import Pi0Policy, Pi05Policy
from rlinf.models.smolvla import SmolVLAPolicy
from rlinf.models.wall_oss import WallOSSPolicy
from rlinf.trainers.base import loss_from_steps
from tests.rlinf.models import acting, test_gr00t, test_pi0, test_smolvla, test_wall_oss
from tests.rlinf.models.acting import SPEC, request, stirred


class Family(NamedTuple):
    policy: Any
    test: Any
    """The module with its own tests, which has the sizes of a small network."""
    trained: tuple[str, ...]
    """Parts that every way of training moves."""
    parts: tuple[str, ...]
    """Parts that the likelihood of actions depends on."""
    options: dict[str, Any] = {}
    imitation_steps: int = 150

    def config(self, **options: Any) -> Any:
        return self.policy.Config(**{**self.test.SIZES, **self.options, **options})

    def made(self, folder: Path, **options: Any) -> Any:
        """A policy in ``folder`` whose weights all matter."""
        config, first = self.config(**options), folder / "first"
        first.mkdir(parents=True)
        self.policy.create(config, SPEC, 0, first)
        policy = self.policy.load(first, config)
        stirred(policy)
        policy.save(folder, policy.module.state_dict())
        return policy

    def rolled_out(self, folder: Path, temperature: float = 1.0, **options: Any) -> Any:
        return acting.rolled_out(self.policy, self.config(**options), folder, temperature)


PI_TRAINED = ("vision_model", "language_model", "gemma_expert.model")
PI_PARTS = (*test_pi0.PARTS, "action_out_proj", "time_mlp_in", "time_mlp_out", "noise_head")
GR00T_TRAINED = ("backbone", "vl_self_attention", "action_head.model.transformer_blocks")
WALL_TRAINED = ("visual.blocks", "self_attn.q_proj", "moe.experts.0", "moe.experts.1")
FAMILIES = {
    "smolvla": Family(
        SmolVLAPolicy,
        test_smolvla,
        ("vision_model", "text_model", "lm_expert"),
        (*test_smolvla.PARTS, "action_out_proj", "action_time_mlp", "noise_head"),
    ),
    "pi0": Family(Pi0Policy, test_pi0, PI_TRAINED, (*PI_PARTS, "state_proj")),
    "pi05": Family(Pi05Policy, test_pi0, PI_TRAINED, (*PI_PARTS, "dense")),
    "gr00t-n1.5": Family(
        Gr00tPolicy, test_gr00t, GR00T_TRAINED, test_gr00t.PARTS, {"version": "n1.5"}, 200
    ),
    "gr00t-n1.7": Family(
        Gr00tPolicy, test_gr00t, GR00T_TRAINED, test_gr00t.PARTS, {"version": "n1.7"}, 200
    ),
    "wall_oss": Family(
        WallOSSPolicy, test_wall_oss, WALL_TRAINED, (*test_wall_oss.PARTS, "noise_head")
    ),
}
WHOLE = [name for name in FAMILIES if name != "smolvla"]
"""Families whose actions attend to later actions of a chunk."""
ALL = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
WHOLE_CHUNKS = pytest.mark.parametrize("family", [FAMILIES[name] for name in WHOLE], ids=WHOLE)


@ALL
@pytest.mark.parametrize(("noise", "temperature"), [("sde", 1.0), ("learned", 0.6), ("sde", 0.0)])
def test_the_trainer_recomputes_the_log_probabilities_of_what_was_sampled(
    tmp_path: Path, family: Family, noise: str, temperature: float
) -> None:
    """Row by row, whatever the lengths of the instructions beside it, also in training mode."""
    policy = family.made(tmp_path, noise_method=noise)
    records = family.rolled_out(tmp_path, temperature, noise_method=noise)
    assert records[0].logprobs.shape == records[0].actions.shape == (3, 4, 3)
    assert records[0].policy_columns["chain"].shape == (3, policy.num_denoising_steps + 1, 4, 3)
    learns = acting.trainer(family.policy, family.config(noise_method=noise), tmp_path)
    learns.policy.module.train()
    acting.assert_recomputed(learns, records, temperature)
    learns.close()


@ALL
def test_a_first_update_has_ratios_of_one_and_a_gradient(tmp_path: Path, family: Family) -> None:
    family.made(tmp_path)
    learns = acting.trainer(family.policy, family.config(), tmp_path)
    acting.assert_first_update(learns, family.rolled_out(tmp_path), "action")
    learns.close()


@ALL
def test_a_value_for_each_action_is_recomputed_and_learned_from(
    tmp_path: Path, family: Family
) -> None:
    family.made(tmp_path, value_level="action")
    acting.assert_values_of_actions(family.policy, family.config(value_level="action"), tmp_path)


@ALL
@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({"gradient_checkpointing": True}, 1e-5),
        ({"param_dtype": "bfloat16"}, 0.05),
        ({"lora": {"rank": 2}}, 1e-5),
    ],
    ids=["recomputed", "bfloat16", "adapters"],
)
def test_ways_of_training_have_the_same_loss_and_learn(
    tmp_path: Path, family: Family, options: dict[str, Any], near: float
) -> None:
    if "lora" in options:
        pytest.importorskip("peft")
    policy, records = family.made(tmp_path), family.rolled_out(tmp_path)
    loss = loss_from_steps(lambda outputs, spans: (1e-3 * outputs.logprobs.square().sum(), {}))
    known, found = policy.module.state_dict(), []
    for each in ({}, options):
        learns = acting.trainer(family.policy, family.config(), tmp_path, **each)
        found.append(learns.step(records, loss, lr=1e-2)["loss"])
        state = learns.full_state_dict()
        learns.close()
    assert found[1] == pytest.approx(found[0], rel=near)
    assert state.keys() == known.keys()
    moved = {name for name, tensor in state.items() if not torch.equal(tensor, known[name])}
    for part in family.trained:
        assert any(part in name for name in moved), part


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gr00t-n1.7"])
def test_processes_that_share_it_out_learn_what_one_learns(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    family.made(tmp_path)
    acting.assert_shares_learn_what_one_learns(family.policy, family.test.__name__, tmp_path)


@ALL
def test_all_parts_learn_from_what_is_said_of_actions(tmp_path: Path, family: Family) -> None:
    policy = family.made(tmp_path, noise_method="learned")
    batch = policy.collate(family.rolled_out(tmp_path, noise_method="learned"))
    policy.evaluate(batch, 1.0).logprobs.square().sum().backward()
    moved = {n for n, t in policy.module.named_parameters() if t.grad is not None and t.grad.any()}
    for part in family.parts:
        assert any(part in name for name in moved), part


@ALL
def test_points_of_other_noise_fractions_do_not_matter(tmp_path: Path, family: Family) -> None:
    """So one pass over the chain gives what the sampler got step by step."""
    policy = family.made(tmp_path)
    batch = policy.collate(family.rolled_out(tmp_path))
    rows = {name: column[:2, 0] for name, column in batch.items()}
    points, tau = rows["chain"][:, :-1], noise_fractions(policy.num_denoising_steps)
    images = [rows["images.front"], rows["images.wrist"]]
    with torch.no_grad():
        prefix = policy.module.encode_prefix(
            rows["prompt"], rows["prompt_mask"], rows["state"], *images
        )
        together = policy.module.velocity(prefix, points, tau)[0]
        for index in range(len(tau)):
            one = policy.module.velocity(prefix, points[:, [index]], tau[[index]])[0]
            torch.testing.assert_close(one[:, 0], together[:, index], atol=1e-5, rtol=0)


@WHOLE_CHUNKS
def test_all_actions_of_a_chunk_matter_to_the_first_ones(tmp_path: Path, family: Family) -> None:
    """Also those that are not carried out: the whole chunk is denoised."""
    family.made(tmp_path / "whole")
    (tmp_path / "shorter").mkdir()
    config = family.policy.Config(path=tmp_path / "whole", chunk_size=2)
    family.policy.create(config, SPEC, 0, tmp_path / "shorter")
    policy = family.policy.load(tmp_path / "shorter", config)
    seen = {n: torch.tensor(c) for n, c in request(5, 0).steps.items() if n != "sample"}
    noise = torch.tensor(policy.draw_noise(np.random.default_rng(0), 5))
    assert noise.shape == (5, 5, 4, 3)
    other = noise.clone()
    other[:, 0, 3] += 1
    with torch.no_grad():
        one, two = (policy.act(seen, drawn, 1.0)["action"] for drawn in (noise, other))
    assert one.shape == (5, 2, 3)
    assert ((one - two).abs() > 1e-6).any()


@WHOLE_CHUNKS
def test_imitation_makes_it_do_what_was_shown(tmp_path: Path, family: Family) -> None:
    """One action for an instruction, another for the other one."""
    config = family.config()
    family.policy.create(config, SPEC, 0, tmp_path)
    policy = family.policy.load(tmp_path, config)
    optimizer = torch.optim.Adam(policy.module.parameters(), 3e-3)
    steps: dict[str, Any] = {n: c for n, c in request(16, 0).steps.items() if n != "sample"}
    steps["observations"] = steps.pop("observation")
    is_push = np.arange(16) % 2
    steps[INSTRUCTION_COLUMN] = np.stack(
        [encode_instruction("push" if push else "reach") for push in is_push]
    )
    wanted = np.where(is_push[:, None], 0.8, -0.8) * np.array([1, -1, 0.5])
    chunks, losses = np.repeat(wanted[:, None], 4, 1).astype(np.float32), []
    for number in range(family.imitation_steps):
        columns = step_fields({**steps, "actions": wanted.astype(np.float32)})
        shown = policy.prepare_demonstration(Trajectory(identity=RecordId(number, 0), **columns))
        shown.actions = chunks
        loss = -policy.evaluate(policy.collate([shown]), 1.0).logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-10:]) < 0.3 * losses[0]
    seen = {n: torch.tensor(c) for n, c in steps.items()}
    seen["observation"] = seen.pop("observations")
    with torch.no_grad():
        done = policy.act(seen, None, 0.0)["action"].numpy()
    assert np.abs(done - chunks).mean() < 0.25
