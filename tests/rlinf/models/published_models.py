"""Published models in small: the facts of ``published/*.json`` with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rlinf.models.causal_lm import CausalLMConfig
from tests.rlinf.models.tiny_families import tiny_settings

FACTS = Path(__file__).parent / "published"
TEXT = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n.,:;!?+-*/=()<>[]|_\\{}'\"$"
)


def facts() -> list[dict[str, Any]]:
    """Return what is known of each model.

    ``config`` has the switches of ``config.json`` with their published values, but sizes are small,
    and a window is 8. ``stops`` are the tokens that end a response, ``context`` is vLLM's own
    limit, and ``max_model_len`` what rlinf takes by default where that is less. ``checked`` names
    public material that agrees, with what of it is about another model or a part of the facts.
    """
    return [json.loads(path.read_text()) for path in sorted(FACTS.glob("*.json"))]


def write(folder: Path, known: dict[str, Any]) -> CausalLMConfig:
    """Write a model folder in the published format; return the configuration of its policy."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    tokenizer = _tokenizer(known["tokenizer"])
    if known["template"] is not None:
        tokenizer.chat_template = template_of(known["template"])
    tokenizer.save_pretrained(folder)
    # Published models know some more tokens than their tokenizers.
    settings = {**tiny_settings(known["model_type"], len(tokenizer) + 5), **known.get("tiny", {})}
    settings |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ENDS}
    if "n_positions" in known["config"]:
        del settings["max_position_embeddings"]
    settings |= known["config"]
    if "head_dim" in settings and known.get("tiny"):
        settings["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]
    rope = settings.get("rope_scaling")
    if rope and rope.get("short_factor") == "ones":
        head = settings["hidden_size"] // settings["num_attention_heads"]
        count = int(head * settings.get("partial_rotary_factor", 1.0)) // 2
        rope |= {"short_factor": [1.0] * count, "long_factor": [2.0 + k for k in range(count)]}
    made = AutoConfig.for_model(known["model_type"], **settings)
    torch.manual_seed(0)
    module: Any = AutoModelForCausalLM.from_config(made, dtype=torch.float32)  # type: ignore[no-untyped-call]
    module.save_pretrained(folder)
    _write_settings(folder, known["config"], rope)
    eos = known["generation_eos"]
    if eos is not None:
        ids = tokenizer.convert_tokens_to_ids(eos)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return CausalLMConfig(path=folder)


ENDS = ("bos", "eos", "pad")


def _write_settings(folder: Path, config: dict[str, Any], rope: Any) -> None:
    """Put rotary settings under the names that they were published with."""
    if "rope_theta" not in config:
        return
    path = folder / "config.json"
    written = json.loads(path.read_text())
    if any(isinstance(v, dict) for v in (written.get("rope_parameters") or {}).values()):
        return
    written.pop("rope_parameters", None)
    names = ("rope_theta", "partial_rotary_factor")
    written |= {name: config[name] for name in names if name in config}
    path.write_text(json.dumps({**written, "rope_scaling": rope}))


def _tokenizer(known: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = [*known["special"]]
    if known["kind"] == "byte-level BPE":
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate([*special, *letters])}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        pieces = [*special, *(["<unk>"] if "<unk>" not in special else []), "\u2581", *TEXT]
        if known["kind"] == "Unigram":
            scores = [(piece, 0.0 if piece in special else -5.0) for piece in pieces]
            tokenizer = Tokenizer(models.Unigram(scores, pieces.index("<unk>")))
        else:
            words = {piece: i for i, piece in enumerate(pieces)}
            tokenizer = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.decoder = decoders.Replace("\u2581", " ")
    tokenizer.add_special_tokens(special)
    if known["adds_bos"]:
        bos = known["bos"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    ends = {f"{name}_token": known[name] for name in ENDS if known[name]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)


def template_of(known: dict[str, Any]) -> str:
    """Return a chat template that writes conversations as the published one does."""

    def text(value: str) -> str:
        return "{{ " + json.dumps(value, ensure_ascii=False) + " }}"

    thinks = "<think>" in known["ask"]
    words = "m.content.split('</think>')[-1]" if thinks else "m.content"
    out = "{{ bos_token }}" if known.get("begins_with_bos") else ""
    out += text(known["prefix"]) if "prefix" in known else ""
    system = known["system"]
    if "default_system" in known:
        begin, end = system
        opening = text(begin + known["default_system"] + end)
        out += "{% if messages[0].role != 'system' %}" + opening + "{% endif %}"
    out += "{% for m in messages %}"
    for role in ("system", "user", "assistant"):
        out += "{% if m.role == '" + role + "' %}"
        if role == "system" and system == "refused":
            out += "{{ raise_exception('no system role') }}"
        elif role == "system" and system == "joined":
            pass
        else:
            begin, end = known[role]
            opening, ending = text(begin), text(end)
            if role == "assistant" and "assistant_last" in known:
                last = text(known["assistant_last"])
                opening = "{% if loop.last %}" + last + "{% else %}" + opening + "{% endif %}"
            if role == "assistant" and "assistant_past_end" in known:
                past = text(known["assistant_past_end"])
                ending = "{% if loop.last %}" + ending + "{% else %}" + past + "{% endif %}"
            if role == "user" and system == "joined":
                first = "loop.index0 == 1 and messages[0].role == 'system'"
                opening += "{% if " + first + " %}{{ messages[0].content + '\\n\\n' }}{% endif %}"
            result = words if role == "assistant" else "m.content"
            out += opening + "{{ " + result + " }}" + ending
        out += "{% endif %}"
    return out + "{% endfor %}{% if add_generation_prompt %}" + text(known["ask"]) + "{% endif %}"
