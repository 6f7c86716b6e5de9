"""The documentation has short pages, working links, and generated pages that are current."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.docs.figures import (
    DOCS,
    MOST_LONG,
    MOST_PAGES,
    MOST_WORDS,
    MOST_WORDS_OF_A_PAGE,
    OTHERS,
    ROOT,
    count,
    handwritten,
    sentences,
    words,
)
from tests.environments import need_environment

README_LINES = 130
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
"""Attributes of elements that a browser fetches by itself."""


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """Return ``docs/generate.py`` as a module."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_few_and_short() -> None:
    pages = [count(path) for path in handwritten()]
    assert len(pages) <= MOST_PAGES
    assert {page.name: page.words for page in pages if page.words > MOST_WORDS_OF_A_PAGE} == {}
    assert sum(page.words for page in pages) <= MOST_WORDS
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_sentences_are_short() -> None:
    long = [one for path in (*handwritten(), *OTHERS) for one in count(path).long]
    assert len(long) <= MOST_LONG, "\n".join(long)


def test_sentences_and_words_are_counted() -> None:
    text = "# A title\n\nOne `key=1` and\ntwo. Still [here](there.md)!\n\n- item\n| a | b |\n"
    found = sentences(text + "```bash\nnot counted\n```\n")
    assert found == ["# A title", "One `key=1` and two.", "Still [here]!", "- item", "a", "b"]
    assert words("One `key=1`, and two.") == 4


@pytest.mark.parametrize("page", [*handwritten(), *OTHERS], ids=lambda path: path.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    """Also those to headings, as the forge names them."""
    for match in LINK.finditer(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        target, _, anchor = (match[1] or match[2]).partition("#")
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_generated_pages_are_current(generator: ModuleType) -> None:
    stale = [path.name for path, text in generator.pages() if path.read_text() != text]
    assert stale == [], "python docs/generate.py"


def test_every_key_has_a_meaning(generator: ModuleType) -> None:
    pages = [text for path, text in generator.pages() if "config" in path.name]
    assert [line for text in pages for line in text.splitlines() if line.endswith("|  |")] == []


def test_every_figure_is_one_of_the_benchmarks() -> None:
    known = yaml.safe_load((DOCS / "data" / "figures.yaml").read_text())
    rows = {
        row["name"] for row in json.loads((ROOT / "benchmarks/results.json").read_text())["rows"]
    }
    assert {name for names in known.values() for name in names} <= rows


def test_every_metric_of_a_run_has_a_meaning(tiny_run: Path) -> None:
    known = yaml.safe_load((DOCS / "data" / "metrics.yaml").read_text())
    names = {f"{stage}/{name}" for stage, metrics in known.items() for name in metrics}
    row = json.loads((tiny_run / "metrics.jsonl").read_text().splitlines()[0])
    assert {name for name in row if name != "iteration"} <= names


def test_every_metric_that_the_code_names_has_a_meaning() -> None:
    known = yaml.safe_load((DOCS / "data" / "metrics.yaml").read_text())
    names = {name for metrics in known.values() for name in metrics}
    found = {
        match
        for folder in ("rlinf", "stages")
        for path in (ROOT / folder).rglob("*.py")
        for match in re.findall(r'\.(?:log_)?metric\(\s*"(\w+)"', path.read_text())
    }
    assert found
    assert found <= names


NO_KEYS = {"rollout.generate", "reward.price"}
"""What looks like a key: a part of a stage, and a key of the example."""
FOREIGN = {"from-trl.md": 1, "from-verl.md": 1}
"""Pages whose tables have the names of other libraries in so many first cells."""


def codes(page: Path) -> list[str]:
    """Return the inline code of a page, and the words of its shell blocks."""
    text = page.read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines()
    skipped = FOREIGN.get(page.name, 0)
    lines = [
        "|".join(line.split("|")[skipped + 1 :]) if line.startswith("|") else line for line in lines
    ]
    found = re.findall(r"`([^`]+)`", "\n".join(lines))
    return found + [word for block in blocks for word in block.split()]


@pytest.mark.parametrize("page", [*handwritten(), *OTHERS], ids=lambda path: path.name)
def test_keys_and_metrics_of_a_page_exist(page: Path, generator: ModuleType) -> None:
    keys = generator.known_keys()
    metrics = yaml.safe_load((DOCS / "data" / "metrics.yaml").read_text())
    wrong = []
    for code in codes(page):
        for section, key in re.findall(r"(?<![\w./-])([a-z_]+)\.([a-z_]+)(?![\w/(*])", code):
            name = f"{section}.{key}"
            if section in keys and key not in keys[section] and name not in NO_KEYS:
                wrong.append(name)
        for stage, name in re.findall(r"^([a-z_]+)/([a-z_]+)$", code):
            if stage in metrics and name not in metrics[stage]:
                wrong.append(f"{stage}/{name}")
    assert wrong == []


class Loads(HTMLParser):
    """Collects what a page has a browser fetch from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element's address."""
        found = dict(attrs)
        loads = tag == "link" and found.get("rel") in (
            "stylesheet",
            "icon",
            "preconnect",
            "preload",
        )
        address = found.get("href" if loads else LOADED.get(tag, "")) or ""
        if re.match(r"(https?:)?//", address):
            self.foreign.add(address)


def test_the_site_is_built_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    python = Path(need_environment("docs"))
    done = subprocess.run(
        [python, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    loads = Loads()
    for page in tmp_path.rglob("*.html"):
        loads.feed(page.read_text())
    assert loads.foreign == set()
    styles = [style.read_text() for style in tmp_path.rglob("*.css")]
    assert not any(re.search(r"url\([\"']?(https?:)?//|@import", style) for style in styles)
    assert "search" in (tmp_path / "index.html").read_text()
    assert (tmp_path / "search" / "search_index.js").exists()
