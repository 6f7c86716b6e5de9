"""Rows side by side are what they are alone: none sees another, also where a prompt is shared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError
from rlinf.models import causal_lm
from rlinf.models.actor_critic import MLPPolicy
from rlinf.models.causal_lm import CausalLM
from rlinf.models.packed_attention import (
    PACKABLE_FAMILIES,
    PackedRows,
    enable_packed_attention,
    pack,
)
from tests.rlinf.models.test_logprobs import network
from tests.rlinf.trainers.test_threaded_data_parallel import CONFIG, folder

__all__ = ["folder"]
CPU = torch.device("cpu")
TOKENS = st.lists(st.integers(2, 13), min_size=1, max_size=6)
PROMPTS = st.one_of(TOKENS, st.sampled_from([[3, 4, 5], [7], [3, 4, 5, 6, 7, 8]]))
ROWS = st.lists(st.tuples(PROMPTS, TOKENS), min_size=1, max_size=7)
POLICIES: dict[Path, tuple[CausalLM, CausalLM]] = {}


def record(prompt: list[int], actions: list[int]) -> Trajectory:
    return Trajectory(identity=RecordId(0, 0), actions=np.array(actions), prompt=np.array(prompt))


def policies(folder: Path) -> tuple[CausalLM, CausalLM]:
    """One that packs, and one that does not, with the same weights."""
    if folder not in POLICIES:
        packed, plain = (CausalLM.load(folder, CONFIG) for _ in range(2))
        packed.enable_packing(CPU, torch.float32)
        POLICIES[folder] = packed, plain
    return POLICIES[folder]


@settings(deadline=None, max_examples=30)
@given(ROWS, st.sampled_from([1 << 25, 40]))
def test_packed_rows_are_separate_rows(
    folder: Path, rows: list[tuple[list[int], list[int]]], whole: int
) -> None:
    packed, plain = policies(folder)
    records = [record(*row) for row in rows]
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_lm, "MAX_LOGITS", whole)
        for policy, parts in ((packed, [records]), (plain, [[one] for one in records])):
            policy.module.zero_grad()
            found = []
            for part in parts:
                out = policy.evaluate(policy.collate(part), 0.9, entropy=True)
                assert out.entropy is not None
                (out.logprobs.sum() + out.entropy.square().sum()).backward()
                for i, one in enumerate(part):
                    found.append((out.logprobs[i, : len(one)], out.entropy[i, : len(one)]))
                assert out.logprobs.shape == (len(part), max(len(one) for one in part))
            gradients = [p.grad for p in policy.module.parameters()]
            results.append((found, gradients))
    (one, ours), (other, theirs) = results
    for pair, right in zip(one, other, strict=True):
        torch.testing.assert_close(torch.stack(pair), torch.stack(right), rtol=1e-5, atol=2e-6)
    for given_, right_ in zip(ours, theirs, strict=True):
        assert given_ is not None
        assert right_ is not None
        atol = 1e-5 * max(1.0, float(right_.abs().max()))
        torch.testing.assert_close(given_, right_, rtol=0, atol=atol)


@settings(deadline=None, max_examples=15)
@given(ROWS.filter(lambda rows: len(rows) > 1), st.data())
def test_no_row_sees_another(
    folder: Path, rows: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    packed, _ = policies(folder)
    changed = data.draw(st.integers(0, len(rows) - 1))
    prompt, actions = rows[changed]
    others = [*rows]
    # Of rows that share a prompt only the answer: with another prompt it would be no such row.
    alone = [row[0] for row in rows].count(prompt) == 1
    again = [15 - token for token in prompt] if alone else prompt
    assume(again == prompt or again not in [row[0] for row in rows])
    others[changed] = (again, [15 - token for token in actions])
    with torch.no_grad():
        one, other = (
            packed.evaluate(packed.collate([record(*row) for row in some]), 1.0).logprobs
            for some in (rows, others)
        )
    same = [i for i in range(len(rows)) if i != changed]
    assert torch.equal(one[same], other[same])


def test_a_shared_prompt_stands_there_once() -> None:
    prompts = [np.array([5, 6, 7])] * 3 + [np.array([8])]
    batch = pack(prompts, [np.array(row) for row in ([1, 2], [3], [4, 5], [6, 7])], 2, share=True)
    assert batch["tokens"].tolist() == [[5, 6, 7, 1, 4, 8, 6]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 3, 0, 1]]
    assert batch["logit_indices"].tolist() == [2, 3, 2, 2, 4, 5, 6]
    assert batch["step_indices"].tolist() == [0, 1, 2, 4, 5, 6, 7]


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("family", sorted(PACKABLE_FAMILIES))
def test_these_families_keep_packed_rows_apart(family: str, window: int | None) -> None:
    torch.manual_seed(0)
    module = network(family)
    if window is not None:
        if getattr(module.config, "sliding_window", None) is None:
            pytest.skip("without a window")
        module.config.sliding_window = window
        for part in module.modules():
            if getattr(part, "sliding_window", None) is not None:
                part.sliding_window = window
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    random = np.random.default_rng(0)
    first, second = (random.integers(1, 50, length) for length in (6, 3))
    prompts = [first, second, first, first, random.integers(1, 50, 4)]
    actions = [random.integers(1, 50, length) for length in (3, 1, 5, 2, 4)]
    with torch.no_grad():
        alone = [
            module(
                input_ids=torch.from_numpy(np.concatenate(row)[None, :-1]), use_cache=False
            ).logits[0, len(row[0]) - 1 :]
            for row in zip(prompts, actions, strict=True)
        ]
        assert enable_packed_attention(module, CPU, torch.float32)
        batch = pack(prompts, actions, 5, share=True)
        packed = module(
            input_ids=batch["tokens"],
            position_ids=batch["positions"],
            logits_to_keep=batch["logit_indices"],
            rows=PackedRows.from_batch(batch),
            use_cache=False,
        ).logits[0]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_models_that_may_not_keep_rows_apart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.packing: models of type 'mpt'"):
        CausalLM(network("mpt"), tmp_path).enable_packing(CPU, torch.float32)
    with pytest.raises(ConfigError, match=r"trainer\.packing: MLPPolicy"):
        MLPPolicy.enable_packing(MLPPolicy.__new__(MLPPolicy), CPU, torch.float32)
