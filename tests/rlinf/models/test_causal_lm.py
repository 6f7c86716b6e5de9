"""Policy folders are ordinary model folders; unfit ones are refused with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, DataError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.hf_folder import HFFolder

CONFIG = CausalLMConfig(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    CausalLM.create(CONFIG, {"alphabet": "0123456789+="}, 0, path)
    return path


def records() -> list[Trajectory]:
    sizes = [(3, 4), (6, 2), (1, 5)]
    random = np.random.default_rng(1)
    return [
        Trajectory(
            identity=RecordId(0, i),
            actions=random.integers(2, 14, n),
            prompt=random.integers(2, 14, p),
        )
        for i, (p, n) in enumerate(sizes)
    ]


def test_transformers_loads_the_folder(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(module).__name__ == "Qwen2ForCausalLM"
    ids = tokenizer("12+34=")["input_ids"]
    assert tokenizer.decode(ids) == "12+34="
    assert tokenizer.padding_side == "left"


def test_equal_seeds_give_equal_weights(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    CausalLM.create(CONFIG, {"alphabet": "0123456789+="}, 0, other)
    name = "model.safetensors"
    assert (folder / name).read_bytes() == (other / name).read_bytes()


def test_padding_does_not_change_log_probs(folder: Path) -> None:
    policy = CausalLM.load(folder, CONFIG)
    with torch.no_grad():
        together = policy.evaluate(policy.collate(records()), 1.0).logprobs
        for i, record in enumerate(records()):
            alone = policy.evaluate(policy.collate([record]), 1.0).logprobs[0]
            torch.testing.assert_close(together[i, : len(record)], alone, atol=1e-5, rtol=1e-5)


def test_saving_and_loading_keeps_the_weights(folder: Path, tmp_path: Path) -> None:
    policy = CausalLM.load(folder, CONFIG)
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved, dict(policy.module.state_dict()))
    again = CausalLM.load(saved, CONFIG)
    for a, b in zip(policy.module.parameters(), again.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_path_is_copied_whole(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    target.mkdir()
    CausalLM.create(CausalLMConfig(path=folder), {}, 0, target)
    assert {p.name for p in folder.iterdir()} == {p.name for p in target.iterdir()}


def test_training_drops_no_units(folder: Path, tmp_path: Path) -> None:
    """The checkpoint asks for dropout; the ratio of an update compares the policy with itself."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = GPT2Config(vocab_size=14, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    settings.resid_pdrop = settings.attn_pdrop = settings.embd_pdrop = 0.5
    gpt = tmp_path / "gpt"
    shutil.copytree(folder, gpt)
    GPT2LMHeadModel(settings).save_pretrained(gpt)
    policy = CausalLM.load(gpt, CausalLMConfig(path=gpt))
    batch = policy.collate(records())
    with torch.no_grad():
        policy.module.train()
        training = policy.evaluate(batch, 1.0).logprobs
        policy.module.eval()
        assert torch.equal(training, policy.evaluate(batch, 1.0).logprobs)


def test_a_missing_folder_gets_a_hint(folder: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'model'"):
        CausalLM.check_spec(CausalLMConfig(path=folder.parent / "modle"), {})


def test_a_tokenizer_without_end_is_refused(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["eos_token"]
    path.write_text(json.dumps(settings))
    vocabulary = folder / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace("<|endoftext|>", "<other>"))
    with pytest.raises(DataError, match="no end-of-sequence token"):
        _ = HFFolder(folder).tokenizer


def test_model_code_is_not_run_without_permission(folder: Path) -> None:
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    path.write_text(json.dumps(settings))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(DataError, match="trust_remote_code"):
        CausalLM.load(folder, CONFIG)


def test_pickled_weights_are_not_loaded(folder: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    shutil.copytree(folder, pickled)
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(DataError, match=r"pickled weights .* are not loaded"):
        CausalLM.check_spec(CausalLMConfig(path=pickled), {})


def test_a_task_without_text_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="no alphabet"):
        CausalLM.check_spec(CONFIG, {"observation": 4})


def without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def with_another(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)


def reshaped(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(31)


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (without, {}, r"missing: model\.layers\.1\.mlp\.up_proj\.weight\n"),
        (with_another, {}, r"not of this network: model\.layers\.0\.self_attn\.q_norm\.weight\n"),
        (reshaped, {}, r"of another shape: model\.norm\.weight \[31\], not \[32\]"),
        (None, {"num_hidden_layers": 3}, r"missing: model\.layers\.2\.\S+, .* and 9 more"),
        (None, {"num_hidden_layers": 1}, r"not of this network: model\.layers\.1\."),
        (None, {"model_type": "llama"}, r"not of this network: .*proj\.bias"),
        (None, {"model_type": "gpt2"}, "missing: "),
        (None, {"intermediate_size": 48}, "of another shape: "),
    ],
)
def test_weights_that_are_not_the_networks_are_refused_at_the_door_and_on_loading(
    folder: Path, change: Any, settings: dict[str, Any], words: str
) -> None:
    path = folder / "config.json"
    known = json.loads(path.read_text())
    if "num_hidden_layers" in settings:
        del known["layer_types"]
    path.write_text(json.dumps(known | settings))
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=words) as refused:
        CausalLM.check_spec(CausalLMConfig(path=folder), {})
    assert len(str(refused.value).splitlines()) <= 5
    with pytest.raises(DataError, match=words):
        CausalLM.load(folder, CONFIG)


def test_a_head_tied_to_the_embeddings_may_be_stored_or_not(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    CausalLM.check_spec(CausalLMConfig(path=folder), {})
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    CausalLM.check_spec(CausalLMConfig(path=folder), {})
    CausalLM.load(folder, CONFIG)
