"""Flow policies of which one denoising step is random, or only the action expert is trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf.models.denoising import (
    CHAIN_COLUMN,
    RANDOM_STEP_COLUMN,
    DenoisingProcess,
    flow_sde_sigmas,
    noise_fractions,
    step_mean,
)
from rlinf.models.gr00t import Gr00tPolicy
from rlinf.models.pi0 import Pi0Policy, Pi05Policy
from rlinf.models.smolvla import SmolVLAPolicy
from rlinf.models.wall_oss import WallOSSPolicy
from rlinf.trainers.base import loss_from_steps
from tests.rlinf.models import acting
from tests.rlinf.models.acting import SPEC, request, stirred
from tests.rlinf.models.test_gr00t import SIZES as GR00T_SIZES
from tests.rlinf.models.test_pi0 import SIZES as PI_SIZES
from tests.rlinf.models.test_smolvla import SIZES as SMOL_SIZES
from tests.rlinf.models.test_wall_oss import SIZES as WALL_SIZES

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "pi0": (Pi0Policy, PI_SIZES),
    "pi05": (Pi05Policy, PI_SIZES),
    "smolvla": (SmolVLAPolicy, SMOL_SIZES),
    "gr00t": (Gr00tPolicy, GR00T_SIZES),
    "wall_oss": (WallOSSPolicy, WALL_SIZES),
}


MOVED = {
    "gr00t": ("state_encoder", "action_encoder", "transformer_blocks", "action_decoder"),
    "wall_oss": ("experts.1.", "propri_proj", "w1", "action_proj_back"),
}
"""Parts that a trainer with a frozen vision-language model moves, where other than in pi-0."""


def made(folder: Path, name: str, **options: Any) -> tuple[Any, Any, Any]:
    """Class, options and policy of a folder with weights that all matter."""
    cls, sizes = CASES[name]
    config = cls.Config(**{**sizes, "likelihood": "single_step", **options})
    (folder / "first").mkdir(parents=True)
    cls.create(config, SPEC, 0, folder / "first")
    policy = cls.load(folder / "first", config)
    stirred(policy)
    policy.save(folder, policy.module.state_dict())
    return cls, config, policy


def velocity(points: Tensor, tau: Tensor) -> tuple[Tensor, None]:
    return (points + tau[:, None]).sin(), None


def test_only_one_step_of_each_chain_is_random() -> None:
    """The others follow the flow; that one has the density of the process."""
    steps, level = 5, 0.7
    process = DenoisingProcess(steps, level, 1)
    random, index = torch.Generator().manual_seed(0), torch.tensor([0, 2, 4, 1])
    noise = torch.randn(4, steps + 1, 3, generator=random)
    chain = process.sample(velocity, noise[:, 0], noise[:, 1:], 1.0, index)
    tau, sigmas = noise_fractions(steps), flow_sde_sigmas(steps, level)
    for row in range(4):
        for step in range(steps):
            point, after = chain[row, step], chain[row, step + 1]
            flow = (point + tau[step]).sin()
            wanted = point - flow / steps
            if step == index[row]:
                wanted = step_mean(point, flow, tau[step], sigmas[step], steps)
                wanted = wanted + noise[row, step + 1] * sigmas[step] / math.sqrt(steps)
            torch.testing.assert_close(after, wanted)
    rows = torch.arange(4)[:, None]
    pairs = chain[rows, torch.stack([index, index + 1], 1)]
    flows = velocity(pairs[:, :1], tau[index][:, None])[0]
    logprobs, entropies = process.logprobs_and_entropy(pairs, flows, None, 1.0, index)
    spread = (sigmas[index] / math.sqrt(steps))[:, None].expand(-1, 3)
    normal = torch.distributions.Normal(torch.zeros(4, 3), spread)
    drawn = noise[torch.arange(4), index + 1] * spread
    torch.testing.assert_close(logprobs, normal.log_prob(drawn), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(entropies, normal.entropy())


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize(("noise", "temperature"), [("sde", 1.0), ("learned", 0.6), ("sde", 0.0)])
def test_the_trainer_recomputes_the_log_probabilities_of_that_step(
    tmp_path: Path, name: str, noise: str, temperature: float
) -> None:
    cls, config, policy = made(tmp_path, name, noise_method=noise)
    records = acting.rolled_out(cls, config, tmp_path, temperature)
    assert records[0].policy_columns[CHAIN_COLUMN].shape == (3, 2, 4, 3)
    steps = np.stack([record.policy_columns[RANDOM_STEP_COLUMN] for record in records])
    assert steps.min() >= 0
    assert steps.max() < policy.num_denoising_steps
    assert (len(np.unique(steps)) > 1) == (temperature > 0)
    learns = acting.trainer(cls, config, tmp_path)
    acting.assert_recomputed(learns, records, temperature)
    learns.close()


def test_at_temperature_zero_the_actions_are_those_of_the_joint_likelihood(tmp_path: Path) -> None:
    seen = {n: torch.tensor(c) for n, c in request(5, 0).steps.items() if n != "sample"}
    found = []
    for kind in ("single_step", "joint"):
        policy = made(tmp_path / kind, "pi0", likelihood=kind)[2]
        with torch.no_grad():
            found.append(policy.act(seen, None, 0.0)["action"])
    torch.testing.assert_close(*found)


def test_a_first_update_has_ratios_of_one_and_a_gradient(tmp_path: Path) -> None:
    cls, config, _ = made(tmp_path, "pi05")
    learns = acting.trainer(cls, config, tmp_path)
    acting.assert_first_update(learns, acting.rolled_out(cls, config, tmp_path), "action")
    learns.close()


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_frozen_vision_language_model_stays_as_it_is(tmp_path: Path, name: str) -> None:
    """Weights, gradients and moments; checkpoints of such a trainer can be loaded."""
    cls, config, policy = made(tmp_path, name, freeze_vlm=True)
    records = acting.rolled_out(cls, config, tmp_path)
    loss = loss_from_steps(
        lambda outputs, _: (outputs.logprobs.square().sum() + outputs.values.square().sum(), {})
    )
    before = policy.module.state_dict()
    learns = acting.trainer(cls, config, tmp_path)
    learns.step(records, loss, lr=1e-2)
    learns.save(tmp_path / "checkpoint")
    after = learns.full_state_dict(copy=True)
    learns.step(records, loss, lr=1e-2)
    again = acting.trainer(cls, config, tmp_path)
    again.load(tmp_path / "checkpoint")
    again.step(records, loss, lr=1e-2)
    for key, tensor in learns.full_state_dict().items():
        assert torch.equal(tensor, again.full_state_dict()[key]), key
    moved = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    assert not any(cls.vlm_parameters.match(key) for key in moved)
    assert any(cls.vlm_parameters.match(key) for key in before)
    for part in (*MOVED.get(name, ("expert", "action_in_proj", "action_out_proj")), "value_head"):
        assert any(part in key for key in moved), part
    for made_trainer in (learns, again):
        made_trainer.close()


def test_adapters_beside_a_frozen_model_are_refused(tmp_path: Path) -> None:
    _, _, policy = made(tmp_path, "pi0", freeze_vlm=True)
    assert not policy.supports_lora


def test_pixels_and_positions_are_embedded_in_float32(tmp_path: Path) -> None:
    """In bfloat16 passes the output of that part is the rounded one of a float32 pass."""
    cls, config, policy = made(tmp_path, "pi0")
    (stem,) = policy.float32_modules()
    pixels = torch.rand(2, 3, 24, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        exact = stem(pixels)
    learns = acting.trainer(cls, config, tmp_path, param_dtype="bfloat16")
    (own,) = learns.policy.float32_modules()
    with torch.no_grad():
        found = own(pixels)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16())
    learns.close()
