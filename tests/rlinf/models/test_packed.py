"""Rows side by side are what they are alone: none sees another, and positions start again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.data.record import Identity, Record
from rlinf.errors import ConfigError
from rlinf.models import causal_lm
from rlinf.models.causal_lm import CausalLM
from rlinf.models.mlp import MLPPolicy
from rlinf.models.packed import APART
from tests.rlinf.models.test_logprobs import network
from tests.rlinf.trainers.test_lanes import CONFIG, folder

__all__ = ["folder"]
CPU = torch.device("cpu")
TOKENS = st.lists(st.integers(2, 13), min_size=1, max_size=6)
ROWS = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=5)
POLICIES: dict[Path, CausalLM] = {}


def record(prompt: list[int], actions: list[int]) -> Record:
    return Record(Identity(0, 0), {"actions": np.array(actions)}, {"prompt": np.array(prompt)})


def policies(folder: Path) -> tuple[CausalLM, CausalLM]:
    """One that packs, and one that does not, with the same weights."""
    if folder not in POLICIES:
        POLICIES[folder] = CausalLM.load(folder, CONFIG)
    plain = POLICIES[folder]
    packed = CausalLM(plain.module, folder)
    packed.use_packing(CPU, torch.float32)
    return packed, plain


@settings(deadline=None, max_examples=30)
@given(ROWS, st.sampled_from([1 << 25, 40]))
def test_packed_rows_are_separate_rows(
    folder: Path, rows: list[tuple[list[int], list[int]]], whole: int
) -> None:
    packed, plain = policies(folder)
    records = [record(*row) for row in rows]
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_lm, "WHOLE", whole)
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
    others[changed] = ([15 - token for token in prompt], [15 - token for token in actions])
    with torch.no_grad():
        one, other = (
            packed.evaluate(packed.collate([record(*row) for row in some]), 1.0).logprobs
            for some in (rows, others)
        )
    same = [i for i in range(len(rows)) if i != changed]
    assert torch.equal(one[same], other[same])


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(APART))
def test_these_families_keep_packed_rows_apart(family: str) -> None:
    torch.manual_seed(0)
    module = network(family)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rows = [torch.randint(1, 50, (length,)) for length in (3, 1, 5, 2)]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    inputs = {"input_ids": torch.cat(rows)[None], "position_ids": positions}
    with torch.no_grad():
        packed = module(**inputs, use_cache=False).logits[0]
        alone = [module(input_ids=row[None], use_cache=False).logits[0] for row in rows]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_models_that_may_not_keep_rows_apart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.packing: models of type 'mpt'"):
        CausalLM(network("mpt"), tmp_path).use_packing(CPU, torch.float32)
    with pytest.raises(ConfigError, match=r"trainer\.packing: MLPPolicy"):
        MLPPolicy.use_packing(MLPPolicy.__new__(MLPPolicy), CPU, torch.float32)
