"""What is read of a published folder, and whose files it may have."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf.engines.external import check_model_len
from rlinf.engines.transformers import TransformersConfig, TransformersEngine
from rlinf.engines.vllm import VLLMConfig, VLLMEngine
from rlinf.errors import ConfigError, DataError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.hf_folder import HFFolder, check_links
from tests.rlinf.models.chat_templates import CHATML, OPENS, PLAIN
from tests.rlinf.models.folders import make_tokenizer, write_folder
from tests.rlinf.models.vllm_lengths import vllm_accepts


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_files_and_links_inside_the_folder_are_fine(model: Path) -> None:
    (model / "copy.safetensors").symlink_to("model.safetensors")
    check_links(model)


def test_links_of_a_hugging_face_cache_are_fine(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x--y/blobs", tmp_path / "models--x--y/snapshots/abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "123").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    check_links(snapshot)
    (tmp_path / "named").symlink_to(snapshot)
    check_links(tmp_path / "named")


def test_a_link_out_of_the_folder_is_refused_with_what_to_do(tmp_path: Path, model: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"weights")
    (model / "more.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"more\.safetensors is a link that leads out.*cp -L"):
        check_links(model)


def test_a_link_to_nothing_is_refused(model: Path) -> None:
    (model / "more.safetensors").symlink_to("gone")
    with pytest.raises(DataError, match="which is not there"):
        check_links(model)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_link_to_another_users_file_is_refused(model: Path) -> None:
    (model / "theirs").write_bytes(b"weights")
    os.chown(model / "theirs", 12345, 12345)
    (model / "more.safetensors").symlink_to("theirs")
    with pytest.raises(DataError, match="belongs to another user"):
        check_links(model)


ENDS = make_tokenizer()
IM_END, END_OF_TEXT, RETURN = map(
    ENDS.convert_tokens_to_ids, ("<|im_end|>", "<|endoftext|>", "<|return|>")
)
TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
}


@pytest.mark.parametrize(
    ("template", "settings", "generation", "ends"),
    [
        # A base model whose tokenizer has the chat template: fine-tuning teaches <|im_end|>.
        (CHATML, {"eos_token_id": END_OF_TEXT}, None, {IM_END, END_OF_TEXT}),
        (CHATML, {}, {"eos_token_id": [RETURN, IM_END]}, {IM_END, END_OF_TEXT, RETURN}),
        (None, {}, {"eos_token_id": RETURN}, {END_OF_TEXT, RETURN}),
        (None, {"eos_token_id": [RETURN, IM_END]}, None, {END_OF_TEXT, RETURN, IM_END}),
        (None, {"text_config": {"eos_token_id": RETURN}}, None, {END_OF_TEXT, RETURN}),
        (None, {"eos_token_id": None}, {"eos_token_id": None}, {END_OF_TEXT}),
        # Of a larger vocabulary, as class defaults have it: no token of this model.
        (None, {"eos_token_id": 151643}, None, {END_OF_TEXT}),
        (PLAIN, {}, None, {END_OF_TEXT}),
    ],
)
def test_a_response_ends_at_every_token_that_the_folder_names(
    tmp_path: Path,
    template: str | None,
    settings: dict[str, Any],
    generation: dict[str, Any] | None,
    ends: set[int],
) -> None:
    folder = write_folder(tmp_path / "m", make_tokenizer(template), settings, generation)
    assert HFFolder(folder).stop_token_ids == ends


def test_engines_and_fine_tuning_end_a_response_with_the_same_tokens(tmp_path: Path) -> None:
    """Of a base model whose end token is not that of its chat template."""
    settings = {**TINY, "eos_token_id": END_OF_TEXT}
    folder = write_folder(tmp_path / "m", make_tokenizer(CHATML), settings)
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    network.save_pretrained(folder)
    config = CausalLMConfig(path=folder)
    engine = TransformersEngine(TransformersConfig(), CausalLM, config)
    engine.load(folder, 0)
    server = VLLMEngine(VLLMConfig(), CausalLM, config)
    server._read_model(folder)
    published = HFFolder.from_config(config)
    assert set(engine.stop_token_ids.tolist()) == server.stop_token_ids == published.stop_token_ids
    assert published.chat_format.end_of_turn_token_id == IM_END in server.stop_token_ids


ROPE = {"rope_theta": 5e5, "original_max_position_embeddings": 8192}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
TEXT = {"hidden_size": 16, "num_attention_heads": 2}
LENGTHS: dict[str, tuple[dict[str, Any], int | None]] = {
    "llama-2": ({"model_type": "llama", "max_position_embeddings": 4096}, 4096),
    "llama-3.1": (
        {
            "model_type": "llama",
            "max_position_embeddings": 131072,
            "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192},
        },
        131072,
    ),
    "llama-3.1 saved anew": (
        {
            "model_type": "llama",
            "max_position_embeddings": 131072,
            "rope_parameters": {**LLAMA3, **ROPE},
        },
        131072,
    ),
    "gpt-oss": (
        {"model_type": "gpt_oss", "max_position_embeddings": 131072, "rope_scaling": YARN},
        131072,
    ),
    "deepseek-v3": (
        {
            "model_type": "deepseek_v3",
            "max_position_embeddings": 163840,
            "rope_scaling": {**YARN, "factor": 40},
        },
        163840,
    ),
    "qwen2.5 with yarn": (
        {"max_position_embeddings": 32768, "rope_scaling": {**YARN, "factor": 4.0}},
        32768,
    ),
    "phi-3.5": (
        {
            "model_type": "phi3",
            "pad_token_id": 0,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": LONG,
        },
        131072,
    ),
    "vicuna-16k": (
        {
            "model_type": "llama",
            "max_position_embeddings": 4096,
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
        16384,
    ),
    "internlm2": (
        {
            "model_type": "llama",
            "max_position_embeddings": 32768,
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
        },
        65536,
    ),
    "gemma-3": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        },
        131072,
    ),
    "qwen2.5-vl": (
        {
            "model_type": "qwen2_5_vl",
            "text_config": {**TEXT, "max_position_embeddings": 128000},
        },
        128000,
    ),
    "command-r": (
        {"model_type": "cohere", "max_position_embeddings": 8192, "model_max_length": 131072},
        131072,
    ),
    "gpt-2": ({"model_type": "gpt2", "n_positions": 1024}, 1024),
    "bloom": ({"model_type": "bloom", "seq_length": 2048}, 2048),
    "mpt": ({"model_type": "mpt", "max_seq_len": 2048}, 2048),
    "mamba": ({"model_type": "mamba"}, None),
}
"""Facts of published configurations, and the length up to which vLLM serves each."""


def write_settings(folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **settings}))
    return folder


@pytest.mark.parametrize("name", LENGTHS)
def test_the_context_length_is_that_of_the_family(tmp_path: Path, name: str) -> None:
    settings, length = LENGTHS[name]
    assert HFFolder(write_settings(tmp_path / "m", settings)).context_length == length


@pytest.mark.slow
def test_vllm_serves_that_length_and_no_greater_one(tmp_path: Path) -> None:
    known = {name: pair for name, pair in LENGTHS.items() if pair[1] is not None}
    requests = [
        (str(write_settings(tmp_path / str(number), settings)), length)
        for number, (settings, length) in enumerate(known.values())
    ]
    found = vllm_accepts(requests)
    assert dict(zip(known, found, strict=True)) == {name: [True, False] for name in known}


def test_more_context_than_the_model_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.max_model_len: 65 .* 64"):
        check_model_len(65, 64)
    check_model_len(64, 64)
    check_model_len(None, 64)
    check_model_len(65, None)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small whole checkpoint with a chat template."""
    folder = write_folder(tmp_path / "m", make_tokenizer(CHATML), TINY)
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    network.save_pretrained(folder)
    return folder


def accepted(folder: Path, target: Path) -> dict[str, Any]:
    """The tensors of a folder that is checked, loaded, and copied for a run."""
    config = CausalLMConfig(path=folder)
    CausalLM.check_spec(config, {})
    target.mkdir()
    CausalLM.create(config, {}, 0, target)
    assert not any(target.glob("consolidated*"))
    return CausalLM.load(target, config).module.state_dict()


def in_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, table = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        table |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def with_mistral_format(folder: Path) -> None:
    in_shards(folder)
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    (folder / "consolidated.safetensors.index.json").write_text('{"weight_map": {}}')


def with_old_buffers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["model.layers.0.self_attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, folder / "model.safetensors")


def with_stale_index(folder: Path) -> None:
    """As the library does, the whole file is read."""
    table = {"weight_map": {"lm_head.weight": "model-00007-of-00007.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))


@pytest.mark.parametrize(
    "change", [in_shards, with_mistral_format, with_old_buffers, with_stale_index]
)
def test_weights_are_read_as_the_library_reads_them(
    checkpoint: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    right = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    change(checkpoint)
    found = accepted(checkpoint, tmp_path / "run")
    assert found.keys() == right.keys()
    assert all(torch.equal(found[name], right[name]) for name in right)


def test_advice_for_pickled_weights_leads_to_a_folder_that_is_accepted(
    checkpoint: Path, tmp_path: Path
) -> None:
    torch.save(load_file(checkpoint / "model.safetensors"), checkpoint / "pytorch_model.bin")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(DataError, match="unpickling runs code") as caught:
        CausalLM.check_spec(CausalLMConfig(path=checkpoint), {})
    _, _, advice = str(caught.value).partition("convert them: ")
    eval(advice, {"AutoModelForCausalLM": AutoModelForCausalLM})  # what a user would do
    assert accepted(checkpoint, tmp_path / "run")


def only_mistral(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")


def packed(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(16, 16, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")


def quantised(folder: Path) -> None:
    settings = {**json.loads((folder / "config.json").read_text())}
    settings["text_config"] = {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(settings))


def adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def empty(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (only_mistral, r"Mistral's own format alone .*model\.safetensors\.index\.json"),
        (packed, r"quantized weights \(model\.layers\.0\.mlp\.up_proj\.weight\).*dequantize"),
        (quantised, r"quantized weights .*config\.json.*dequantize"),
        (adapter, "adapter alone .*merge_and_unload"),
        (empty, r"no \*\.safetensors; fetch its weights"),
    ],
)
def test_a_folder_without_weights_to_train_says_what_to_do(
    checkpoint: Path, change: Callable[[Path], None], words: str
) -> None:
    change(checkpoint)
    with pytest.raises(DataError, match=words):
        CausalLM.check_spec(CausalLMConfig(path=checkpoint), {})


def test_the_default_of_several_chat_templates_is_taken(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", make_tokenizer())
    path = folder / "tokenizer_config.json"
    known = json.loads(path.read_text())
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": CHATML}]
    path.write_text(json.dumps({**known, "chat_template": several}))
    assert HFFolder(folder).chat_format.template == CHATML
    path.write_text(json.dumps({**known, "chat_template": several[:1]}))
    with pytest.raises(DataError, match=r"tool_use, and none is named default"):
        _ = HFFolder(folder).tokenizer
    (folder / "chat_template.jinja").write_text(PLAIN)
    assert HFFolder(folder).chat_format.template == PLAIN
    (folder / "chat_template.jinja").unlink()
    path.write_text(json.dumps(known))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    assert HFFolder(folder).chat_format.template == CHATML
    (folder / "chat_template.json").unlink()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/rag.jinja").write_text("r")
    with pytest.raises(DataError, match="none is named default"):
        _ = HFFolder(folder).tokenizer


def test_arguments_of_the_template_come_from_the_configuration(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text(OPENS)
    config = CausalLMConfig(path=checkpoint, chat_template_kwargs={"enable_thinking": False})
    made = CausalLM.processor(checkpoint, config).chat_format
    (prompt,) = made.render_prompts([[{"role": "user", "content": "Hi"}]])
    assert prompt.endswith("<think>\n\n</think>\n\n")
    wrong = CausalLMConfig(path=checkpoint, chat_template_kwargs={"enable_thinkng": False})
    with pytest.raises(ConfigError, match=r"kwargs\.enable_thinkng: .*did you mean"):
        CausalLM.check_spec(wrong, {})
    new = CausalLMConfig(chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(ConfigError, match="has no chat template"):
        CausalLM.check_spec(new, {"alphabet": "ab"})
