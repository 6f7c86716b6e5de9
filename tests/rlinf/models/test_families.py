"""Each family of the library either generates and trains alike, or is refused at the door."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from rlinf.errors import ConfigError, DataError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.causal_lm_config import ENCODER_FAMILIES, UNSUPPORTED_FAMILIES
from rlinf.models.checkpoint_tensors import check_checkpoint_tensors, stored_shapes
from tests.rlinf.models import tiny
from tests.rlinf.models.tiny_families import (
    NEED_MORE,
    all_families,
    page,
    scaled_settings,
    tiny_settings,
)

FIRST = [
    *("bamba", "bloom", "falcon_h1", "gpt_oss", "granitemoehybrid", "lfm2", "llama4_text", "mamba"),
    *("minimax", "qwen3_5_text", "qwen3_next", "roberta", "stablelm", "trocr"),
]
"""One of each kind: recurrent layers, ALiBi, no fused attention, chunks, no cache, offsets."""
REST = [f for f in all_families() if f not in {*FIRST, *UNSUPPORTED_FAMILIES, *NEED_MORE}]


VOCABULARY = len(tiny.ALPHABET) + 2
CHOOSES = {"phimoe"}
"""Families that choose their LongRoPE scaling by the longest row of a call."""
SCALED = [
    *(("hunyuan_v1_dense", "alpha"), ("hunyuan_v1_moe", "alpha"), ("llama", "dynamic")),
    *(("bailing_hybrid", "dynamic"), ("phi3", "longrope"), ("phimoe", "longrope")),
]
NO_SCALING = {("phi3", "dynamic"), ("phimoe", "dynamic")}
"""The library refuses it, or fails in every call."""


def check_works(
    folder: Path, family: str, made: dict[str, Any] | None = None, context: int | None = None
) -> None:
    config = tiny.write(folder / "m", family, made=made or tiny_settings(family, VOCABULARY))
    config = config.model_copy(update={"max_model_len": context})
    CausalLM.check_spec(config, {})
    served = tiny.engine(config, max_num_seqs=6)
    # Some rows join late and others leave early: eight places are asked for, six are there.
    request = tiny.requests([3, 9, 5, 9], horizon=14, group=2)
    found = tiny.generate(served, request)
    for row in (0, 3, 5):
        tokens, logprobs = tiny.generate(served, tiny.rows_of(request, [row]))[row]
        np.testing.assert_array_equal(tokens, found[row][0])
        np.testing.assert_allclose(logprobs, found[row][1], atol=1e-4)
    policy, _, outputs = tiny.assert_trainer_agrees(config, request, found)
    outputs.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert any(p.grad is not None and bool(p.grad.any()) for p in policy.module.parameters())
    (folder / "saved").mkdir()
    policy.save(folder / "saved", {n: t.detach() for n, t in policy.module.state_dict().items()})
    served.load(folder / "saved", 1)
    again = tiny.generate(served, request)
    assert all((again[k][0] == found[k][0]).all() for k in found)


@pytest.mark.parametrize("family", FIRST)
def test_engine_and_trainer_agree_and_rows_stand_alone(tmp_path: Path, family: str) -> None:
    check_works(tmp_path, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", REST)
def test_so_they_do_in_all_other_families(tmp_path: Path, family: str) -> None:
    check_works(tmp_path, family)


def check_scaled(folder: Path, family: str, scaling: str) -> None:
    """The rows have up to 23 tokens, and the plain frequencies reach 16."""
    made = scaled_settings(family, VOCABULARY, scaling)
    if made is None:
        pytest.skip("no rotary scaling in its config.json")
    if family not in CHOOSES:
        check_works(folder, family, made, context=40)
        return
    made["rope_parameters"]["original_max_position_embeddings"] = 32
    check_works(folder / "plain", family, made)
    with pytest.raises(DataError, match=r"by the longest row .* to 32 at most"):
        check_works(folder / "long", family, made, context=40)


@pytest.mark.parametrize(("family", "scaling"), SCALED)
def test_rotary_scalings_of_published_models_work_or_are_refused_at_the_door(
    tmp_path: Path, family: str, scaling: str
) -> None:
    check_scaled(tmp_path, family, scaling)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["longrope", "dynamic"])
@pytest.mark.parametrize("family", sorted({*FIRST, *REST}))
def test_so_do_rotary_scalings_in_all_other_families(
    tmp_path: Path, family: str, scaling: str
) -> None:
    if (family, scaling) in NO_SCALING:
        pytest.skip("the library has no such scaling of this family")
    check_scaled(tmp_path, family, scaling)


@pytest.mark.parametrize("family", ["mllama", "qwen3_5", "qwen3_5_moe"])
def test_a_checkpoint_that_reads_images_too_is_read_and_saved_whole(
    tmp_path: Path, family: str
) -> None:
    from transformers import AutoModelForImageTextToText

    vocabulary = len(tiny.ALPHABET) + 2
    config = tiny.write(
        tmp_path / "m",
        family,
        made=tiny_settings(family, vocabulary),
        kind=AutoModelForImageTextToText,
    )
    CausalLM.check_spec(config, {})
    request = tiny.requests([3, 9, 5], horizon=6)
    found = tiny.generate(tiny.engine(config), request)
    policy, _, _ = tiny.assert_trainer_agrees(config, request, found)
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved, {n: t.detach() for n, t in policy.module.state_dict().items()})
    assert config.path is not None
    assert stored_shapes(saved) == stored_shapes(config.path)


def write_settings(folder: Path, family: str, **settings: object) -> CausalLMConfig:
    """Write a ``config.json`` alone."""
    AutoConfig.for_model(family, **settings).save_pretrained(folder)
    return CausalLMConfig(path=folder)


@pytest.mark.parametrize(
    "family", sorted(set(UNSUPPORTED_FAMILIES) - {"gemma4_assistant", "reformer"})
)
def test_what_is_no_policy_of_tokens_is_refused_at_the_door(tmp_path: Path, family: str) -> None:
    with pytest.raises(DataError, match=r"model.path: .* cannot generate and be trained token by"):
        CausalLM.check_spec(write_settings(tmp_path, family), {})


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_an_encoder_is_refused_unless_it_is_a_decoder(tmp_path: Path, family: str) -> None:
    assert family in ENCODER_FAMILIES
    with pytest.raises(DataError, match="is_decoder is not true"):
        CausalLM.check_spec(write_settings(tmp_path / "a", family), {})
    with pytest.raises(DataError, match=r"has no \*\.safetensors"):
        CausalLM.check_spec(write_settings(tmp_path / "b", family, is_decoder=True), {})


def test_a_package_that_a_network_needs_is_named(tmp_path: Path) -> None:
    if importlib.util.find_spec("timm") is not None:
        pytest.skip("timm is in this environment")
    write_settings(tmp_path, "gemma3n")
    save_file({"one": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"model.path: .*requires the timm library"):
        check_checkpoint_tensors(tmp_path)


def test_what_answers_an_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is_encoder_decoder"):
        CausalLM.check_spec(write_settings(tmp_path, "bart"), {})


def test_recurrent_layers_are_not_packed(tmp_path: Path) -> None:
    config = write_settings(tmp_path, "qwen3_next")
    with pytest.raises(ConfigError, match=r"trainer.packing: models of type 'qwen3_next'"):
        CausalLM.check_packing(config)
    CausalLM.check_packing(CausalLMConfig())


def test_the_page_of_families_is_what_the_code_does() -> None:
    written = Path(__file__).parents[3] / "docs" / "reference" / "families.md"
    assert written.read_text() == page(), (
        "python -m tests.rlinf.models.tiny_families > docs/reference/families.md"
    )
