"""Problem files are read and refused by line; order is an epoch without replacement."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rlinf.channels.record_files import read_records, write_records
from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.envs import chat_problems, rendered_dataset
from rlinf.envs.base import RolloutRequest
from rlinf.envs.chat_problems import read_problems
from rlinf.envs.jsonl import JsonlConfig, JsonlEnvironment
from rlinf.errors import DataError

CHAT = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Words:
    """A tokenizer that makes a token of each word."""

    chat_template: str | None = None
    bos_token_id = None
    eos_token_id = 99
    special_tokens_map: ClassVar[dict[str, str]] = {}
    all_special_tokens: ClassVar[list[str]] = []

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[len(w) for w in text.split()] for text in texts]}


def write(path: Path, count: int = 5) -> Path:
    lines = [json.dumps({"question": f"q {i}", "answer": f"#### {i}"}) for i in range(count)]
    path.write_text("\n".join(lines))
    return path


def make(tmp_path: Path, tokenizer: Any = None, **options: Any) -> JsonlEnvironment:
    path = write(tmp_path / "p.jsonl")
    return JsonlEnvironment(JsonlConfig(train=path, test=path, **options), tokenizer or Words())


def test_an_epoch_asks_every_problem_once(tmp_path: Path) -> None:
    task = make(tmp_path)
    requests = [
        prompt.text
        for iteration in range(5)
        for prompt in task.prompts(RolloutRequest(3, iteration, "train", range(2), 2, 1, 8, 1.0))
    ]
    assert sorted(requests[:5]) == [f"q {i}" for i in range(5)]
    assert sorted(requests[5:]) == [f"q {i}" for i in range(5)]


def draw_questions(task: JsonlEnvironment, iterations: int = 3) -> list[tuple[str, str]]:
    """Everything that some iterations, a test and a fine-tuning step ask."""
    prompts = [
        prompt
        for iteration in range(iterations)
        for prompt in task.prompts(RolloutRequest(3, iteration, "train", range(8), 8, 1, 8, 1.0))
    ]
    prompts += task.prompts(RolloutRequest(0, 0, "test", range(4), 4, 1, 8, 1.0))
    actions = [record.actions.sum() for record in task.demonstrations(1, 2, 5)]
    return [(p.model_input, p.answer) for p in prompts] + [("", str(a)) for a in actions]


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many problems were rendered, at each call; three at a time, two of them remembered."""
    counts: list[int] = []
    plain = JsonlEnvironment._render_problems

    def counted(self: JsonlEnvironment, problems: Any, key: str) -> Any:
        counts.append(len(problems))
        return plain(self, problems, key)

    monkeypatch.setattr(JsonlEnvironment, "_render_problems", counted)
    monkeypatch.setattr(rendered_dataset, "RENDER_CHUNK", 3)
    monkeypatch.setattr(rendered_dataset, "MAX_CACHED_PROBLEMS", 2)
    return counts


def long_rows(path: Path, is_long: Callable[[int], bool] = lambda i: i % 4 == 3) -> JsonlConfig:
    """Twenty problems, of which some are too long."""
    rows = [
        {"question": f"q {i} " + "and more " * 5 * is_long(i), "answer": f"{i}"} for i in range(20)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return JsonlConfig(train=path, test=path, max_prompt_length=8, num_fewshot=0)


def test_prompts_are_the_same_however_few_are_in_memory(
    tmp_path: Path, rendered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = long_rows(tmp_path / "p.jsonl")
    few = JsonlEnvironment(config, Words())
    assert max(rendered) == 3
    found = draw_questions(few)
    rendered.clear()
    assert draw_questions(few) == found
    assert sum(rendered) > 2, "two are remembered, and the others rendered again"
    assert "q 3 " not in str(found)
    monkeypatch.setattr(rendered_dataset, "RENDER_CHUNK", 2048)
    monkeypatch.setattr(rendered_dataset, "MAX_CACHED_PROBLEMS", 4096)
    rendered.clear()
    every = JsonlEnvironment(config, Words())
    assert draw_questions(every) == found
    assert rendered == [20, 20], "nothing is rendered twice where all of it stays"


def test_prompts_of_a_large_file_are_rendered_when_they_are_drawn(
    tmp_path: Path,
    rendered: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rendered_dataset, "MEASURED_PROBLEMS", 5)
    config = long_rows(tmp_path / "p.jsonl")
    task = JsonlEnvironment(config, Words())
    assert sum(rendered) == 10, "five of each file are measured"
    assert task.longest_prompt == 8, "the limit, because others were not measured"
    assert "task.train: 1 of the first 5 problems are left out" in caplog.text
    found = draw_questions(task)
    assert "and more" not in str(found)
    assert [question for question, _ in found[24:28]] == ["q 0 ", "q 1 ", "q 2 ", "q 4 "]
    assert len({question for question, _ in found[:19]}) > 11, "drawn from the whole file"
    (skipped,) = [line for line in caplog.text.splitlines() if "are skipped in" in line]
    assert re.search(r"task\.train: \d problems are skipped in 8 draws .*p\.jsonl, line ", skipped)
    again = JsonlEnvironment(config, Words())
    assert again.num_test_problems() == 15
    assert draw_questions(again) == found, "of what was drawn before, nothing depends"
    for draw in range(24):
        request = RolloutRequest(3, draw // 8, "train", [draw % 8], 8, 1, 8, 1.0)
        (prompt,) = again.prompts(request)
        assert prompt.model_input == found[draw][0], "of the rest of the batch, neither"


@pytest.mark.parametrize("last_short", [4, 5])
def test_a_file_of_long_prompts_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_short: int
) -> None:
    monkeypatch.setattr(rendered_dataset, "MEASURED_PROBLEMS", 5)
    monkeypatch.setattr(rendered_dataset, "MAX_REDRAWS", 3)
    config = long_rows(tmp_path / "p.jsonl", lambda i: i < 5 or i > last_short)
    with pytest.raises(
        DataError, match=r"task\.train: all first 5 problems, .*line 1 on, are longer"
    ):
        JsonlEnvironment(config, Words())
    config = long_rows(tmp_path / "p.jsonl", lambda i: i > 0)
    task = JsonlEnvironment(config, Words())
    with pytest.raises(DataError, match=r"task\.train: 3 problems were drawn one after the other"):
        draw_questions(task, 1)


def test_template_and_chat_template_are_applied(tmp_path: Path) -> None:
    task = make(tmp_path, prompt_template="Solve: {prompt}")
    (prompt,) = task.prompts(RolloutRequest(0, 0, "test", [0], 1, 1, 8, 1.0))
    assert prompt.text == "Solve: q 0"
    chat = Words()
    chat.chat_template = CHAT
    task = make(tmp_path, chat, system_prompt="be brief")
    (prompt,) = task.prompts(RolloutRequest(0, 0, "test", [0], 1, 1, 8, 1.0))
    assert prompt.text == "q 0"
    assert prompt.model_input == "<system> be brief <user> q 0 <assistant>"


@pytest.mark.parametrize(
    ("opening", "scores"),
    [("<assistant>", [1.0, 1.0, 0.0]), ("<assistant><think>\n", [0.0, 1.0, 0.0])],
)
def test_a_template_may_open_the_thought_that_a_response_ends(
    tmp_path: Path, opening: str, scores: list[float]
) -> None:
    pytest.importorskip("math_verify", reason="the extra 'math' is not installed")
    chat = Words()
    chat.chat_template = CHAT.replace("<assistant>", opening)
    task = make(tmp_path, chat, grader_workers=1)
    texts = ("is it \\boxed{2}", "is it 3?</think>\\boxed{2}", "<think>\\boxed{2}")
    records = [
        Trajectory(identity=RecordId(0, i), actions=np.zeros(1), text=text, answer="2")
        for i, text in enumerate(texts)
    ]
    counts: Counter[str] = Counter()
    assert task.score(records, counts) == scores
    assert counts["unfinished_thoughts"] == scores.count(0.0)
    task.close()


def test_conversations_are_rendered_and_their_last_reply_is_learnt(tmp_path: Path) -> None:
    chat = Words()
    chat.chat_template = CHAT
    path = tmp_path / "chat.jsonl"
    talk = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
    ]
    reply = {"role": "assistant", "content": "It is 4"}
    rows = [{"messages": [*talk, reply]}, {"messages": [*talk, reply], "answer": "4"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    config = JsonlConfig(
        train=path,
        test=path,
        prompt_field="messages",
        prompt_template="Q: {prompt}",
        system_prompt="unused",
    )
    task = JsonlEnvironment(config, chat)
    prompts = task.prompts(RolloutRequest(0, 0, "test", [0, 1], 2, 1, 8, 1.0))
    assert [prompt.answer for prompt in prompts] == ["It is 4", "4"]
    assert {prompt.model_input for prompt in prompts} == {
        "<system> be kind <user> 1+1? <assistant> 2 <user> Q: 2+2? <assistant>"
    }
    assert prompts[0].text.splitlines()[-1] == "user: Q: 2+2?"
    for record in task.demonstrations(0, 0, 3):
        assert record.actions.tolist() == [2, 2, 1, 99]


def test_the_first_of_several_answers_is_shown_and_learnt(tmp_path: Path) -> None:
    chat = Words()
    chat.chat_template = CHAT
    path = tmp_path / "several.jsonl"
    rows = [{"question": "2+2?", "answer": ["4", "four", "IV"]} for _ in range(2)]
    path.write_text("\n".join(map(json.dumps, rows)))
    config = JsonlConfig(train=path, test=path, num_fewshot=1)
    task = JsonlEnvironment(config, chat)
    (prompt,) = task.prompts(RolloutRequest(0, 0, "test", [0], 1, 1, 8, 1.0))
    assert prompt.model_input == "<user> 2+2? <assistant> 4 <user> 2+2? <assistant>"
    assert [record.actions.tolist() for record in task.demonstrations(0, 0, 2)] == [[1, 99]] * 2


USER = {"role": "user", "content": "1+1?"}
REPLY = {"role": "assistant", "content": "It is 2"}
EXTRA = {"question": "unused", "answer": "unused"}


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"problem": "1+1?", "solution": "It is 2", "answer": "2"}, "2"),
        ({"prompt": [USER], "reward_model": {"ground_truth": "2"}, "extra_info": EXTRA}, "2"),
        ({"prompt": "1+1?", "ground_truth": 2}, "2"),
        ({"prompt": [USER], "solution": "It is 2"}, "It is 2"),
        ({"prompt": "1+1?", "completion": " 2"}, " 2"),
        ({"prompt": [USER], "completion": [REPLY]}, "It is 2"),
        ({"messages": [USER, REPLY]}, "It is 2"),
        ({"problem": "1+1?", "solution": "2", "messages": [USER, REPLY]}, "2"),
    ],
)
def test_the_columns_of_known_layouts_are_found(
    tmp_path: Path, row: dict[str, Any], answer: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(row))
    (problem,) = JsonlEnvironment.load_problems(JsonlConfig(test=path), "test")
    assert [message["content"] for message in problem.messages] == ["1+1?"]
    assert problem.answer == answer


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"text": "1+1?", "answer": "2"},
            "no field question, prompt, problem, messages; set task.prompt_field to one of the "
            "columns: text, answer",
        ),
        (
            {"question": "1+1?", "prompt": "Say: 1+1?", "answer": "2"},
            "'question' and 'prompt' could both be meant; set task.prompt_field to one of the "
            "columns: question, prompt, answer",
        ),
        (
            {"question": "1+1?", "answer": "2", "reward_model": {"ground_truth": "3"}},
            "'answer' and 'reward_model.ground_truth' could both be meant; set task.answer_field",
        ),
        ({"question": "1+1?", "result": "2"}, "set task.answer_field to one of the columns: quest"),
        ({"prompt": [USER], "result": "2"}, "set task.answer_field to one of the columns: prompt"),
    ],
)
def test_columns_that_cannot_be_found_are_listed(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(
        DataError, match=rf"^task\.test: .*p\.jsonl, line 1: .*{re.escape(message)}"
    ):
        JsonlEnvironment.load_problems(JsonlConfig(test=path), "test")


GOOD = '{"question": "q", "answer": 4}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "a", "answer": "1"}\n{"question": ', "line 2: not JSON"),
        ("[1]", "line 1: expected an object"),
        ('{"questoin": "a", "answer": "1"}', "line 1: no field 'question'; did you mean"),
        ("\n\n", "is empty"),
        (GOOD + '{"question": "q", "answer": null}', "line 2: 'answer' is null"),
        (GOOD + '{"question": "q", "answer": [["4"]]}', "line 2: 'answer' is "),
        (GOOD + '{"question": "q", "answer": "\\ud800 4"}', "line 2: 'answer' has half of a surr"),
        (GOOD + '{"question": "\\udfff", "answer": "4"}', "line 2: 'question' has half of a surr"),
        ('{"question": "q", "answer": 4, "unit": "\\ud800"}', "line 1: 'unit' has half of a surr"),
        (None, r"task\.train: no file .*bad\.jsonl"),
    ],
)
def test_a_bad_file_is_refused_by_line(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    if text is not None:
        path.write_text(text)
    columns = ["unit"] if text and "unit" in text else []
    with pytest.raises(DataError, match=message):
        read_problems(path, "question", "answer", "task.train", columns).check_rows()


def test_prompts_that_are_too_long_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DataError, match="longer than"):
        make(tmp_path, max_prompt_length=1)
    path = write(tmp_path / "p.jsonl")
    path.write_text(path.read_text().replace("q 3", "q and more 3"))
    JsonlEnvironment(JsonlConfig(train=path, test=path, max_prompt_length=2), Words())
    assert "task.test: 1 of 5 problems are left out" in caplog.text, "a score is of an easier set"


def test_real_gsm8k_when_it_is_there() -> None:
    path = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"
    if not path.exists():
        pytest.skip("the GSM8K file is not part of the project")
    problems = read_problems(path, "question", "answer", "task.test")
    assert len(problems) == 1319
    assert all("####" in problem.answer for problem in problems)


def test_data_columns_of_the_file_reach_the_reward(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    row = {"question": "q", "answer": "4", "level": 3, "tests": ["f(1) == 2"], "unit": "cm"}
    path.write_text(json.dumps(row))
    names = ("level", "tests", "unit")
    task = JsonlEnvironment(JsonlConfig(train=path, test=path, info_fields=names), Words())
    (prompt,) = task.prompts(RolloutRequest(0, 0, "test", [0], 1, 1, 8, 1.0))
    assert prompt.info == {"level": 3, "tests": '["f(1) == 2"]', "unit": "cm"}


@pytest.mark.parametrize(
    ("given", "carried"),
    [
        ([3, None], ["3", "null"]),
        ([3, "x", True, 0.5], ["3", "x", "true", "0.5"]),
        ([2**63, 1], [str(2**63), "1"]),
        ([3, 0.5], [3, 0.5]),
        ([True, 2], [True, 2]),
    ],
)
def test_a_data_column_is_of_one_kind(tmp_path: Path, given: list[Any], carried: list[Any]) -> None:
    path = tmp_path / "p.jsonl"
    rows = [{"question": "q", "answer": "4", "level": level} for level in given]
    path.write_text("\n".join(map(json.dumps, rows)))
    problems = read_problems(path, "question", "answer", "task.train", ["level"])
    assert [problem.info["level"] for problem in problems] == carried
    made = [Record(RecordId(0, i), info=dict(p.info)) for i, p in enumerate(problems)]
    write_records(tmp_path / "a.h5", made)
    assert [record.info for record in read_records(tmp_path / "a.h5")] == [r.info for r in made]


def test_a_late_text_in_a_column_of_numbers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_problems, "KIND_ROWS", 2)
    path = tmp_path / "p.jsonl"
    rows = [{"question": "q", "answer": "4", "level": level} for level in (1, 2, "hard")]
    path.write_text("\n".join(map(json.dumps, rows)))
    problems = read_problems(path, None, None, "task.train", ["level"])
    assert problems[1].info == {"level": 2}
    with pytest.raises(DataError, match="line 3: 'level' is 'hard', but a number in the first 2"):
        problems.check_rows()


def test_a_data_column_must_be_there_and_have_a_name_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1: no field 'level'.*task.info_fields"):
        make(tmp_path, info_fields=("level",))
    with pytest.raises(ValueError, match="every trajectory has a 'text' of its own"):
        make(tmp_path, info_fields=("text",))


def mixed(tmp_path: Path, **options: Any) -> JsonlEnvironment:
    sets = {}
    for name, weight in (("sums", 3.0), ("facts", 1.0)):
        path = tmp_path / f"{name}.jsonl"
        rows = [{"question": f"{name} {i}", "answer": str(i)} for i in range(4)]
        path.write_text("\n".join(map(json.dumps, rows)))
        sets[name] = {"train": path, "weight": weight}
    test = write(tmp_path / "test.jsonl")
    return JsonlEnvironment(JsonlConfig(train_sets=sets, test=test, **options), Words())


def test_files_with_weights_are_mixed_and_named(tmp_path: Path) -> None:
    task = mixed(tmp_path)
    request = RolloutRequest(0, 0, "train", range(1000), 1000, 1, 8, 1.0)
    prompts = task.prompts(request)
    assert Counter(p.info["task"] for p in prompts) == {"sums": 750, "facts": 250}
    assert all(p.text.startswith(f"{p.info['task']} ") for p in prompts)
    later = RolloutRequest(0, 7, "train", [3, 1], 100, 1, 8, 1.0)
    assert task.prompts(later) == [prompts[703], prompts[701]]
    assert [p.info for p in task.prompts(RolloutRequest(0, 0, "test", [0], 1, 1, 8, 1.0))] == [{}]
    assert JsonlEnvironment.task_size(task.config, Words()).train == 8
    assert len(task.demonstrations(0, 3, 5)) == 5


def test_few_shot_examples_are_from_the_first_file(tmp_path: Path) -> None:
    chat = Words()
    chat.chat_template = CHAT
    config = mixed(tmp_path).config.model_copy(update={"num_fewshot": 1})
    task = JsonlEnvironment(config, chat)
    prompts = task.prompts(RolloutRequest(0, 0, "train", range(40), 40, 1, 8, 1.0))
    assert all("<user> sums 0 <assistant> 0 " in p.model_input for p in prompts)
    assert "sums 0" not in {p.text for p in prompts}
    assert JsonlEnvironment.task_size(config, chat).train == 7


def test_overlap_counts_all_training_files(tmp_path: Path) -> None:
    task = mixed(tmp_path)
    config = task.config.model_copy(update={"test": tmp_path / "facts.jsonl"})
    assert JsonlEnvironment.train_test_overlap(config) == (4, 4)


def test_train_and_train_sets_exclude_each_other(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl")
    with pytest.raises(ValueError, match="train_sets replaces train"):
        JsonlConfig.model_validate(
            {"train": path, "test": path, "train_sets": {"a": {"train": path}}}
        )
