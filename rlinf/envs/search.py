"""Questions whose answers can be searched for: the task of Search-R1 (arXiv 2503.09516).

The policy writes ``<search>query</search>`` and reads, in the same turn, the results of a BM25
index between ``<information>`` and ``</information>``; ``<answer>...</answer>`` ends the dialogue.
``</search>`` and ``</answer>`` are stop strings of the engine. The policy's tokens are kept as they
were sampled, and the results follow as masked tokens. Only the policy's own text is parsed for an
answer.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from rlinf.data.json_lines import count_overlap
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.envs.base import TaskSize
from rlinf.envs.dialogue import (
    Dialogue,
    DialogueConfig,
    DialogueEnvironment,
    DialogueStep,
)
from rlinf.envs.search_corpus import (
    PACKAGE_EXTRA,
    Bm25Index,
    Document,
    SearchQuestion,
    load_countries,
    load_python_manual,
    question_key,
    read_documents,
    read_questions,
)
from rlinf.errors import ConfigError, require_package
from rlinf.models.base import ModelSpec
from rlinf.models.chat_template import ChatMessage
from rlinf.registry import DEMONSTRATIONS, PROMPTS, REFERENCE_ANSWERS, STEP_REWARDS, TURNS
from rlinf.seeding import generator

CALL_PATTERN = re.compile(r"<(search|answer)>((?:(?!</?(?:search|answer)>).)*)</\1>", re.DOTALL)
"""Matches the first complete call. The text of a match contains no other tag."""
TOKENIZE_CHUNK = 4096
"""Number of questions that are tokenized at once."""
INSTRUCTION = (
    "Answer the question. You can look things up: write <search>words</search>, and what is found "
    "comes back between <information> and </information>. End with the answer alone, as "
    "<answer>words</answer>."
)


class SearchConfig(DialogueConfig):
    """The questions, the corpus, and the rewards."""

    max_turns: int = Field(default=4, gt=0)
    """Maximum number of messages of the policy: searches, malformed messages and the answer."""
    max_turn_tokens: int = Field(default=128, gt=0)
    max_searches: int = Field(default=2, ge=0)
    """Maximum number of searches; a further one returns an error."""
    results_per_search: int = Field(default=3, gt=0)
    """Maximum number of texts that a search returns."""
    max_result_tokens: int = Field(default=256, ge=16)
    """Maximum number of tokens of a search's results, with their tags. Longer results are cut off
    before the closing tag."""
    corpus: Literal["countries", "manual"] = "countries"
    """Built-in corpus, used without ``documents``: sentences built from tables about countries, or
    Python's manual."""
    documents: Path | None = None
    """JSON-lines file of texts; null: the texts and questions of ``corpus``."""
    train: Path | None = None
    """JSON-lines file of training questions."""
    test: Path | None = None
    """JSON-lines file of test questions."""
    allow_train_test_overlap: bool = False
    """Train even if every test question is a training question too."""
    document_field: str = "contents"
    """Field of a text, whose first line is its title."""
    question_field: str = "question"
    answer_field: str = "answer"
    """Field of a question's answer, or of a list of correct answers, each of which is accepted."""
    index_dir: Path = Path("~/.cache/rlinf/search")
    """Folder of the indexes, each under the digest of its texts."""
    instruction: str = INSTRUCTION
    """Text before the question."""
    num_fewshot: int = Field(default=0, ge=0)
    """Number of training questions that precede each question, with their answers; they are not
    trained on."""
    format_reward: float = Field(default=0.0, ge=0, lt=1)
    """Reward of a wrong answer if no message before it caused an error; a right answer after an
    error (a malformed message, or a search too many) loses this much (arXiv 2505.15117)."""
    retrieval_reward: float = Field(default=0.0, ge=0, lt=1)
    """Reward of the first search whose results contain an answer (arXiv 2505.11821, section 4), in
    addition to the reward of the policy's answer."""

    @model_validator(mode="after")
    def _check_files(self) -> SearchConfig:
        values = {name: getattr(self, name) for name in ("documents", "train", "test")}
        if any(values.values()) and (lacks := next((n for n, v in values.items() if not v), None)):
            raise ValueError(f"{lacks} is not set; documents, train and test are set together")
        if self.documents is not None and "corpus" in self.model_fields_set:
            raise ValueError("corpus and documents are both set; leave one of them out")
        return self


class SearchDialogue(Dialogue):
    """One question, its searches and its answer."""

    def __init__(
        self,
        question: SearchQuestion,
        opening: Sequence[ChatMessage],
        config: SearchConfig,
        search: Callable[[str], str],
    ) -> None:
        self._question, self._opening, self._config = question, opening, config
        self._search = search
        self._num_searches = self._num_errors = 0
        self._has_found_answer = False
        self.info = {
            "answer": question.answers[0],
            "answers": json.dumps(question.answers),
            "predicted": "",
            "exact": 0.0,
        }

    def init(self) -> Sequence[ChatMessage]:
        return self._opening

    def step(self, message: str) -> DialogueStep:
        call = CALL_PATTERN.search(message)
        name, text = (call[1], call[2].strip()) if call else ("", "")
        if name == "answer" and text:
            return [], self._score(text), True
        if not text:
            return self._error_step("write <search>words</search> or <answer>words</answer>")
        if self._num_searches == self._config.max_searches:
            return self._error_step("no search is left; write <answer>words</answer>")
        self._num_searches += 1
        results = self._search(text)
        is_hit = not self._has_found_answer and contains_answer(results, self._question.answers)
        self._has_found_answer |= is_hit
        reward = self._config.retrieval_reward * is_hit
        return [{"role": "user", "content": results}], reward, False

    def _score(self, predicted: str) -> float:
        is_exact = is_exact_match(predicted, self._question.answers)
        self.info = {**self.info, "predicted": predicted, "exact": float(is_exact)}
        format_reward = self._config.format_reward
        if is_exact:
            return 1.0 - format_reward * bool(self._num_errors)
        return 0.0 if self._num_errors else format_reward

    def _error_step(self, error: str) -> DialogueStep:
        self._num_errors += 1
        return [{"role": "user", "content": _wrap_results(f"error: {error}")}], 0.0, False


class SearchEnvironment(DialogueEnvironment):
    """Questions with a search tool. The score is exact match; ``reward=environment`` adds the
    format reward."""

    Config = SearchConfig
    config: SearchConfig
    provides = frozenset({PROMPTS, STEP_REWARDS, TURNS, REFERENCE_ANSWERS, DEMONSTRATIONS})
    stop_strings = ("</search>", "</answer>")
    inline_replies = True

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        train, self._test = load_questions(config)
        self._fewshot, self._train = train[: config.num_fewshot], train[config.num_fewshot :]

    @classmethod
    def model_spec(cls, config: SearchConfig) -> ModelSpec:
        """Return the alphabet for a model that is created for the task. Characters that only occur
        in texts of the corpus may have no token."""
        require_package("bm25s", PACKAGE_EXTRA, "task.name: search")
        load_documents(config)
        train, test = load_questions(config)
        alphabet_texts = (
            text for q in (*train, *test) for text in (q.text, *q.answers, *q.queries)
        )
        return {"alphabet": "".join(sorted(set(string.printable).union(*alphabet_texts)))}

    @classmethod
    def train_test_overlap(cls, config: SearchConfig) -> tuple[int, int]:
        train, test = load_questions(config)
        return count_overlap([train], test, question_key)

    @classmethod
    def task_size(cls, config: SearchConfig, processor: Any) -> TaskSize:
        if processor is None:
            return TaskSize()
        environment = cls(config, processor)
        longest = max(
            map(environment._longest, (environment._train, environment._test)),
            key=itemgetter(0),
        )[1]
        (ids,) = environment.encode_prompts(environment._render([environment._opening(longest)]))
        return TaskSize(max_prompt_tokens=len(ids))

    def _longest(self, questions: Sequence[SearchQuestion]) -> tuple[int, SearchQuestion]:
        """Return the number of tokens of the longest question, and the first question with that
        number."""
        longest: tuple[int, SearchQuestion] | None = None
        for first in range(0, len(questions), TOKENIZE_CHUNK):
            chunk = list(questions[first : first + TOKENIZE_CHUNK])
            lengths = [len(ids) for ids in self.encode([question.text for question in chunk])]
            if longest is None or max(lengths) > longest[0]:
                longest = max(lengths), chunk[lengths.index(max(lengths))]
        assert longest is not None
        return longest

    def create_dialogue(self, split: str, random: np.random.Generator) -> SearchDialogue:
        questions = self._test if split == "test" else self._train
        question = questions[int(random.integers(len(questions)))]
        return SearchDialogue(question, self._opening(question), self.config, self._search)

    def score(self, trajectories: Sequence[Trajectory], counts: Counter[str]) -> list[float]:
        return [math.nan if t.is_failed else float(t.extra["exact"]) for t in trajectories]

    def demonstrations(self, seed: int, step: int, count: int) -> list[Trajectory]:
        """Return dialogues of an expert that makes a question's searches and knows the answer."""
        random = generator(seed, "search", "demonstration", step)
        dialogues = []
        for index in range(count):
            question = self._train[int(random.integers(len(self._train)))]
            (prompt,) = self.encode_prompts(self._render([self._opening(question)]))
            parts = self._expert_dialogue(question)
            ids = self.encode([text for text, _ in parts], literal=True)
            masks = [np.full(len(i), p[1], np.float32) for i, p in zip(ids, parts, strict=True)]
            dialogues.append(
                Trajectory(
                    identity=RecordId(step, index),
                    actions=np.concatenate(ids),
                    mask=np.concatenate(masks),
                    prompt=prompt,
                )
            )
        return dialogues

    @cached_property
    def _index(self) -> Bm25Index:
        # Created on first use, because the reward stage does not need it.
        return Bm25Index(load_documents(self.config), self.config.index_dir)

    @cached_property
    def _examples(self) -> list[ChatMessage]:
        """The few-shot questions, each followed by its searches and its answer."""
        messages = list[ChatMessage]()
        for question in self._fewshot:
            text = "".join(text for text, _ in self._expert_dialogue(question))
            messages += [self._question_message(question), {"role": "assistant", "content": text}]
        return messages

    def _opening(self, question: SearchQuestion) -> list[ChatMessage]:
        """Return the messages before the policy's first one."""
        first, *rest = [*self._examples, self._question_message(question)]
        instruction = self.config.instruction
        return [{**first, "content": f"{instruction}\n\n{first['content']}"}, *rest]

    def _question_message(self, question: SearchQuestion) -> ChatMessage:
        # Without a chat template, nothing else separates two messages.
        is_plain = self.chat_format.template is None
        content = f"\n\nQuestion: {question.text}\n" if is_plain else question.text
        return {"role": "user", "content": content}

    def _expert_dialogue(self, question: SearchQuestion) -> list[tuple[str, float]]:
        """Return the texts of a whole dialogue, each with its loss mask."""
        parts = []
        for query in question.queries[: self.config.max_searches]:
            parts += [(f"<search>{query}</search>", 1.0), (self._search(query), 0.0)]
        return [*parts, (f"<answer>{question.answers[0]}</answer>", 1.0)]

    def _search(self, query: str) -> str:
        """Return the results of a query as the policy reads them: at most ``max_result_tokens``
        tokens."""
        documents = self._index.search(query, self.config.results_per_search)
        results = [
            f'Doc {rank} (Title: "{document.title}") {document.text}'
            for rank, document in enumerate(documents, start=1)
        ]
        text = "\n".join(results) or "nothing found"
        (ids,), max_tokens = self.encode([text], literal=True), self.config.max_result_tokens
        num_kept = len(ids)
        while num_kept:
            (wrapped_ids,) = self.encode([_wrap_results(text)], literal=True)
            if len(wrapped_ids) <= max_tokens:
                break
            num_kept = max(0, num_kept - (len(wrapped_ids) - max_tokens))
            # The cut may leave a part of a character at the end, which is dropped.
            text = self.tokenizer.decode(ids[:num_kept]).rstrip("\ufffd")
        return _wrap_results(text)


def load_documents(config: SearchConfig) -> Sequence[Document]:
    """Return the searchable texts.

    Raises:
        DataError: the file is missing, empty or malformed.
        MissingPackageError: the tables about countries are not installed.
    """
    if config.documents is None:
        return _load_corpus(config)[0]
    return read_documents(config.documents, config.document_field)


def load_questions(
    config: SearchConfig,
) -> tuple[Sequence[SearchQuestion], Sequence[SearchQuestion]]:
    """Return the questions for training and for test.

    Raises:
        ConfigError: ``num_fewshot`` leaves no question to train on.
        DataError: a file is missing, empty or malformed.
        MissingPackageError: the tables about countries are not installed.
    """
    train: Sequence[SearchQuestion]
    test: Sequence[SearchQuestion]
    if config.train is None or config.test is None:
        _, train, test = _load_corpus(config)
    else:
        fields = config.question_field, config.answer_field
        train = read_questions(config.train, "task.train", *fields)
        test = read_questions(config.test, "task.test", *fields)
    if config.num_fewshot >= len(train):
        raise ConfigError(
            f"task.num_fewshot: there are {len(train)} training questions; set it lower"
        )
    return train, test


def _load_corpus(
    config: SearchConfig,
) -> tuple[tuple[Document, ...], tuple[SearchQuestion, ...], tuple[SearchQuestion, ...]]:
    return load_python_manual() if config.corpus == "manual" else load_countries()


def _wrap_results(text: str) -> str:
    return f"\n\n<information>{text}</information>\n\n"


def is_exact_match(predicted: str, answers: Sequence[str]) -> bool:
    """Return whether a text equals one of the answers, ignoring case, punctuation, articles and
    white space: exact match of SQuAD (arXiv 1606.05250), the reward of Search-R1."""
    return _normalize(predicted) in map(_normalize, answers)


def contains_answer(text: str, answers: Sequence[str]) -> bool:
    """Return whether a text contains one of the answers as whole words, compared as in
    :func:`is_exact_match`."""
    words = f" {_normalize(re.sub('</?information>', ' ', text))} "
    return any(f" {_normalize(answer)} " in words for answer in answers)


def _normalize(text: str) -> str:
    letters = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    words = [word for word in letters.split() if word not in {"a", "an", "the"}]
    # An answer without other words, such as the grade A, is compared unchanged.
    return " ".join(words) or text.strip().lower()
