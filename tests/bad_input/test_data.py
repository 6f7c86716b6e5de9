"""Bad problem files, prompts and templates of a task."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.validate_config import check_train_test_overlap, validate_config
from rlinf.config import RunConfig, validate
from rlinf.envs import environments
from rlinf.envs.chat_problems import ChatProblem
from rlinf.envs.problem_set import ProblemSetEnvironment
from rlinf.errors import DataError
from tests.bad_input.conftest import problems
from tests.bad_input.door import GONE, Base, refused

GOOD = {"question": "1+1?", "answer": "2"}


def row(**changes: Any) -> bytes:
    """A good row, and one with changes: the second line of a file."""
    item = {k: v for k, v in {**GOOD, **changes}.items() if v is not GONE}
    return (json.dumps(GOOD) + "\n" + json.dumps(item) + "\n").encode()


def question_line(*messages: Any) -> bytes:
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
    ("list-answer", row(answer=[["2"]]), ["line 2: 'answer' is ["]),
    ("no-answers", row(answer=[]), ["line 2: 'answer' is an empty list"]),
    ("object-answer", row(answer={}), ["line 2: 'answer' is {}"]),
    ("surrogate-answer", row(answer="\udfff"), ["line 2", "surrogate"]),
    ("no-messages", question_line(), ["line 2: 'question' is empty"]),
    ("texts", question_line("hello"), ["line 2: 'question[0]'", "role and content"]),
    ("no-role", question_line({"content": "a"}), ["line 2: 'question[0]'", "role"]),
    ("no-content", question_line({"role": "user"}), ["line 2: 'question[0]'", "content"]),
    ("other-role", question_line(by("robot", "a")), ["line 2: 'question[0]'", '"robot"']),
    ("role-number", question_line(by(1, "a")), ["line 2: 'question[0]'", "role 1"]),
    ("late-system", question_line(by("user", "a"), by("system", "b")), ["line 2: 'question[1]'"]),
    ("only-system", question_line(by("system", "a")), ["line 2", "no message of the user"]),
    ("only-assistant", question_line(by("assistant", "a")), ["line 2", "no message of the user"]),
    ("null-content", question_line(by("user", None)), ["line 2", "'question[0]' is null"]),
    ("empty-content", question_line(by("user", "")), ["line 2: 'question[0]' is empty"]),
    ("parts", question_line(by("user", [{"type": "image"}])), ["line 2", "not a text"]),
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


def sets(**part: Any) -> dict[str, Any]:
    """One training set instead of the file."""
    return {"task.train": None, "task.train_sets": {"a": part}}


SETTINGS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("no-file", {"task.train": "/no.jsonl"}, ["task.train", "no file /no.jsonl"]),
    ("folder", {"task.train": "/tmp"}, ["task.train", "/tmp is a folder"]),
    ("device", {"task.test": "/dev/zero"}, ["task.test", "not a regular file"]),
    ("empty-path", {"task.train": ""}, ["task.train"]),
    ("number-path", {"task.train": 5}, ["task.train"]),
    ("two-ways", {"task.train_sets": {"a": {"train": "/a"}}}, ["task.train_sets replaces train"]),
    ("set-weight", sets(train="/a", weight=0), ["task.train_sets.a.weight", "greater than 0"]),
    ("set-file", sets(weight=1), ["task.train_sets.a.train"]),
    ("set-key", sets(train="/a", wieght=1), ["task.train_sets.a.wieght", "'weight'"]),
    ("set-missing", sets(train="/no.jsonl"), ["task.train_sets.a.train", "no file /no.jsonl"]),
    ("null-path", {"task.train": None}, ["task.train"]),
    ("missing-path", {"task.train": GONE}, ["task.train"]),
    ("no-field", {"task.prompt_field": "problem"}, ["task.train", "line 1", "task.prompt_field"]),
    ("no-answers", {"task.answer_field": "final"}, ["line 1", "task.answer_field"]),
    ("template", {"task.prompt_template": "Solve it!"}, ["task.prompt_template", "{prompt}"]),
    ("empty-template", {"task.prompt_template": ""}, ["task.prompt_template", "{prompt}"]),
    ("template-typo", {"task.prompt_template": "{promt}"}, ["task.prompt_template", "{prompt}"]),
    ("template-number", {"task.prompt_template": 3}, ["task.prompt_template"]),
    ("too-long", {"task.max_prompt_length": 3}, ["task.train", "task.max_prompt_length=3"]),
    ("no-length", {"task.max_prompt_length": 0}, ["task.max_prompt_length"]),
    ("workers", {"task.grader_workers": 0}, ["task.grader_workers"]),
    ("timeout", {"task.timeout_s": 0}, ["task.timeout_s"]),
    ("few-train", {"rollout.batch_size": 16}, ["rollout.batch_size", "task.train has only 8"]),
    ("few-test", {"evaluate.samples": 9}, ["evaluate.samples", "task.test has only 8"]),
    ("horizon", {"rollout.horizon": 512}, ["rollout.horizon", "512 positions"]),
    ("long-prompts", {"task.prompt_template": "a" * 600 + "{prompt}"}, ["positions"]),
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
    some = str(problems(files / "some.jsonl", 2, 6))
    refused(base("jsonl", {"task.test": some, "evaluate.samples": 2}), "task.test", "all 6")


TALKS = {
    "conversations": '{"messages": [{"role": "user", "content": "q %d"}, '
    '{"role": "assistant", "content": "a"}]}\n',
    "jsonl": '{"question": "q %d", "answer": "1"}\n',
    "search": '{"question": "q %d", "answer": ["1"]}\n',
}


@pytest.mark.parametrize("name", TALKS)
def test_held_out_rows_that_are_trained_on(
    name: str, composed: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them: refused, unless that is wanted or nothing is trained. Some: counted."""

    def rows(first: int, last: int) -> Path:
        path = tmp_path / f"{first}-{last}.jsonl"
        path.write_text("".join(TALKS[name] % row for row in range(first, last)))
        return path

    documents = {"documents": rows(0, 8)} if name == "search" else {}
    config = validate(RunConfig, composed["arithmetic"])
    alone = config.model_copy(
        update={
            "iterations": 0,
            "sft": config.sft.model_copy(update={"max_steps": 0}),
        }
    )
    cls = environments.get(name)

    def judge(run: RunConfig, test: Path, **more: Any) -> None:
        options = cls.Config(train=rows(0, 8), test=test, **documents, **more)
        check_train_test_overlap(run, cls.train_test_overlap(options), options)

    for test, count in ((rows(0, 8), 8), (rows(3, 6), 3)):
        with pytest.raises(
            DataError, match=rf"^task\.test: .* all {count} .*task\.allow_train_test_overlap"
        ):
            judge(config, test)
        judge(alone, test)
        assert not caplog.text
        judge(config, test, allow_train_test_overlap=True)
        assert f"{count} of {count} held-out problems" in caplog.text
        caplog.clear()
    judge(config, rows(6, 10))
    assert "2 of 4 held-out problems are training problems" in caplog.text
    caplog.clear()
    judge(config, rows(8, 10))
    assert not caplog.text


def test_one_file_for_evaluation_alone(base: Base, files: Path) -> None:
    same = str(files / "train.jsonl")
    nothing = {"iterations": 0, "sft.max_steps": 0}
    validate_config(validate(RunConfig, base("jsonl", {"task.test": same, **nothing})))


def test_grading_without_its_package(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(base("jsonl", {}), "task.name", "rlinf-slurm[math]")


def test_messages_without_a_chat_template(base: Base, files: Path) -> None:
    values = base("jsonl", {})
    (files / "model/chat_template.jinja").unlink()
    messages = [by("user", "1?"), by("assistant", "2"), by("user", "3?")]
    (files / "train.jsonl").write_bytes(question_line(*messages))
    refused(values, "task.train", "line 2", "chat template")


def test_a_system_message_without_a_chat_template(base: Base, files: Path) -> None:
    values = base("jsonl", {"task.system_prompt": "Be brief."})
    (files / "model/chat_template.jinja").unlink()
    refused(values, "task.system_prompt", "no chat template")


@pytest.mark.parametrize("name", ["jsonl", "conversations", "search"])
def test_held_out_questions_that_differ_in_form_alone(name: str, tmp_path: Path) -> None:
    """White space, line ends, a system message and the assistant's words make no new question."""

    def one(text: str, *more: dict[str, Any]) -> dict[str, Any]:
        messages = [*more, by("user", text)]
        if name == "conversations":
            return {"messages": [*messages, by("assistant", text[::-1])]}
        return {"question": messages if more else text, "answer": "1"}

    train = [one("How many\napples?"), one("Why so?"), one("q 1"), one("q 2")]
    test = [one("How many\r\napples?"), one("Why  so? "), one("\tq 1\n"), one("Q 12")]
    if name != "search":
        train += [one("q 4", by("user", "a"), by("assistant", "b"))]
        test += [
            one("q 2", by("system", "Be brief.")),
            one("q 4", by("user", "a"), by("assistant", "c")),
        ]
        test += [one("q 4", by("user", "c"), by("assistant", "b"))]
    paths = [tmp_path / "train.jsonl", tmp_path / "test.jsonl"]
    for path, rows in zip(paths, (train, test), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    documents = {"documents": paths[0]} if name == "search" else {}
    cls = environments.get(name)
    options = cls.Config(train=paths[0], test=paths[1], **documents)
    assert cls.train_test_overlap(options) == ((3, 4) if name == "search" else (5, 7))


class Riddles(ProblemSetEnvironment):
    """A task of somebody's own, whose problems are in no file."""

    @classmethod
    def model_spec(cls, config: Any) -> dict[str, Any]:
        return {}

    @classmethod
    def load_problems(cls, config: Any, split: str) -> list[ChatProblem]:
        texts = ["a", "b c", "d"] if split == "train" else ["b  c", "d "]
        return [
            ChatProblem((by("user", text),), "1", f"{split} {i}") for i, text in enumerate(texts)
        ]


def test_an_own_task_that_trains_on_its_held_out_problems(
    composed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = validate(RunConfig, composed["arithmetic"])
    options = Riddles.Config()
    with pytest.raises(DataError, match=r"all 2 .*task\.allow_train_test_overlap"):
        check_train_test_overlap(config, Riddles.train_test_overlap(options), options)
    options = Riddles.Config(allow_train_test_overlap=True)
    check_train_test_overlap(config, Riddles.train_test_overlap(options), options)
    assert "2 of 2 held-out problems" in caplog.text
