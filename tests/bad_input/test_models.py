"""Bad checkpoint folders and chat templates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf.models import chat_template
from tests.bad_input.door import Base, refused

WEIGHTS = "model.safetensors"
SHARD = "model-00001-of-00002.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n"
Spoil = Callable[[Path], Any]


def settings(**changes: Any) -> Spoil:
    """Change config.json."""

    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def write(name: str, text: str | bytes) -> Spoil:
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / name).write_bytes(data)


def remove(*names: str) -> Spoil:
    return lambda folder: [(folder / name).unlink(missing_ok=True) for name in names]


def cut(name: str, share: float) -> Spoil:
    def spoil(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    return spoil


def no_end(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": None}))


def indexed(text: str) -> Spoil:
    """Weights in a shard, and an index."""

    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / SHARD)
        (folder / "model.safetensors.index.json").write_text(text)

    return spoil


LACKS = json.dumps({"weight_map": {"a": SHARD, "b": "model-00002-of-00002.safetensors"}})


FOLDERS: list[tuple[str, Spoil, list[str]]] = [
    ("gone", shutil.rmtree, ["no folder"]),
    ("no-config", remove("config.json"), ["no config.json"]),
    ("config-text", write("config.json", "hello"), ["config.json", "not JSON"]),
    ("config-cut", cut("config.json", 0.5), ["config.json", "not JSON"]),
    ("config-list", write("config.json", "[]"), ["config.json", "no object"]),
    ("config-empty", write("config.json", ""), ["config.json", "not JSON"]),
    ("config-bytes", write("config.json", b"\xff\xfe"), ["config.json", "not JSON"]),
    ("config-object", write("config.json", "{}"), ["config.json", "model_type"]),
    ("no-type", settings(model_type=None), ["config.json", "model_type"]),
    ("type", settings(model_type="gpt99"), ["config.json", "gpt99"]),
    ("encoder", settings(model_type="t5"), ["t5", "no causal language model"]),
    ("vision", settings(model_type="vit"), ["vit", "no causal language model"]),
    ("code", settings(auto_map={"AutoModel": "m.M"}), ["trust_remote_code"]),
    ("quantised", settings(quantization_config={"bits": 4}), ["quantized"]),
    ("no-weights", remove(WEIGHTS), ["*.safetensors"]),
    ("pickled", lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), ["*.safetensors"]),
    ("weights-empty", write(WEIGHTS, ""), [WEIGHTS, "cut off"]),
    ("weights-cut", cut(WEIGHTS, 0.9), [WEIGHTS, "copy it again"]),
    ("weights-header", cut(WEIGHTS, 0.001), [WEIGHTS, "cut off"]),
    ("weights-pointer", write(WEIGHTS, POINTER), [WEIGHTS, "git lfs pull"]),
    ("weights-text", write(WEIGHTS, "<html>not found</html>" * 9), [WEIGHTS, "cut off"]),
    ("weights-zero", write(WEIGHTS, bytes(4096)), [WEIGHTS, "cut off"]),
    ("weights-none", write(WEIGHTS, b"\x02" + bytes(7) + b"{}"), [WEIGHTS, "no tensors"]),
    ("shard", indexed(LACKS), ["lacks model-00002-of-00002.safetensors"]),
    ("index", indexed("{"), ["index.json", "not JSON"]),
    ("index-map", indexed("{}"), ["weight_map"]),
    ("adapter", write("adapter_config.json", "{}"), ["adapter_config.json", "merge"]),
    ("no-tokenizer", remove("tokenizer.json", "tokenizer_config.json"), ["tokenizer"]),
    ("tokenizer-text", write("tokenizer.json", "hello"), ["tokenizer"]),
    ("tokenizer-cut", cut("tokenizer.json", 0.5), ["tokenizer"]),
    ("tokenizer-pointer", write("tokenizer.json", POINTER), ["tokenizer"]),
    ("tokenizer-config", write("tokenizer_config.json", "{"), ["tokenizer"]),
    ("no-end", no_end, ["eos_token"]),
    ("vocabulary", settings(vocab_size=50), ["vocab_size", "50"]),
    ("positions", settings(max_position_embeddings=16), ["rollout.horizon", "16 positions"]),
]


@pytest.mark.parametrize(
    ("spoil", "words"), [pytest.param(*entry[1:], id=entry[0]) for entry in FOLDERS]
)
def test_a_bad_model_folder(base: Base, files: Path, spoil: Spoil, words: list[str]) -> None:
    values = base("jsonl", {})
    spoil(files / "model")
    refused(values, "" if "rollout.horizon" in words else "model.path", *words)


PATHS: list[tuple[str, Any, list[str]]] = [
    ("hub", "Qwen/Qwen2.5-0.5B", ["model.path", "no folder"]),
    ("null", None, ["model.path"]),
    ("number", 5, ["model.path"]),
    ("file", "/etc/passwd", ["model.path", "is a file"]),
    ("empty", "", ["model.path"]),
]


@pytest.mark.parametrize(
    ("path", "words"), [pytest.param(*entry[1:], id=entry[0]) for entry in PATHS]
)
def test_a_path_that_is_no_model_folder(base: Base, path: Any, words: list[str]) -> None:
    refused(base("jsonl", {"model.path": path}), *words)


ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
TEMPLATES: list[tuple[str, str, list[str]]] = [
    ("syntax", "{% for m in messages %}", ["chat template", "line 1"]),
    ("undefined", "{{ messages[0].content.nothing.more }}", ["chat template", "nothing"]),
    ("filter", "{{ messages | shout }}", ["chat template", "shout"]),
    ("raises", "{{ raise_exception('Roles must alternate') }}", ["Roles must alternate"]),
    ("zero", "{{ 1 / 0 }}", ["chat template", "ZeroDivisionError"]),
    ("constant", "hello", ["leaves out the user message", "train.jsonl, line 1"]),
    ("empty-text", "{% if false %}{% endif %}", ["leaves out the user message"]),
    ("wrong-key", "{% for m in messages %}{{ m.text }}{% endfor %}", ["leaves out the user"]),
    ("internals", "{{ messages.__class__.__mro__[1].__subclasses__() }}", ["chat template"]),
    ("endless", ENDLESS, ["did not end"]),
    ("memory", "{{ 'x' * 9999999999 }}", ["memory"]),
    ("power", "{{ 99999999 ** 99999999 }}", ["did not end"]),
]


@pytest.mark.parametrize(
    ("template", "words"), [pytest.param(*entry[1:], id=entry[0]) for entry in TEMPLATES]
)
def test_a_bad_chat_template(
    base: Base, files: Path, template: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "FIRST_RENDER_S", 2.0)
    values = base("jsonl", {})
    (files / "model/chat_template.jinja").write_text(template)
    refused(values, "model.path", *words)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "the system"),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
            "no",
        ),
    ],
    ids=["dropped", "refused"],
)
def test_a_chat_template_without_a_system_message(
    base: Base, files: Path, template: str, words: str
) -> None:
    values = base("jsonl", {"task.system_prompt": "Be brief."})
    (files / "model/chat_template.jinja").write_text(template)
    refused(values, "model.path", "chat template", words)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.chat_template_kwargs", {"enable_thinking": False}, ["enable_thinking"]),
        ("model.chat_template_kwargs", {"messages": []}, ["messages", "does not use it"]),
        ("rollout.sampling", {"stop": ["end<|endoftext|>"]}, ["<|endoftext|>", "alone"]),
        ("evaluate.sampling", {"stop": ["<pad>\n"]}, ["<pad>", "alone"]),
    ],
)
def test_what_the_model_cannot_obey_is_refused(
    base: Base, files: Path, key: str, value: Any, words: list[str]
) -> None:
    (files / "model/chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    refused(base("jsonl", {key: value}), key, *words)
