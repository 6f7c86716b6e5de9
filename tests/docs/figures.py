"""Print the figures of the documentation: ``python -m tests.docs.figures``.

Hand-written pages, words on each, words together, and sentences above 35 words. Code blocks do not
count; rows of tables count as words, and each cell as a sentence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OTHERS = tuple(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))
GENERATED = "<!-- Written by"
MOST_PAGES, MOST_WORDS_OF_A_PAGE, MOST_WORDS = 45, 900, 30_000
LONG, MOST_LONG = 35, 10
"""Words of a long sentence, and how many there may be over all pages."""


@dataclass(frozen=True)
class Page:
    """A page and what was counted on it."""

    path: Path
    words: int
    long: tuple[str, ...]
    """Its long sentences."""

    @property
    def name(self) -> str:
        """Return the path from the root of the repository."""
        return self.path.relative_to(ROOT).as_posix()


def handwritten() -> list[Path]:
    """Return the pages that people write."""
    pages = sorted(DOCS.rglob("*.md"))
    return [page for page in pages if page.parent.name != "data" and not is_generated(page)]


def is_generated(page: Path) -> bool:
    """Return whether a script writes the page."""
    return GENERATED in page.read_text()


def prose(text: str) -> str:
    """Return the text without code blocks, targets of links, and comments."""
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def sentences(text: str) -> list[str]:
    """Return the sentences of a page; headings, list items and cells are sentences of their own."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*[-*\d]+\.? )|\n(?=[#|>])", prose(text))
    cells = [cell for block in blocks for cell in re.split(r"(?<!\\)\|", block)]
    parts = [part for cell in cells for part in re.split(r"(?<=[.!?:;])\s+(?=[A-Z`*\[(])", cell)]
    return [" ".join(part.split()) for part in parts if part.strip()]


def words(text: str) -> int:
    """Return the number of words."""
    return len(re.findall(r"[\w`'./=-]*\w[\w`'./=-]*", text))


def count(path: Path) -> Page:
    """Count what is on a page."""
    text = path.read_text()
    long = tuple(one for one in sentences(text) if words(one) > LONG)
    return Page(path, words(prose(text)), long)


def main() -> None:
    """Print the figures."""
    pages = [count(path) for path in handwritten()]
    others = [count(path) for path in OTHERS]
    for page in (*pages, *others):
        print(f"{page.words:6d}  {page.name}")
        for sentence in page.long:
            print(f"        {words(sentence)} words: {sentence}")
    long = sum(len(page.long) for page in (*pages, *others))
    print(f"{len(pages)} pages (most {MOST_PAGES})")
    print(f"{sum(page.words for page in pages)} words (most {MOST_WORDS})")
    print(f"{long} sentences above {LONG} words (most {MOST_LONG})")


if __name__ == "__main__":
    main()
