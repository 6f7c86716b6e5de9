"""A reward model gives each trajectory the number that it gives the text alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlinf.config import RunConfig
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory, step_fields
from rlinf.device_memory import DeviceMemoryManager
from rlinf.errors import ConfigError, DataError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.sequence_classifier import check_classifier
from rlinf.rewards.base import RewardResources
from rlinf.rewards.reward_model import (
    PATH_KEY,
    RewardModelConfig,
    RewardModelReward,
    length_grouped_batches,
)
from tests.rlinf.rewards.folders import ALPHABET, write_reward_model

TEXTS = [("1+1=", "2"), ("what is 3+4=", "seven"), ("", "x"), ("10+10=", "20 or so"), ("a", "")]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def trajectory(prompt: str, text: str, sample: int = 0) -> Trajectory:
    steps = {"actions": torch.zeros(3, dtype=torch.int64).numpy()}
    return Trajectory(
        identity=RecordId(0, sample), **step_fields(steps), prompt_text=prompt, text=text, group=0
    )


TRAJECTORIES = [trajectory(*pair, number) for number, pair in enumerate(TEXTS)]


def made(
    folder: Path, resources: RewardResources | None = None, **config: Any
) -> RewardModelReward:
    return RewardModelReward(
        RewardModelConfig(path=folder, **config), resources or RewardResources()
    )


def numbers(reward: RewardModelReward) -> list[float]:
    return [float(steps.sum()) for steps in reward.compute_step_rewards(TRAJECTORIES, [])]


def direct(folder: Path, texts: list[str], special: bool) -> list[float]:
    """What the library says of each text alone."""
    module = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [
            float(module(**tokenizer(text, add_special_tokens=special, return_tensors="pt")).logits)
            for text in texts
        ]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "padding",
    [{}, {"pad_token_id": 1}, {"pad_token_id": None}],
    ids=["own", "end token", "none"],
)
def test_it_gives_what_a_direct_forward_gives(
    kind: str, padding: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever is beside it; the padding token may be the one that ends a text, or none."""
    folder = write_reward_model(tmp_path, kind, **padding)
    texts = [prompt + (text or "<|endoftext|>") for prompt, text in TEXTS]
    requests = [
        trajectory(prompt, text or "<|endoftext|>", n) for n, (prompt, text) in enumerate(TEXTS)
    ]
    expected = direct(folder, texts, True)
    assert len({round(number, 2) for number in expected}) > 3, "they differ"
    for budget in (1, 24, 1000):
        got = made(folder, max_tokens_per_batch=budget).compute_step_rewards(requests, [])
        assert [float(steps.sum()) for steps in got] == pytest.approx(expected, abs=1e-5)


def test_its_own_chat_template_puts_prompt_and_response_together(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    texts = [f"<user>{prompt}<|endoftext|><assistant>{text}<|endoftext|>" for prompt, text in TEXTS]
    assert numbers(made(folder)) == pytest.approx(direct(folder, texts, False), abs=1e-5)


def test_scale_and_offset_are_applied(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path)
    plain = numbers(made(folder))
    got = numbers(made(folder, scale=2.0, offset=-1.0))
    assert got == pytest.approx([2 * number - 1 for number in plain], abs=1e-5)


@pytest.mark.parametrize(("setting", "worth"), [("mask", 0.0), (-1.5, -1.5)])
def test_what_is_too_long_for_it_is_said(setting: Any, worth: float, tmp_path: Path) -> None:
    """Cut off it would be judged by what it does not say."""
    reward = made(write_reward_model(tmp_path), max_length=12, overlong_reward=setting)
    found = reward.compute_results(TRAJECTORIES, [])
    assert [judgement.failure for judgement in found] == ["", "too_long", "", "too_long", ""]
    assert [judgement.valid for judgement in found] == [
        judgement.failure == "" or setting != "mask" for judgement in found
    ]
    assert float(torch.as_tensor(found[1].reward).sum()) == worth
    model_limit = made(reward.config.path)
    longer = trajectory("1" * 60, "12345")
    assert model_limit.compute_results([longer], [])[0].failure == "too_long", "64 positions"


def test_its_folder_is_read_once_for_all_judgements(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path)
    reward = made(folder)
    first = numbers(reward)
    shutil.rmtree(folder)
    assert numbers(reward) == first


def test_its_weights_leave_the_device_for_others_and_come_back(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path)
    residency = DeviceMemoryManager(torch.device("cpu"), 1 << 30)
    reward = made(folder, RewardResources(device="cpu", residency=residency))
    assert reward.group_sizes() == {}
    first = numbers(reward)
    whole = reward.group_sizes()["weights"].on_device
    assert whole > 10_000
    residency.offload_all()
    assert reward.group_sizes()["weights"] == (0, whole, 0)
    assert numbers(reward) == first
    reward.close()
    assert reward.group_sizes() == {}


def no_head(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    sizes = CausalLMConfig(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)
    CausalLM.create(sizes, {"alphabet": ALPHABET}, 0, folder)


def three_labels(folder: Path) -> None:
    write_reward_model(folder, num_labels=3)


def few_tokens(folder: Path) -> None:
    write_reward_model(folder, vocab_size=20)


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def another_shape(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 48}))


def no_classifier(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "clip"}))


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (no_head, "no head for sequence classification .*score.weight"),
        (three_labels, "has 3 labels.*a reward model has one"),
        (few_tokens, "knows 20 .vocab_size.*do not belong together"),
        (no_tokenizer, "cannot load a tokenizer"),
        (another_shape, "of another shape"),
        (no_classifier, "no sequence classifier"),
        (shutil.rmtree, "no folder"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no .*safetensors"),
    ],
)
def test_what_is_no_reward_model_is_refused(
    harm: Callable[[Path], None], text: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_reward_model(folder)
    harm(folder)
    with pytest.raises(DataError, match=f"(?s)reward.path.*{text}") as error:
        check_classifier(folder, PATH_KEY, None)
    assert "model.path" not in str(error.value)


def test_a_run_with_one_that_is_not_there_is_refused_before_it_begins(compose: Any) -> None:
    from pipeline.validate_config import validate_config

    words = ("reward=reward_model", "reward.path=/no/such/folder")
    config = RunConfig.model_validate(compose(*words))
    with pytest.raises(DataError, match=r"reward\.path: no folder /no/such/folder"):
        validate_config(config)
    wrong = RunConfig.model_validate(compose(*words, "reward.max_token_per_batch=4"))
    with pytest.raises(ConfigError, match=r"reward\.max_token_per_batch.*'max_tokens_per_batch'"):
        validate_config(wrong)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_batches_hold_every_row_once_within_their_budget(lengths: list[int], most: int) -> None:
    found = list(length_grouped_batches(lengths, most))
    assert sorted(row for batch in found for row in batch) == list(range(len(lengths)))
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= most
