"""Bad problem files, prompts and templates of a task."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.bad_input.conftest import problems
from tests.bad_input.door import GONE, Base, refused

GOOD = {"question": "1+1?", "answer": "2"}


def row(**changes: Any) -> bytes:
    """A good row, and one with changes: the second line of a file."""
    item = {k: v for k, v in {**GOOD, **changes}.items() if v is not GONE}
    return (json.dumps(GOOD) + "\n" + json.dumps(item) + "\n").encode()


def said(*messages: Any) -> bytes:
    return row(question=list(messages))


def by(role: Any, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


FILES: list[tuple[str, bytes, list[str]]] = [
    ("empty", b"", ["is empty"]),
    ("blank", b"\n \n\n", ["is empty"]),
    ("latin-1", '{"question": "café"}'.encode("latin-1"), ["not UTF-8"]),
    ("utf-16", '{"question": "a"}'.encode("utf-16"), ["not UTF-8"]),
    ("gzip", gzip.compress(row()), ["gzip", "unpack"]),
    ("binary", bytes(range(256)), ["not UTF-8"]),
    ("csv", b"question,answer\n1+1,2\n", ["line 1: not JSON"]),
    ("cut", row()[:-20], ["line 2: not JSON"]),
    ("array", json.dumps([GOOD, GOOD]).encode(), ["line 1: expected an object"]),
    ("pretty", json.dumps(GOOD, indent=1).encode(), ["line 1: not JSON"]),
    ("number", b"5\n", ["line 1: expected an object"]),
    ("null", b"null\n", ["line 1: expected an object"]),
    ("deep", b"[" * 100_000, ["line 1: not JSON"]),
    ("nan", b'{"question": "a", "answer": NaN}\n', ["line 1: not JSON", "NaN"]),
    ("no-question", row(question=GONE, questoin="a"), ["line 2", "did you mean 'questoin'"]),
    ("no-answer", row(answer=GONE), ["line 2: no field 'answer'", "task.answer_field"]),
    ("null-question", row(question=None), ["line 2", "'question' is null"]),
    ("empty-question", row(question=""), ["line 2: 'question' is empty"]),
    ("blank-question", row(question=" \n"), ["line 2: 'question' is empty"]),
    ("number-question", row(question=5), ["line 2: 'question' is 5"]),
    ("object-question", row(question={"text": "a"}), ["line 2: 'question' is {"]),
    ("surrogate-question", row(question="a\ud800"), ["line 2", "surrogate"]),
    ("null-answer", row(answer=None), ["line 2: 'answer' is null"]),
    ("empty-answer", row(answer=""), ["line 2: 'answer' is empty"]),
    ("bool-answer", row(answer=True), ["line 2: 'answer' is true"]),
    ("list-answer", row(answer=["2"]), ["line 2: 'answer' is ["]),
    ("object-answer", row(answer={}), ["line 2: 'answer' is {}"]),
    ("surrogate-answer", row(answer="\udfff"), ["line 2", "surrogate"]),
    ("no-messages", said(), ["line 2: 'question' is empty"]),
    ("texts", said("hello"), ["line 2: 'question[0]'", "role and content"]),
    ("no-role", said({"content": "a"}), ["line 2: 'question[0]'", "role"]),
    ("no-content", said({"role": "user"}), ["line 2: 'question[0]'", "content"]),
    ("other-role", said(by("human", "a")), ["line 2: 'question[0]'", '"human"']),
    ("role-number", said(by(1, "a")), ["line 2: 'question[0]'", "role 1"]),
    ("late-system", said(by("user", "a"), by("system", "b")), ["line 2: 'question[1]'"]),
    ("only-system", said(by("system", "a")), ["line 2", "no message of the user"]),
    ("only-assistant", said(by("assistant", "a")), ["line 2", "no message of the user"]),
    ("null-content", said(by("user", None)), ["line 2", "'question[0]' is null"]),
    ("empty-content", said(by("user", "")), ["line 2: 'question[0]' is empty"]),
    ("parts", said(by("user", [{"type": "image"}])), ["line 2", "not a text"]),
]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    ("content", "words"), [pytest.param(*entry[1:], id=entry[0]) for entry in FILES]
)
def test_a_bad_file_is_refused_by_its_line(
    base: Base, files: Path, split: str, content: bytes, words: list[str]
) -> None:
    path = files / "bad.jsonl"
    path.write_bytes(content)
    refused(base("jsonl", {f"task.{split}": str(path)}), f"task.{split}", str(path), *words)


SETTINGS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("no-file", {"task.train": "/no.jsonl"}, ["task.train", "no file /no.jsonl"]),
    ("folder", {"task.train": "/tmp"}, ["task.train", "/tmp is a folder"]),
    ("device", {"task.test": "/dev/zero"}, ["task.test", "not a regular file"]),
    ("empty-path", {"task.train": ""}, ["task.train"]),
    ("number-path", {"task.train": 5}, ["task.train"]),
    ("null-path", {"task.train": None}, ["task.train"]),
    ("missing-path", {"task.train": GONE}, ["task.train"]),
    ("no-field", {"task.prompt_field": "problem"}, ["task.train", "line 1", "task.prompt_field"]),
    ("no-answers", {"task.answer_field": "final"}, ["line 1", "task.answer_field"]),
    ("template", {"task.template": "Solve it!"}, ["task.template", "{prompt}"]),
    ("empty-template", {"task.template": ""}, ["task.template", "{prompt}"]),
    ("template-typo", {"task.template": "{promt}"}, ["task.template", "{prompt}"]),
    ("template-number", {"task.template": 3}, ["task.template"]),
    ("too-long", {"task.max_prompt_tokens": 3}, ["task.train", "task.max_prompt_tokens=3"]),
    ("no-length", {"task.max_prompt_tokens": 0}, ["task.max_prompt_tokens"]),
    ("workers", {"task.workers": 0}, ["task.workers"]),
    ("timeout", {"task.timeout_s": 0}, ["task.timeout_s"]),
    ("few-train", {"rollout.batch": 16}, ["rollout.batch", "task.train has 8"]),
    ("few-test", {"evaluate.samples": 9}, ["evaluate.samples", "task.test has 8"]),
    ("horizon", {"rollout.horizon": 512}, ["rollout.horizon", "512 positions"]),
    ("long-prompts", {"task.template": "a" * 600 + "{prompt}"}, ["positions"]),
    ("ppo", {"algorithm": {"name": "ppo"}}, ["algorithm.name: 'ppo'", "dapo, grpo"]),
]


@pytest.mark.parametrize(
    ("changes", "words"), [pytest.param(*entry[1:], id=entry[0]) for entry in SETTINGS]
)
def test_a_bad_setting_of_the_task(base: Base, changes: dict[str, Any], words: list[str]) -> None:
    refused(base("jsonl", changes), *words)


def test_testing_on_what_is_trained_on(base: Base, files: Path) -> None:
    same = str(files / "train.jsonl")
    refused(base("jsonl", {"task.test": same}), "task.test", "same problems")
    copied = str(problems(files / "copy.jsonl", 0, 8))
    refused(base("jsonl", {"task.test": copied}), "task.test", "same problems")


def test_grading_without_its_package(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(base("jsonl", {}), "task.name", "rlinf-slurm[math]")


def test_messages_without_a_chat_template(base: Base, files: Path) -> None:
    values = base("jsonl", {})
    (files / "model/chat_template.jinja").unlink()
    messages = [by("user", "1?"), by("assistant", "2"), by("user", "3?")]
    (files / "train.jsonl").write_bytes(said(*messages))
    refused(values, "task.train", "line 2", "chat template")


def test_a_system_message_without_a_chat_template(base: Base, files: Path) -> None:
    values = base("jsonl", {"task.system": "Be brief."})
    (files / "model/chat_template.jinja").unlink()
    refused(values, "task.system", "no chat template")
