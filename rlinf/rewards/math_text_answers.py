"""Extract answers in words: the letter of a choice, ``yes``, a name, a date."""

# ruff: noqa: RUF001
from __future__ import annotations

import re
from collections.abc import Iterator

from rlinf.rewards.math_extraction import (
    FORMULA,
    announced_answer,
    formula_body,
    marked_answers,
    searchable_text,
)
from rlinf.rewards.math_normalization import (
    UnparsableAnswerError,
    normalize_characters,
    normalize_latex,
)

_DRESS = re.compile(
    r"\\(?:text|math)(?:bf|rm|it|sf|tt|normal|up)?\s*\{|\*\*|__|[$`{}\x22]|\\[()\[\]]|\\(?=[\s,;])|"
    r"\\q?quad|\\[,;:!]"
)
_LEAD = re.compile(
    r"[\s:>]*(?:(?:so|thus|hence|therefore|is|the|(?-i:an?)|(?:final\s+|correct\s+)?answer|option|"
    r"choice|correct|best)\b[\s:,]*)*",
    re.IGNORECASE,
)
_HEAD = re.compile(
    r"\((?P<round>[A-Ja-j])\)|(?P<sharp>[A-J])(?=\s*(?:[.,:;)]|$|[-–—]\s)|"
    r"\s+(?:is(?!\s+(?:not|wrong|incorrect|false)\b)|because|since|as|and|or)\b)|(?P<small>[a-j])(?=\)|[.]?\s*$)"
)
_MORE = re.compile(r"\s*[.)]?\s*(?:,|/|&|or|and)\s*\(?(?:[A-J]\)?(?![A-Za-z'])|not\b)")
_CHOSEN = (
    re.compile(
        r"\b(?:option|choice|answer)\s+\(?(?P<letter>[A-J])\)?(?:\s*\([^()]*\))?\s+(?:is|must\s+be)"
        r"\s+(?:the\s+)?"
        r"(?:correct|right|true|best|answer)",
        re.IGNORECASE,
    ),
    re.compile(
        r"(?<![\w'])\(?(?P<letter>[A-J])\)?\s+is\s+(?:the\s+|our\s+|my\s+)?"
        r"(?:correct|right|true|best|final|answer)\b"
    ),
    re.compile(
        r"\b(?:choose|chose|pick|select|go\s+with|opt\s+for)\s+(?:option\s+|choice\s+|answer\s+)?"
        r"\(?(?P<letter>[A-J])\)?(?=[\s.,;:!]|$)(?!\s+[a-z])"
    ),
    re.compile(
        r"\b(?i:correct|choice|option|selection)\s*[:=]\s*\(?(?P<letter>[A-J])\)?(?![A-Za-z'])"
    ),
    re.compile(r"\bis\s+\(?(?P<letter>[A-J])\)?(?=\s*[.!]?\s*$)", re.MULTILINE),
)
_ASIDE = re.compile(
    r"\s*[:;(—]|\s*,?\s*(?:because|since|as|for|so|which|namely|not)\b"
    r"|,\s*(?:it|they|he|she|this|that|the|there|we|you|i\.e)\b",
    re.IGNORECASE,
)
_MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
_NEGATED = re.compile(r"(?:\bnot|n't|\bneither|\brule\s+out)\b[^.,;\n]{0,20}$", re.IGNORECASE)


def choice_letter(response: str) -> str:
    """Return the letter of the choice with which a response ends, as a capital.

    Raises:
        UnparsableAnswerError: it names none, or more than one.
    """
    marked = marked_answers(response)
    if marked is not None:
        return _one_letter(marked[-1]) if len(marked) == 1 else _none()
    text = _undressed(searchable_text(response))
    statement = announced_answer(text)
    if statement and re.match(r"\s*(?:correct|right|true)\b", statement):
        statement = None  # "Answer choice C is correct."
    at = text.rfind(statement) if statement else -1
    chosen = [
        (match.start("letter"), match["letter"].upper())
        for pattern in _CHOSEN
        for match in pattern.finditer(text)
        if not _NEGATED.search(text[: match.start("letter")])
        and not re.search(r"(?:\band|\bor|[,&/])\s*\(?$", text[: match.start("letter")])
    ]
    if statement and at >= max((place for place, _ in chosen), default=-1):
        return _one_letter(statement)
    if chosen:
        return max(chosen)[1]
    lines = [line for line in text.split("\n") if line.strip()] or [""]
    try:
        return _one_letter(lines[-1])
    except UnparsableAnswerError:
        return _one_letter(lines[0])


def _none() -> str:
    raise UnparsableAnswerError("no single choice")


def _undressed(text: str) -> str:
    return _DRESS.sub(" ", normalize_characters(text))


def _one_letter(text: str) -> str:
    bare = _undressed(text).strip()
    lead = _LEAD.match(bare)
    assert lead is not None
    # "A" is also an article, so the lead may have consumed the letter itself.
    head = _HEAD.match(bare) or _HEAD.match(bare, lead.end())
    if head is None or _MORE.match(bare, head.end()):
        return _none()
    return str(head["round"] or head["sharp"] or head["small"]).upper()


def ends_with_words(response: str, words: str) -> bool:
    """Return whether a response ends with the words of the reference, see :func:`normalize_words`.

    Raises:
        UnparsableAnswerError: it has no answer.
    """
    marked = marked_answers(response)
    if marked is not None:
        return len(marked) == 1 and _begins(_as_marked(marked[0]), words)
    text = searchable_text(response)
    statement = announced_answer(text)
    if statement is not None:
        return any(_begins(reading, words) for reading in _openings(statement))
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise UnparsableAnswerError("no answer")
    return any(reading == words for reading in _endings(lines[-1])) or _opens_bold(text, words)


def _as_marked(text: str) -> str:
    return re.sub(r"^(?:the )?(?:final )?answer(?: is|:)\s*", "", normalize_words(text))


def _openings(statement: str) -> Iterator[str]:
    line = statement.strip().split("\n", 1)[0]
    yield normalize_words(
        re.split(r"(?<=[^\s.][^\s.])[.!?](?:\s|$)", _undressed(line), maxsplit=1)[0]
    )
    yield normalize_words(_undressed(line))


def _begins(text: str, words: str) -> bool:
    """Return whether a sentence begins with the words, followed at most by an aside."""
    rest = text.removeprefix(words) if text.startswith(words) else None
    return (
        rest is not None
        and bool(re.fullmatch(r"(?:\s*[,;:(].*|\s+(?:because|since|as|for)\b.*)?", rest))
        and not re.match(r"\s*,?\s*(?:or|and|but)\b", rest)
    )


def _endings(line: str) -> Iterator[str]:
    """Yield the last bold text, the last formula, the line, and the text after its last "is"."""
    if bold := re.findall(r"\*\*(?=\S)([^*]+?)\*\*", line):
        yield normalize_words(bold[-1])
        return
    if formulas := list(FORMULA.finditer(line)):
        yield normalize_words(formula_body(formulas[-1]))
        return
    words = normalize_words(line)
    yield words
    predicate = re.search(r"^.*\b(?:is|are|was|be|on)\s+(.*)$", words)
    if predicate and not re.search(r"\b(?:or|either|neither|if|whether|not|never)\b|n't", words):
        yield normalize_words(predicate[1])


def _opens_bold(text: str, words: str) -> bool:
    """Return whether the response begins with the words in bold, or with the words and a comma."""
    first = text.strip().split("\n", 1)[0]
    opening = re.match(r"\*\*([^*]+)\*\*(?=[\s.,;:!]|$)|(\w+)(?=[,.]\s)", first)
    return opening is not None and normalize_words(opening[1] or opening[2]) == words


def normalize_words(text: str) -> str:
    """Return words in lower case, without surrounding markup, article and punctuation."""
    try:
        spelled, _ = normalize_latex(text)
    except UnparsableAnswerError:
        spelled = text
    spelled = re.sub(r"\\(?:ldots|cdots|dots)(?![a-z])", "...", spelled)
    spelled = " ".join(re.sub(r"[{}]|\\(?=\s)", " ", spelled.lower()).split())
    spelled = re.sub(r"\s*([,;:=+()/-])\s*", r"\1", spelled).replace("p.m.", "pm")
    spelled = re.sub(r"\b([ap])\.m\b\.?", r"\1m", spelled)
    spelled = re.sub(rf"\b(\d{{1,2}})(?:st|nd|rd|th)?(?: of)? ({_MONTHS})\b", r"\2 \1", spelled)
    spelled = re.sub(rf"\b({_MONTHS}) (?:the )?(\d{{1,2}})(?:st|nd|rd|th)\b", r"\1 \2", spelled)
    return re.sub(r"^(?:an?|the) (?!(?:and|or)\b)(?=\w)|[\s.!?:;,\"'*_]+$|^[\s\"'*_]+", "", spelled)
