"""The glossary explains the terms on the path of one sample, and they stay few."""

from __future__ import annotations

import re

from rlinf import package_paths

GLOSSARY = package_paths.ROOT / "docs" / "start" / "glossary.md"
MOST_TERMS = {"in process": 25, "jobs": 32, "pools": 50}
"""Most terms that a reader needs for each way to run, those of the ways before it included."""


def rows(title: str) -> list[list[str]]:
    """Return the cells of the first table after a line of the page."""
    text = GLOSSARY.read_text().split(f"{title}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    lines = table[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]


def test_terms_on_the_path_of_a_sample_are_few_and_explained() -> None:
    explained = {
        re.sub(r" \(.*\)", "", term) for row in rows("# Glossary") for term in row[0].split(", ")
    }
    terms: list[str] = []
    for way, names in rows("## The terms on the path of one sample"):
        terms += names.split(", ")
        assert len(terms) <= MOST_TERMS.pop(way)
    assert not MOST_TERMS
    assert len(set(terms)) == len(terms)
    assert set(terms) <= explained
