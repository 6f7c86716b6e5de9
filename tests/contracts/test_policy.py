"""What every policy keeps to: one of the registry, and that of the examples, passes this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf.channels.channel import LocalChannel
from rlinf.data.batch import pad_right
from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory, context_fields, step_fields
from rlinf.engines import engines
from rlinf.engines.external import ExternalEngine
from rlinf.envs.episode_runner import TRAJECTORY_NAMES
from rlinf.models import policies
from rlinf.models.base import copy_weights
from rlinf.models.images import PIXELS_COLUMN, SIZES_COLUMN, pack_images
from rlinf.registry import LANGUAGE_MODEL, SINGLE_PASS_ACTIONS
from rlinf.seeding import generator
from tests.contracts.own import parts

TINY = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64}
SMALL: dict[str, dict[str, Any]] = {
    "causal_lm": TINY,
    "causal_lm_critic": TINY,
    "qwen2_5_vl": {**TINY, "hidden": 64, "vision_hidden": 16},
    "mlp": {"hidden": (8,), "initial_log_std": -0.5},
    "mlp_q": {"hidden": (8,), "critic_hidden": (8,), "use_state_value": True},
    "cnn": {"hidden": (8,), "initial_log_std": -0.5, "features_dim": 8},
    "openvla": {**TINY, "vision_hidden": 16, "vision_heads": 2, "patch_size": 4},
    "openvla_oft": {
        **TINY,
        "vision_hidden": 16,
        "vision_heads": 2,
        "patch_size": 4,
        "chunk_size": 2,
        "proprio_dim": 2,
    },
    "flow": {"hidden": (8,), "denoising_steps": 3},
    "smolvla": {
        **TINY,
        "vision_hidden": 16,
        "vision_heads": 2,
        "patch_size": 5,
        "chunk_size": 2,
        "denoising_steps": 3,
    },
}
SMALL["pi0"] = {
    **SMALL["smolvla"],
    "head_dim": 8,
    "image_size": 40,
    "expert_hidden": 24,
    "expert_intermediate": 48,
}
SMALL["pi05"] = SMALL["pi0"]
SMALL["wall_oss"] = {**SMALL["smolvla"], "expert_intermediate": 48}
SMALL["gr00t"] = {**SMALL["smolvla"], "image_size": 40, "expert_hidden": 24}
SPECS: dict[str, dict[str, Any]] = {
    "tokens": {"alphabet": "0123456789+="},
    "discrete": {
        "observation": 4,
        "action": {"kind": "discrete", "size": 3},
        "images": {"front": [36, 40]},
    },
    "box": {
        "observation": 4,
        "action": {"kind": "box", "size": 2},
        "images": {"front": [36, 40]},
    },
}
NUMBERED = ("mylab.policy:Linear",)
"""Those whose actions are numbers alone."""
VECTORS = ("mlp_q", "openvla", "openvla_oft", "flow", "smolvla", "pi0", "pi05", "gr00t", "wall_oss")
"""Those whose actions are vectors alone."""


def kinds(name: str) -> list[str]:
    if LANGUAGE_MODEL in policies.get(name).provides:
        return ["tokens"]
    if name in VECTORS:
        return ["box"]
    return ["discrete"] if name in NUMBERED else ["discrete", "box"]


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4},
    "qwen3_moe": {},
    "mixtral": {"sliding_window": 4},
    "olmoe": {},
}
"""Of language models, beside the first one, with what lets them show what is their own."""
OF_ACTIONS = "values of actions"
VALUED = {"value_level": "action", "chunk_size": 3}
"""Of policies that choose chunks of actions and may value each."""
CASES = [(name, kind, "") for name in parts(policies) for kind in kinds(name)]
CASES += [
    (name, "tokens", architecture)
    for name in policies.names()
    if "tokens" in kinds(name)
    for architecture in ARCHITECTURES
    if name == "causal_lm" or (name == "causal_lm_critic" and architecture == "gemma2")
]
CASES += [
    (name, kind, OF_ACTIONS)
    for name in policies.names()
    if "value_level" in policies.get(name).Config.model_fields
    for kind in kinds(name)
]


class Tried:
    """A policy with weights whose preferences are seen."""

    def __init__(self, case: tuple[str, str, str], folder: Path) -> None:
        name, self.kind, architecture = case
        self.cls = policies.get(name)
        further = VALUED if architecture == OF_ACTIONS else ARCHITECTURES.get(architecture, {})
        if architecture in ARCHITECTURES:
            further = {"architecture": architecture, **further}
        self.options = self.cls.Config(**SMALL.get(name, {}) | further)
        self.first, self.folder = folder / "first", folder / "served"
        for each in (self.first, self.folder):
            each.mkdir()
        self.cls.create(self.options, SPECS[self.kind], 3, self.first)
        self.policy = self.cls.load(self.first, self.options)
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for tensor in self.policy.module.parameters():
                tensor.add_(0.2 * torch.randn(tensor.shape, generator=random))
        self.policy.save(self.folder, self.state())

    def state(self) -> dict[str, Tensor]:
        return {name: t.detach().clone() for name, t in self.policy.module.state_dict().items()}

    @property
    def acts(self) -> bool:
        return SINGLE_PASS_ACTIONS in self.cls.provides

    def record(self, number: int, steps: int) -> Trajectory:
        """A trajectory that follows from its number; a shorter one is the beginning of it."""
        random = np.random.default_rng(number)
        if self.kind == "tokens":
            prompt, actions = random.integers(2, 14, 3 + number % 4), random.integers(2, 14, 20)
            context = {"prompt": prompt}
            if (images := self.cls.image_processor(self.first)) is not None:
                shape = (images.token_side * (1 + number % 2), images.token_side * 2, 3)
                image = random.integers(0, 256, shape, dtype=np.uint8)
                seen = np.full(images.num_tokens(image), images.image_token_id)
                context = {"prompt": np.concatenate([prompt[:2], seen, prompt[2:]])}
                context |= pack_images([image])
            return Trajectory(
                identity=RecordId(0, number), actions=actions[:steps], **context_fields(context)
            )
        columns = {
            "observations": random.normal(size=(20, 4)).astype(np.float32),
            "images.front": random.integers(0, 256, (20, 36, 40, 3), np.uint8),
        }
        noise = self.policy.draw_noise(random, 20)
        whole = Trajectory(
            identity=RecordId(0, number), **step_fields(columns | self.acted(columns, noise, 1.0))
        )
        return whole.slice_steps(0, steps)

    def acted(
        self, columns: dict[str, np.ndarray], noise: np.ndarray, temperature: float
    ) -> dict[str, np.ndarray]:
        """Columns of what is done for those of observations."""
        seen = {"observation" if n == "observations" else n: c for n, c in columns.items()}
        drawn = torch.tensor(noise) if temperature else None
        with torch.no_grad():
            found = self.policy.act(
                {name: torch.tensor(column) for name, column in seen.items()}, drawn, temperature
            )
        return {TRAJECTORY_NAMES.get(name, name): column.numpy() for name, column in found.items()}

    def logprobs_of(
        self, records: Sequence[Trajectory], temperature: float = 1.0
    ) -> list[np.ndarray]:
        """Log-probs, entropies and values of the steps of each record: ``[T, columns]``."""
        with torch.no_grad():
            batch = self.policy.collate(records)
            outputs = self.policy.evaluate(batch, temperature, entropy=True)
        found = [c for c in (outputs.logprobs, outputs.entropy, outputs.values) if c is not None]
        shape = batch["mask"].shape
        assert all(c.dtype == torch.float32 and c.shape[:2] == shape for c in found)
        assert outputs.logprobs.ndim == 2 or self.acts
        rows = torch.cat([c.reshape(*shape, -1) for c in found], -1).numpy()
        return [row[: len(record)] for row, record in zip(rows, records, strict=True)]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(filter(None, case)))
def tried(request: pytest.FixtureRequest, tmp_path: Path) -> Tried:
    return Tried(request.param, tmp_path)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_evaluated_log_probs_are_those_of_acting(tried: Tried, temperature: float) -> None:
    if tried.acts:
        records = [tried.record(number, 6) for number in range(5)]
        for record in records:
            noise = tried.policy.draw_noise(generator(1, record.identity.sample), 6)
            shown = {"observations": record.observations, "images.front": record.images["front"]}
            acted = step_fields(tried.acted(shown, noise, temperature)) | {"images": record.images}
            for name, column in acted.items():
                setattr(record, name, column)
    else:
        records = generated(tried, temperature)
    expected_logprobs = tried.logprobs_of(records, temperature)
    for record, row in zip(records, expected_logprobs, strict=True):
        acted = record.logprobs.reshape(len(record), -1)
        np.testing.assert_allclose(row[:, : acted.shape[1]], acted, atol=1e-5)
        if record.values is not None:
            values = record.values.reshape(len(record), -1)
            np.testing.assert_allclose(row[:, -values.shape[1] :], values, atol=1e-5)


def test_there_is_a_value_for_each_step_or_for_each_action_of_its_chunk(tried: Tried) -> None:
    if not tried.acts:
        return
    valued = getattr(tried.options, "value_level", "chunk") == "action"
    record = tried.record(0, 6)
    with torch.no_grad():
        outputs = tried.policy.evaluate(tried.policy.collate([record]), 1.0)
    if outputs.values is not None:
        assert outputs.values.shape == (1, 6, *[3] * valued)
    if record.values is not None:
        assert record.values.shape == (6, *[3] * valued)


def generated(tried: Tried, temperature: float) -> list[Trajectory]:
    """Samples of an engine of this process for policies of tokens."""
    # Those of other projects take not all of these networks.
    known = map(engines.get, engines.names())
    cls = next(
        c for c in known if LANGUAGE_MODEL in c.requires and not issubclass(c, ExternalEngine)
    )
    engine = cls(cls.Config(device="cpu"), tried.cls, tried.options)
    engine.load(tried.folder, 0)
    contexts = [tried.record(number, 0).to_record().context for number in range(5)]
    prompts = [context["prompt"] for context in contexts]
    steps = {
        "sample": np.arange(5),
        "prompt": pad_right(prompts, max(map(len, prompts))).numpy(),
        "prompt_length": np.array([len(prompt) for prompt in prompts]),
    }
    for name in (PIXELS_COLUMN, SIZES_COLUMN):
        if name in contexts[0]:
            columns = [context[name] for context in contexts]
            steps[name] = pad_right(columns, max(map(len, columns))).numpy()
    channel, records = LocalChannel(), []
    info = {"horizon": 6, "temperature": temperature}
    channel.put(Record(RecordId(0, 0), steps, info=info))
    channel.close()
    for reply in engine.generate(channel, seed=1, stage="rollout"):
        for i, sample in enumerate(reply.steps["sample"].tolist()):
            length = int(reply.steps["length"][i])
            records.append(
                Trajectory(
                    identity=RecordId(0, sample),
                    actions=reply.steps["tokens"][i, :length],
                    logprobs=reply.steps["logprobs"][i, :length],
                    **context_fields(contexts[sample]),
                )
            )
    engine.close()
    return records


def test_neighbours_and_padding_do_not_matter(tried: Tried) -> None:
    records = [tried.record(number, 1 + 3 * number) for number in range(5)]
    together = tried.logprobs_of(records)
    for record, row in zip(records, together, strict=True):
        np.testing.assert_allclose(tried.logprobs_of([record])[0], row, atol=1e-5)
    for row, other in zip(tried.logprobs_of(records[::-1])[::-1], together, strict=True):
        np.testing.assert_allclose(row, other, atol=1e-5)


def test_what_comes_later_does_not_matter(tried: Tried) -> None:
    whole, beginning = (
        tried.logprobs_of([tried.record(2, 9)]),
        tried.logprobs_of([tried.record(2, 4)]),
    )
    np.testing.assert_allclose(whole[0][:4], beginning[0], atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_probabilities_of_numbered_actions_add_up_and_give_the_entropy(
    tried: Tried, temperature: float
) -> None:
    if tried.kind == "box":
        return
    record = tried.record(1, 1)
    # Of a chunk the first action is varied.
    rest = record.actions.shape[1:] if tried.kind == "discrete" else ()
    count = 3
    if tried.kind == "tokens":
        count = tried.policy.network.config.get_text_config().vocab_size
    every = []
    for action in range(count):
        actions = np.zeros((1, *rest), np.int64)
        actions[(0,) * actions.ndim] = action
        every.append(replace(record, identity=RecordId(0, action), actions=actions))
    rows = np.stack(tried.logprobs_of(every, temperature))[:, 0].astype(np.float64)
    assert np.exp(rows[:, 0]).sum() == pytest.approx(1, abs=1e-5)
    entropy = rows[0, 1 if not rest else rest[0]]
    assert -(np.exp(rows[:, 0]) * rows[:, 0]).sum() == pytest.approx(entropy, abs=1e-5)


def test_saving_and_loading_keeps_everything(tried: Tried) -> None:
    records, state = [tried.record(number, 5) for number in range(3)], tried.state()
    before = tried.logprobs_of(records)
    tried.policy = tried.cls.load(tried.folder, tried.options)
    assert tried.state().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in tried.state().items())
    for row, other in zip(tried.logprobs_of(records), before, strict=True):
        np.testing.assert_array_equal(row, other)


def test_weights_are_taken_over_by_name(tried: Tried) -> None:
    records, state = [tried.record(number, 5) for number in range(3)], tried.state()
    wanted = tried.logprobs_of(records)
    tried.policy = tried.cls.load(tried.first, tried.options)
    assert not np.allclose(tried.logprobs_of(records)[0], wanted[0], atol=1e-3)
    copy_weights(tried.policy.module, state.items())
    for row, other in zip(tried.logprobs_of(records), wanted, strict=True):
        np.testing.assert_array_equal(row, other)


def test_the_first_weights_follow_from_the_seed(tried: Tried, tmp_path: Path) -> None:
    torch.manual_seed(99)
    again = tmp_path / "again"
    again.mkdir()
    tried.cls.create(tried.options, SPECS[tried.kind], 3, again)
    one, other = (
        tried.cls.load(folder, tried.options).module.state_dict() for folder in (tried.first, again)
    )
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_every_weight_that_judges_actions_can_be_trained(tried: Tried) -> None:
    batch = tried.policy.collate([tried.record(number, 5) for number in range(3)])
    outputs = tried.policy.evaluate(batch, 1.0)
    loss = outputs.logprobs.sum() + (0 if outputs.values is None else outputs.values.sum())
    loss.backward()
    # Values of actions, and what weighs the entropy, have no part in what is said of a step.
    named = tried.policy.module.named_parameters()
    apart = {"critic", "temperature"}
    trained = [
        t for n, t in named if t.requires_grad and tried.policy.parameter_group(n) not in apart
    ]
    assert trained
    assert all(t.grad is not None and torch.isfinite(t.grad).all() for t in trained)
