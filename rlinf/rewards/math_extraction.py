"""Locate the answer in a response: the box, the phrase that announces it, or its last formula.

This module works on text only. rlinf/rewards/math_parsing.py parses the located text as
mathematics. Patterns are named after the text that they match.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from rlinf.models.chat_format import KNOWN_THINKING_MARKS, ThinkingMarks
from rlinf.rewards.math_normalization import (
    UnparsableAnswerError,
    find_closing_bracket,
    is_unit,
    normalize_characters,
)

# ruff: noqa: RUF001


MAX_LINE_CHARS = 2000
"""Number of characters at the end of a line that are searched for its answer."""
SEARCHED_CHARS = 10_000
"""Number of characters at the end of an unmarked response that are searched. Some patterns take
quadratic time."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BETWEEN_BOXES = re.compile(r"\\(?:text|mbox|q?quad)(?![A-Za-z])|\\[()\[\],; ]|[${}]")
"""Markup that is ignored in the text between two joined boxes."""
_HASHES = re.compile(r"(?<!#)####(?!#)([^\n]*)")
"""GSM8K's mark of the final answer of a worked solution; in Markdown it is a heading."""
_ANSWER_TAGS = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)

FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<![\\$])\$(?![\s$])([^$\n]{1,500}?)(?<![\s\\])\$"
    r"(?!\d)",
    re.DOTALL,
)
_BOLD = re.compile(r"\*\*(?=\S)([^*\n]+?)(?<=\S)\*\*|__(?=\S)([^_\n]+?)(?<=\S)__|`+([^`]+?)`+")
_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+\b)?"
_VALUE = (
    rf"(?:[A-Za-z](?:_\{{?\w+\}}?)?\s*=\s*)?(?:\\?\$|[€£¥₹])?\s?"
    rf"(?:\d+\s+\d+/\d+|{_NUMBER}(?:\s*/\s*\d+|(?::\d+)+)?)"
    r"(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{[-+]?\d+\}|[-+]?\d+))?(?:!+(?!\S)|\s*\\?%)?"
)
VALUES = re.compile(rf"(?<![\w.,/:^])-?{_VALUE}(?:,?\s+(?:or|and)\s+{_VALUE})*")
_JOIN = re.compile(r"\s*(?:,?\s*(?:\band\b|\bor\b)|,)\s*")
"""Text that joins two parts of one answer."""

_COPULA = (
    r"\s*(?:\*\*|__)?\s*(?:[:=]|[-–—]\s|(?:\b(?:is|are|be|was|equals|est|es|è|é|ist|lautet|sind)\b|[是为為は])"
    r"(?:\s*:)?)"
)
_ANSWER_NOUN = (
    r"(?:\b(?:answers?|answer\s+choice|correct\s+(?:option|choice)|(?:right|best)\s+(?:option|choice)"
    r"|respuesta|réponse|risposta|resposta|antwort|ответ|jawaban)\b|答案|答え|答|정답)"
)
_ANSWER_IS = re.compile(rf"{_ANSWER_NOUN}(?P<between>[^\n.:=]{{0,40}}?){_COPULA}", re.IGNORECASE)
_ANSWER_HEADING = re.compile(
    r"^[#* ]*(?:the\s+|our\s+|my\s+)?(?:final\s+)?answer(?:\s+is)?[* ]*$", re.I | re.M
)
_IS_THE_ANSWER = re.compile(
    r"(?:^|[.;!?,]\s+|\n)(?P<rest>[^\n;?]*?)\s+is\s+(?:thus\s+|therefore\s+)?(?:the|our|my)\s+"
    r"(?:(?:final|correct|right|best)\s+)?(?:answer|option|choice)\b(?!\s+(?:to|is|of|for)\b)",
    re.IGNORECASE,
)
_FILLER = re.compile(
    r"(?:[\s:=>→⇒]|(?:(?:about|approximately|roughly|around|exactly|equal\s+to|simply|just|clearly|"
    r"indeed|then|therefore|thus|hence|so|that|given\s+by|the\s+(?:option|choice|number|value)|"
    r"option|choice|\\approx)(?![A-Za-z])))*",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<=[^\s.])[.!?](?:\s+(?=[A-Z*\\$(])|\s*$)")
_ASIDE = re.compile(  # all that follows the answer in its sentence
    r"\s*(?:[,;]\s*(?!and\b|or\b)(?=[a-z]{2,}\b)|\((?=[^()\\]*[A-Za-z]{2,})|\s[-–—]+\s(?=[A-Za-z]{3,})|[—–]"
    r"|\b(?:because|since|as|where|which|when|if|from|for|with|not|so|per\s+the|in\s+total)\b).*",
    re.IGNORECASE | re.DOTALL,
)
_INDEFINITE_START = re.compile(  # the beginning of a sentence that does not state one value
    r"(?:not|no(?!\s+(?:real\s+)?solution)|between|at\s+least|at\s+most|either|neither)\s+\S",
    re.IGNORECASE,
)
_BOUND_BEFORE = re.compile(  # words before a value that make it only a bound
    r"\b(?:at\s+least|at\s+most|(?:fewer|less|more|greater|larger|smaller|higher|lower)\s+than|"
    r"up\s+to|between|not|n't)\s*[\\$*(]*$",
    re.IGNORECASE,
)
_PREPOSITION = re.compile(r"\b(?:in|at|after|for|within|every|per|during)\s+[\\$(*]*$", re.I)
_PREDICATE = re.compile(  # the group is the text after the last "is"
    r".*\b(?:is|are|be|equals|get|gives|have|point)\b:?\s+(?=[\d\\(\[{+-])(.+?)\.?$"
)
_BROKEN_OFF = re.compile(  # the end of a response that stops within a sentence
    r"(?:\b(?:which|the|that|is|are|to|of|and|or|with|by|we|an?|then|as|because|if|has|have|so|equals|"
    r"be|from|for|in|on|at|this|let|when|where|but)|[-+=/]|(?<!\*)\*)\s*$"
)
_NEGATED = re.compile(r"\b(?:can)?not\b|n't\b|\bnever\b", re.IGNORECASE)
_BRACKETED_ASIDE = re.compile(r"\s*\((?=[^()]*[A-Za-z]{3,})[^()\\]*\)|,\s*(?:and\s+)?not\b.*")
_HEDGE = re.compile(  # words before a number that is thus not the answer itself
    r"\b(?:not|no|nor|neither|between|at\s+least|at\s+most|less\s+than|more\s+than|greater\s+than|"
    r"up\s+to|any|to|from|over|under|above|below|e\.g|maybe|perhaps|or|and|of|plus|minus|times)\b",
    re.IGNORECASE,
)


def marked_answers(text: str) -> list[str] | None:
    """Return the texts that are marked as the answer; None if there is no mark. Marks are
    ``\\boxed{}``, ``<answer>`` and ``####``. The last mark counts; if it is a box, boxes that are
    joined to it by ``or``, ``and`` or a comma count too. A ``####`` that is a Markdown heading
    (words, with text below) is not a mark."""
    boxes = list(_BOX.finditer(text))
    final = next(
        (mark for mark in reversed([*_HASHES.finditer(text)]) if _is_final_answer(mark)), None
    )
    tag = next(reversed([*_ANSWER_TAGS.finditer(text)]), None)
    last = max((m.start() for m in (boxes[-1:] or []) + [m for m in (final, tag) if m]), default=-1)
    if last < 0:
        return None
    if boxes and boxes[-1].start() == last:
        return _joined_boxes(text, boxes)
    if tag and tag.start() == last:
        return [tag[1].strip()]
    assert final is not None
    return [final[1].strip() or final.string[final.end() :].strip().split("\n", 1)[0]]


def _is_final_answer(final: re.Match[str]) -> bool:
    """Return whether a ``####`` marks an answer: its line is empty, is the last one, or has no
    word. Otherwise it is a Markdown heading."""
    rest = normalize_characters(final[1]).strip()
    if not rest or not final.string[final.end() :].strip():
        return True
    return len(rest) < 200 and not re.search(r"(?<![\\A-Za-z{])[A-Za-z]{3,}", _without_unit(rest))


def _without_unit(text: str) -> str:
    return re.sub(r"(?<=\d)\s+[A-Za-z/ ]+$|^total:|\\(?:boxed|text)\{?", "", text, flags=re.I)


def _joined_boxes(text: str, boxes: list[re.Match[str]]) -> list[str]:
    """Return the last box, and the boxes that ``or``, ``and`` or a comma joins to it."""
    texts = [_inside_box(text, boxes[-1])]
    for box, next_box in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        inner = _inside_box(text, box)
        between = _BETWEEN_BOXES.sub(" ", text[box.end() + len(inner) + 2 : next_box.start()])
        if not _JOIN.fullmatch(between):
            break
        texts.insert(0, inner)
    return texts


def _inside_box(text: str, box: re.Match[str]) -> str:
    start = box.end()
    if not text.startswith("{", start):
        word = re.match(r"\S+", text[start:])
        return word[0] if word else ""
    end = find_closing_bracket(text, start)
    if end is None:
        raise UnparsableAnswerError("a box without a closing brace")
    return text[start + 1 : end]


def unmarked_candidates(text: str) -> Iterator[str]:
    """Yield possible answers of a text without a mark, the most likely first.

    Candidates are the text after (or before) "the answer is", within its sentence. Without that
    phrase, they are the last bold text, formula or number of the last line that has one.
    """
    text = searchable_text(text)
    statement = announced_answer(text)
    if statement is None:
        yield from _trailing_candidates(text)
    else:
        yield from leading_candidates(statement)


def searchable_text(text: str) -> str:
    """Return the end of a text, without pictograms, code fences and the ``$`` of ``cm$^2$``."""
    text = normalize_characters(text[-SEARCHED_CHARS:])[-SEARCHED_CHARS:]
    text = re.sub(r"^\s*```\w*\s*$", "", text, flags=re.MULTILINE)
    return re.sub(r"(?<=[A-Za-z])\$(\^\{?-?\d\}?)\$", r"\1", text)


def announced_answer(text: str) -> str | None:
    """Return the text after the last "the answer is", or before "is the answer"."""
    candidates: list[tuple[int, str]] = []
    for statement in _ANSWER_IS.finditer(text):
        rest = text[statement.end() :].split("\n", 1)[0]
        if not re.search(r"[^\W_]", rest):
            rest = f"{rest.strip('*_ ')}{text[statement.end() :]}".lstrip()
        if rest.strip():
            negation = "not " if _NEGATED.search(statement[0]) else ""
            candidates.append((statement.start(), negation + rest))
    for heading in _ANSWER_HEADING.finditer(text):
        rest = text[heading.end() :].lstrip()
        if rest:
            candidates.append((heading.start(), rest))
    for statement in _IS_THE_ANSWER.finditer(text):
        candidates.append((statement.start("rest"), statement["rest"].rsplit(", ", 1)[-1]))
    return max(candidates, key=lambda item: item[0])[1] if candidates else None


def leading_candidates(text: str) -> Iterator[str]:
    """Yield possible answers of a text that begins with the answer."""
    text = text.strip()
    lead = _FILLER.match(text.lstrip("*_"))
    plain = text if not lead or not lead.end() else text.lstrip("*_")[lead.end() :]
    bold = _BOLD.match(plain)
    if bold:
        yield from leading_candidates(next(group for group in bold.groups() if group))
        return
    plain = plain.lstrip("*_")
    formula = FORMULA.match(plain)
    if formula:
        yield _append_unit(plain, *_join_formulas(plain, formula))
        return
    line = plain.split("\n", 1)[0].rstrip("*_ ")
    sentence = _SENTENCE_END.split(line, maxsplit=1)[0].rstrip("*_ ")
    if _INDEFINITE_START.match(sentence):
        values = VALUES.search(sentence)
        if sentence.lower().startswith("either") and values:
            yield values[0]
        return
    if line[len(sentence) :].startswith("!") and re.search(r"\d$", sentence):
        yield sentence + "!"
    shortened = _ASIDE.sub("", sentence)
    if shortened:
        yield shortened
    if shortened != sentence:
        yield sentence
    formulas = list(FORMULA.finditer(sentence))
    if formulas:
        yield _append_unit(sentence, *_join_formulas(sentence, formulas[0]))
        return
    values = VALUES.search(shortened)
    if values and not _HEDGE.search(shortened[: values.start()]):
        yield _append_unit(shortened, values[0], values.end())


def _trailing_candidates(text: str) -> Iterator[str]:
    """Yield possible answers of a text that ends with the answer; none if the text breaks off."""
    if _BROKEN_OFF.search(text):
        return
    for line in reversed(_lines(text)):
        if bold := _last_bold(line):
            yield from leading_candidates(bold)
        formulas = list(FORMULA.finditer(line))
        if formulas:
            start = _last_main_value(line, formulas)
            while start and _are_joined(line, formulas[start - 1], formulas[start]):
                start -= 1
            if _BOUND_BEFORE.search(line[: formulas[start].start()]):
                return
            yield _append_unit(line, *_join_formulas(line, formulas[start]))
            return
        if bold:
            return
        rest = _BRACKETED_ASIDE.sub("", line)
        values = list(VALUES.finditer(rest))
        if not values and not _has_answer(rest):
            continue
        bare = re.sub(r"^(?:[\s>*_]|-\s)*", "", rest).rstrip("*_` ")
        yield re.sub(r"(?<=[^\s.])[.?]$", "", bare)
        if no_solution := re.search(r"\bno\s+(?:real\s+)?solutions?(?=\W*$)", bare, re.I):
            yield no_solution[0]
        predicate = _PREDICATE.search(bare)
        if predicate and not values:
            yield predicate[1].rstrip("!")
        if not values:
            continue
        last = values[_last_main_value(rest, values)]
        if not _BOUND_BEFORE.search(rest[: last.start()]):
            if predicate and last is values[-1]:
                yield from _exclamation_readings(predicate[1])
            yield from _exclamation_readings(_append_unit(rest, last[0], last.end()))
        return


def _exclamation_readings(text: str) -> Iterator[str]:
    """Yield a text, and the text without its exclamation mark, which may be a factorial."""
    yield text
    if text.endswith("!"):
        yield text.rstrip("!")


def _last_main_value(text: str, values: list[re.Match[str]]) -> int:
    """Return the index of the last value without a preposition: 350 in "350 km in 5 hours"."""
    indices = range(len(values) - 1, -1, -1)
    outside = (i for i in indices if not _PREPOSITION.search(text[: values[i].start()]))
    return next(outside, len(values) - 1)


def _lines(text: str) -> list[str]:
    """Return the lines of a text that have a letter or digit. A formula of several lines is one
    line."""
    start, lines = 0, []
    for formula in FORMULA.finditer(text):
        if "\n" in formula[0]:
            lines += [*text[start : formula.start()].split("\n"), formula[0]]
            start = formula.end()
    lines += text[start:].split("\n")
    return [line[-MAX_LINE_CHARS:] for line in lines if re.search(r"[^\W_]", line)]


def _are_joined(text: str, first: re.Match[str], second: re.Match[str]) -> bool:
    """Return whether two formulas are one answer: ``and`` or ``or`` joins them, or a comma joins
    values of the same unknown, unlike in "If $n=3$, $x=5$"."""
    join = _JOIN.fullmatch(text[first.end() : second.start()])
    if join is None or join[0].strip() != ",":
        return join is not None
    names = [_unknown_name(formula_body(formula)) for formula in (first, second)]
    return names[0] == names[1]


def _unknown_name(formula: str) -> str:
    return re.split(r"[_=]", formula)[0].strip() if "=" in formula else ""


def _has_answer(line: str) -> bool:
    """Return whether a line without digits may be an answer: a formula, or a few words."""
    is_short = len(line.split()) <= 4 or re.search(r"\bsolutions?\W*$", line)
    return "=" in line or "\\" in line or bool(is_short)


def _last_bold(line: str) -> str | None:
    """Return the last bold text of a line, after the bold texts that are joined to it; None if
    there is none. A label, which ends with a colon, does not count."""
    bolds = [
        bold
        for bold in _BOLD.finditer(line)
        if not bold[0].rstrip("*_").endswith(":") and line[bold.end() : bold.end() + 1] != ":"
    ]
    if not bolds:
        return None
    texts = [next(group for group in bolds[-1].groups() if group)]
    for bold, next_bold in zip(reversed(bolds[:-1]), reversed(bolds[1:]), strict=True):
        join = _JOIN.fullmatch(line[bold.end() : next_bold.start()])
        if not join:
            break
        texts.insert(0, next(group for group in bold.groups() if group) + join[0])
    text = "".join(texts)
    return _append_unit(line, text, bolds[-1].end())


def _join_formulas(text: str, first: re.Match[str]) -> tuple[str, int]:
    """Return a formula with the formulas that are joined to it, and the end position."""
    inner, end, last = formula_body(first), first.end(), first
    while join := _JOIN.match(text, end):
        following = FORMULA.match(text, join.end())
        if not following or not _are_joined(text, last, following):
            break
        last = following
        inner += (join[0] if re.search(r"and|or", join[0]) else ", ") + formula_body(following)
        end = following.end()
    return inner, end


def formula_body(formula: re.Match[str]) -> str:
    """Return a formula without its delimiters."""
    return next(group for group in formula.groups() if group is not None).strip().rstrip(".,")


def _append_unit(text: str, value: str, end: int) -> str:
    """Return a value with the known unit or scale that follows it in the text at ``end``."""
    following = re.match(r"(\s*)(\S+(?:\s+\S+){0,2})", text[end : end + 60])
    if not following or not re.search(r"[\d})]\s*$|\\pi\s*$", value):
        return value
    words = following[2].split()
    while words:
        unit = re.sub(r"\^(-?\d)", r"^{\1}", " ".join(words).rstrip(".,;:!?)*_"))
        if is_unit(unit) or unit in ("hundred", "thousand", "million", "billion", "trillion"):
            return f"{value} {unit}"
        words.pop()
    return value


DEFAULT_TAGS = (
    *KNOWN_THINKING_MARKS,
    ThinkingMarks("<thinking>", "</thinking>"),
    ThinkingMarks("<thought>", "</thought>"),
    ThinkingMarks("<reasoning>", "</reasoning>"),
    ThinkingMarks("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""Reasoning tags of published chat templates, and common tags of prompts."""
_BARE_CHANNELS = re.compile(r"\Aanalysis(?:(?=[^\s:]).*assistantfinal|(?=[\w\\$]))", re.DOTALL)
"""Channels of gpt-oss in a text whose special tokens the decoder dropped. The reasoning follows
without a space, whereas prose continues with a space or a comma."""


@dataclass(frozen=True)
class ReasoningTags:
    """The tags with which a model marks its reasoning.

    Args:
        tags: opening and closing tags.
        starts_open: whether the prompt ends inside the reasoning, because the chat template ends
            with an opening tag. The response then has only the closing tag.
    """

    tags: tuple[ThinkingMarks, ...] = DEFAULT_TAGS
    starts_open: bool = False

    def strip_reasoning(self, response: str) -> str | None:
        """Return the text after the last reasoning, or None if the reasoning is unfinished."""
        if match := _BARE_CHANNELS.match(response):
            return response[match.end() :] if match[0].endswith("assistantfinal") else None
        start = max((mark.end() for mark in self._closing.finditer(response)), default=None)
        if start is None and self.starts_open:
            return None
        rest = response[start:]
        return None if self._opening.search(rest) else rest

    def ends_with_open_tag(self, prompt: str) -> bool:
        """Return whether a prompt ends with an opening tag."""
        return prompt.rstrip().endswith(tuple(marks.begin.rstrip() for marks in self.tags))

    @cached_property
    def _opening(self) -> re.Pattern[str]:
        """Pattern of opening tags: where a line or a sentence begins, special tokens anywhere. An
        answer that mentions a tag has it inside a sentence."""
        begins = [marks.begin.rstrip() for marks in self.tags]
        tokens = _alternatives(begin for begin in begins if begin.startswith("<|"))
        return re.compile(rf"(?:\A|[\n.!?])\s*(?:{_alternatives(begins)})|{tokens or '(?!)'}")

    @cached_property
    def _closing(self) -> re.Pattern[str]:
        return re.compile(_alternatives(marks.end for marks in self.tags))


def _alternatives(marks: Iterable[str]) -> str:
    return "|".join(map(re.escape, marks))
