"""A GGUF file becomes a model folder with its weights, tokenizer and configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.errors import DataError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.hf_folder import HFFolder
from rlinf.models.loading import convert_gguf, find_gguf

gguf: Any = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
HIDDEN, HEADS, LAYERS, WIDTH = 64, 4, 2, 128
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghij", "Ġ", "ab", "cd"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A small model of the llama family as the package ``gguf`` writes it, and its tensors."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3, *[1] * (len(WORDS) - 3)])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(WORDS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}": (HIDDEN, HIDDEN)
            for name in ("attn_q", "attn_k", "attn_v", "attn_output")
        }
        shapes |= {f"blk.{layer}.{name}": (WIDTH, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{layer}.ffn_down": (HIDDEN, WIDTH)}
        shapes |= {f"blk.{layer}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    tensors = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, tensors


def test_a_file_becomes_a_folder_that_a_run_takes(
    written: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    path, tensors = written
    convert_gguf(str(path), tmp_path / "model")
    policy = CausalLM.load(tmp_path / "model", CausalLMConfig())
    state = policy.module.state_dict()
    for ours, theirs in {
        "model.embed_tokens": "token_embd",
        "model.layers.1.mlp.down_proj": "blk.1.ffn_down",
        "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
        "model.norm": "output_norm",
    }.items():
        assert torch.equal(state[f"{ours}.weight"], torch.from_numpy(tensors[theirs]))
    assert not torch.equal(
        state["model.layers.0.self_attn.q_proj.weight"], torch.from_numpy(tensors["blk.0.attn_q"])
    ), "rows of queries and keys stand in another order in GGUF files"
    tokenizer = HFFolder(tmp_path / "model", False).tokenizer
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer("abcd")["input_ids"])[-2:] == ["ab", "cd"]
    with pytest.raises(DataError, match="is there already"):
        convert_gguf(str(path), tmp_path / "model")


def test_a_package_that_carries_one_file_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "carrier"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="carries none"):
        find_gguf("carrier")
    (package / "a.gguf").write_bytes(b"")
    assert find_gguf("carrier") == package / "a.gguf"
    (package / "b.gguf").write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.gguf, b\.gguf"):
        find_gguf("carrier")
    assert "carrier" not in sys.modules


@pytest.mark.parametrize("source", ["nothing.gguf", "no_such_package", "a-b"])
def test_what_is_not_there_is_refused(source: str) -> None:
    with pytest.raises(DataError, match=source):
        find_gguf(source)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(DataError, match="cannot be read"):
        convert_gguf(str(tmp_path / "text.gguf"), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_what_cannot_be_written_leaves_nothing_behind(
    written: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlinf.models.loading.sync_file", full)
    with pytest.raises(OSError, match="No space left"):
        convert_gguf(str(written[0]), tmp_path / "models" / "small")
    assert not list((tmp_path / "models").iterdir())
