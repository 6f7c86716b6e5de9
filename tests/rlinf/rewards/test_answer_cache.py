"""Answers are found again by whoever asks next, whatever became of who wrote them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rlinf.errors import ConfigError
from rlinf.rewards.judge import AnswerCache


def test_another_process_finds_them_and_what_they_cost(tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    first, other = AnswerCache(folder, "a-r0"), AnswerCache(folder, "b-r0")
    first.put("x", "yes\nand\u2028no", 2, 30)
    first.put("y", None, 3, 0)
    assert other.get("x") is None
    other.refresh()
    for one in (first, other, AnswerCache(folder, "c-r0")):
        assert (one.get("x"), one.get("y")) == ("yes\nand\u2028no", None)
        assert (one.requests, one.tokens) == (5, 30)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "a-r0.jsonl").stat().st_mode & 0o777 == 0o600


def test_the_first_answer_to_a_question_stays(tmp_path: Path) -> None:
    answers = AnswerCache(tmp_path, "a")
    answers.put("x", "one", 1, 1)
    answers.put("x", "other", 1, 1)
    assert answers.get("x") == AnswerCache(tmp_path, "a").get("x") == "one"


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    AnswerCache(tmp_path, "a").put("x", "one", 1, 1)
    path = tmp_path / "a.jsonl"
    path.write_bytes(path.read_bytes() + b'{"digest": "y", "te')
    again = AnswerCache(tmp_path, "a")
    again.put("z", "three", 1, 1)
    found = AnswerCache(tmp_path, "a")
    for answers in (again, found):
        assert [answers.get(name) for name in "xyz"] == ["one", None, "three"]
        assert answers.requests == 2


def test_without_a_folder_they_are_kept_in_memory() -> None:
    answers = AnswerCache(None, "a")
    answers.put("x", "one", 2, 3)
    assert (answers.get("x"), answers.requests, answers.tokens) == ("one", 2, 3)


def test_several_threads_add_whole_lines(tmp_path: Path) -> None:
    answers = [AnswerCache(tmp_path, "same") for _ in range(4)]

    def add(number: int) -> None:
        for i in range(25):
            answers[number].put(f"{number}-{i}", "text" * 50, 1, 1)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = AnswerCache(tmp_path, "same")
    assert found.requests == 100
    assert all(found.get(f"{n}-{i}") for n in range(4) for i in range(25))


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    answers = AnswerCache(tmp_path, "a")
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link"):
        answers.put("x", "one", 1, 1)
    assert not (tmp_path / "elsewhere").exists()
