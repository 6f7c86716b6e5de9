"""Parse an answer: numbers and formulas, lists, sets, intervals, matrices, relations.

This module works on text only. The remaining LaTeX expressions are compared by a computer algebra
system (rlinf/rewards/math_equivalence.py). Brackets, commas, units and markup are parsed here,
because a formula parser misreads them: a thousands separator, or ``m`` as a variable.
rlinf/rewards/math_extraction.py locates the answer in the response.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from rlinf.rewards.math_extraction import FORMULA, VALUES, marked_answers, unmarked_candidates
from rlinf.rewards.math_normalization import (
    BRACKET_PAIRS,
    CLOSING_BRACKETS,
    ROW_SEPARATOR,
    UnparsableAnswerError,
    find_closing_bracket,
    normalize_latex,
    split_unit,
)

MAX_ANSWER_CHARS = 2000
"""Maximum number of characters; a longer text is not an answer."""

AnswerKind = Literal["expression", "words", "list", "set", "region", "ordered", "matrix", "row"]
"""``region``: inequalities, or a union or intersection of sets; ``ordered``: a tuple, interval,
ratio or time; ``row``: a row of a matrix."""


@dataclass(frozen=True)
class MathAnswer:
    """An expression, words, or several answers."""

    kind: AnswerKind
    text: str
    """By kind: the LaTeX of an expression; lower-case words; the brackets of ``ordered``, such as
    ``(]``, or ``::`` for a ratio or time; the word that joins the parts of a region (``or``,
    ``and`` or a comma) or of a list of words or letters (``or``, ``and`` or empty)."""
    items: tuple[MathAnswer, ...] = ()
    """Members, bounds, rows or relations; for a choice, the text of the option."""
    name: str = ""
    """Left-hand side of ``x = 5``, or ``choice`` for a letter; empty: none."""
    unit: str = ""
    """Known units in normalised spelling; empty if there is no known unit."""
    alternative: MathAnswer | None = None
    """Second parsing of an ambiguous text, such as ``10!`` at the end of a sentence."""
    phrase: str = ""
    """The normalised full text of a reference that is a list of joined words; empty: none."""


def extract_answer(text: str) -> MathAnswer:
    """Return the answer of a response.

    Raises:
        UnparsableAnswerError: there is no answer, or it has more than :data:`MAX_ANSWER_CHARS`
            characters.
    """
    marked = marked_answers(text)
    if marked is not None:
        if len(marked) > 1:
            return parse_answer(", ".join(marked))
        return _parse_marked(marked[0])
    readings: list[MathAnswer] = []
    words: MathAnswer | None = None
    for candidate in unmarked_candidates(text):
        try:
            answer = parse_answer(candidate)
        except UnparsableAnswerError:
            continue
        if answer.kind == "words" or _is_phrase(answer):
            words = words or answer  # "Good luck!" may follow the answer
            continue
        readings.append(answer)
        # An exclamation mark may be a factorial; the next candidate omits it.
        if not candidate.endswith("!"):
            break
    if not readings:
        if words is None:
            raise UnparsableAnswerError("no answer")
        return words
    return replace(readings[0], alternative=readings[1] if len(readings) > 1 else None)


def _is_phrase(answer: MathAnswer) -> bool:
    """Return whether an answer consists of words joined by ``and`` or ``or``, such as "bread and
    butter"."""
    return bool(answer.text) and answer.kind == "list" and answer.items[0].kind == "words"


def _parse_marked(text: str) -> MathAnswer:
    """Parse a marked answer. Words are allowed around a single number or formula."""
    if len(text) > MAX_ANSWER_CHARS:
        raise UnparsableAnswerError("too long for an answer")
    try:
        return parse_answer(text)
    except UnparsableAnswerError:
        plain, _ = normalize_latex(text)
        formulas = FORMULA.findall(text)
        if len(formulas) == 1:
            return parse_answer(next(group for group in formulas[0] if group))
        predicate = re.sub(r"^[A-Za-z][A-Za-z ,']*(?:\b(?:is|are|be|equals)\b|:)\s*", "", plain)
        if predicate != plain:
            return parse_answer(predicate)
        numbers = [match[0].strip() for match in VALUES.finditer(plain)]
        is_formula = _is_unbalanced(plain) or re.search(r"[\\^_=<>+]|\d\s*[-*/]", plain)
        if len(numbers) == 1 and not is_formula and not _NOT_A_VALUE.search(plain):
            return parse_answer(numbers.pop())
        raise


_NOT_A_VALUE = re.compile(  # words beside a single number that is thus not the answer
    r"\b(?:not|no|nor|neither|between|at|less|more|greater|fewer|up|any|to|from|over|under|above|"
    r"below|e\.g|maybe|perhaps|or|and|of|plus|minus|times|if|only|never|un\w+)\b",
    re.IGNORECASE,
)
_LETTERS_ONLY = re.compile(r"[A-Za-z][A-Za-z'\- ]*")
_JOIN = re.compile(r"\s*,\s*(?:(?:and|or)\s+)?|\s+(?:and|or)\s+")
_NO_SOLUTION = re.compile(r"no (?:real )?solutions?|(?:the )?empty set", re.IGNORECASE)
_SHORT_WORDS = {"yes", "no", "odd", "even", "one", "two", "six", "ten", "all", "any", "true"}
"""Short texts that are words, and not products of variables."""
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,]*,?\d)")
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_CHOICE_LETTER = re.compile(r"^(?:\([A-J]\)|[A-J][).:])\s+(?=[\d\\$(-])")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|neq|lt|gt)(?![a-z])")
_SETBUILDER = re.compile(r"\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||\\mid|:)\s*(.+)\\\}")
_UNKNOWNS = re.compile(r"\(?\s*[A-Za-z](?:_\{?\w+\}?)?(?:\s*,\s*[A-Za-z](?:_\{?\w+\}?)?)+\s*\)?")
_FUNCTION_NAME = r"[A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z]\))?|\\[a-z]+"


def parse_answer(text: str) -> MathAnswer:
    """Parse a text that consists of an answer only.

    Raises:
        UnparsableAnswerError: the text is not an answer.
    """
    if len(text) > MAX_ANSWER_CHARS:
        raise UnparsableAnswerError("too long for an answer")
    spelled, unit = normalize_latex(text)
    if not spelled:
        raise UnparsableAnswerError("an empty answer")
    spelled = _CHOICE_LETTER.sub("", spelled)
    answer = _parse_list(spelled)
    return replace(answer, unit=unit) if unit and answer.kind == "expression" else answer


def _parse_list(text: str) -> MathAnswer:
    """Parse a list with commas, ``and`` or ``or``; else a single answer."""
    text = _remove_thousands_separators(text)
    if joined := _parse_joined_words(text):
        return joined
    if _LETTERS_ONLY.fullmatch(text):
        return _parse_item(text)
    if builder := _SETBUILDER.fullmatch(text):
        return _parse_list(builder[1])
    pieces = re.split(r"(?<![A-Za-z\\]),?\s*(and|or|\\lor|\\land|\\vee|\\wedge)(?![A-Za-z])", text)
    joins = {"or" if join in ("or", "\\lor", "\\vee") else "and" for join in pieces[1::2]}
    parts = [
        part.strip()
        for piece in pieces[::2]
        for part in split_top_level(piece, (",", ";"))
        if part.strip()
    ]
    if not parts:
        raise UnparsableAnswerError("an empty answer")
    if len(parts) == 1:
        return _parse_item(parts[0])
    items = tuple(item for part in parts for item in _both_signs(part))
    if any(item.kind == "region" for item in items) or (joins == {"or"} and _has_interval(items)):
        return MathAnswer("region", joins.pop() if len(joins) == 1 else ",", items)
    return MathAnswer("list", "", items)


def _parse_joined_words(text: str) -> MathAnswer | None:
    """Parse a list of single words or letters, ``A and C`` or ``red, blue``; None for any other
    text."""
    parts = _JOIN.split(text)
    if len(parts) == 1 or not all(re.fullmatch(r"[A-Za-z][A-Za-z'-]*", part) for part in parts):
        return None
    joins = set(re.findall(r"\b(?:and|or)\b", text))
    items = [_parse_item(part) for part in parts]
    if any(item.kind == "words" for item in items):
        items = [MathAnswer("words", part.lower()) for part in parts]
    return MathAnswer("list", joins.pop() if len(joins) == 1 else "", tuple(items))


def _has_interval(items: tuple[MathAnswer, ...]) -> bool:
    """Return whether all items are pairs in brackets, and at least one is not a point."""
    are_pairs = all(item.kind == "ordered" and len(item.items) == 2 for item in items)
    return are_pairs and any(
        item.text in ("(]", "[)") or any("infty" in bound.text for bound in item.items)
        for item in items
    )


def _remove_thousands_separators(text: str) -> str:
    """Remove thousands separators from numbers outside brackets."""
    out, depth, start = [], 0, 0
    for bracket in re.finditer(r"\\[{}]|[()\[\]]|$", text):
        piece = text[start : bracket.start()]
        out.append(_THOUSANDS.sub(lambda m: m[0].replace(",", ""), piece) if not depth else piece)
        out.append(bracket[0])
        depth += {"(": 1, "[": 1, "\\{": 1, "": 0}.get(bracket[0], -1)
        start = bracket.end()
    return "".join(out)


def _both_signs(text: str) -> tuple[MathAnswer, ...]:
    if r"\pm" not in text:
        return (_parse_item(text),)
    return tuple(_parse_item(re.sub(r"\\pm\s*", sign, text).lstrip("+")) for sign in "+-")


def _parse_item(text: str) -> MathAnswer:
    text = text.strip()
    if r"\pm" in text:
        bracketed = _parse_bracketed(text)
        return bracketed or MathAnswer("list", "", _both_signs(text))
    for sign, join in ((r"\cup", "or"), (r"\cap", "and")):
        parts = split_top_level(text, (sign,))
        if len(parts) > 1:
            return MathAnswer(
                "region", join, tuple(_parse_item(_strip_membership(part)) for part in parts)
            )
    if _RELATION.search(text) and not text.startswith((r"\begin", "(", "[", r"\{")):
        if not re.match(r"[<>]|\\(?:le|ge|ne)", text):
            return MathAnswer("region", "", (MathAnswer("expression", text),))
        raise UnparsableAnswerError("half of a relation")
    exact, *rounded = (part.strip() for part in split_top_level(text, (r"\approx",)))
    if rounded and exact and not re.fullmatch(_FUNCTION_NAME, exact):
        return replace(_parse_item(exact), alternative=_parse_item(rounded[-1]))
    sides = [side.strip() for side in split_top_level(text, ("=", r"\approx", r"\in"))]
    if len(sides) > 1 and all(sides):
        return _parse_equation(text, sides)
    return _parse_matrix(text) or _parse_bracketed(text) or _parse_words(text) or _parse_value(text)


def _strip_membership(text: str) -> str:
    return split_top_level(text, (r"\in",))[-1]


def _parse_equation(text: str, sides: list[str]) -> MathAnswer:
    """Parse an equation: ``x = 5`` is 5 with a name; an unsolved equation is an expression."""
    named = re.fullmatch(_FUNCTION_NAME, sides[0])
    names = _UNKNOWNS.fullmatch(sides[0]) or ":" in sides[0]
    variables = [re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", side) for side in sides]
    if len(sides) == 2 and "=" in text and not named and not names:
        if not variables[0] and re.fullmatch(_FUNCTION_NAME, sides[1]):
            return replace(_parse_list(sides[0]), name=re.sub(r"\s", "", sides[1]))  # 5 = x
        if any(variables):
            return MathAnswer("expression", text)
    value = _parse_item(sides[-1]) if names else _parse_list(sides[-1])
    return replace(value, name=re.sub(r"\s", "", sides[0]) if named or names else "")


def _parse_matrix(text: str) -> MathAnswer | None:
    match = _MATRIX.fullmatch(text)
    if match is None or r"\begin" in match[2]:
        return None
    lines = [
        line for line in re.split(rf"{ROW_SEPARATOR}(?:\[[^\]]*\])?", match[2]) if line.strip()
    ]
    rows = (MathAnswer("row", "", tuple(_parse_item(c) for c in line.split("&"))) for line in lines)
    return MathAnswer("matrix", "|" if match[1] == "vmatrix" else "", tuple(rows))


def _parse_bracketed(text: str) -> MathAnswer | None:
    """Parse a tuple, an interval or a set."""
    if text in (r"\emptyset", r"\varnothing", r"\{\}", r"\{ \}"):
        return MathAnswer("set", "")
    text = text.replace(r"\langle", "(").replace(r"\rangle", ")")
    has_braces = text.startswith(r"\{") and text.endswith(r"\}")
    if has_braces:
        inner = text[2:-2]
    elif (
        text[:1] in "(["
        and text[-1:] in ")]"
        and find_closing_bracket(text, 0, mixed=True) == len(text) - 1
    ):
        inner = text[1:-1]
    elif text[:1] == "{" and find_closing_bracket(text, 0) == len(text) - 1:
        inner, has_braces = text[1:-1], True
    else:
        return None
    parts = split_top_level(inner, (",", ";"))
    if not all(part.strip() for part in parts):
        return None
    if has_braces:
        if text[:1] == "{" and len(parts) == 1:
            return _parse_item(inner)
        return MathAnswer("set", "", tuple(item for part in parts for item in _both_signs(part)))
    if len(parts) > 1:
        return MathAnswer("ordered", text[0] + text[-1], tuple(_parse_item(part) for part in parts))
    if re.fullmatch(r"\s*[A-Za-z]\s*", inner):
        return _parse_item(inner)
    return None


def _parse_words(text: str) -> MathAnswer | None:
    if re.fullmatch(r"\(?[A-Z]\)", text):
        text = text.strip("()")
    if not _LETTERS_ONLY.fullmatch(text):
        return None
    if _NO_SOLUTION.fullmatch(text):
        return MathAnswer("set", "")
    longest = max(map(len, re.split(r"[\s'-]+", text)))
    if len(text) <= 3 and text.lower() not in _SHORT_WORDS and " " not in text:
        return None
    return MathAnswer("words", " ".join(text.lower().split())) if longest > 1 else None


def _parse_value(text: str) -> MathAnswer:
    """Parse an expression with a unit."""
    if ratio := re.fullmatch(r"(\d+) to (\d+)", text):
        text = f"{ratio[1]}:{ratio[2]}"
    text, unit = split_unit(text)
    parts = [part.strip() for part in split_top_level(text, (":",))]
    if len(parts) > 1 and all(parts):
        return MathAnswer("ordered", "::", tuple(_parse_value(part) for part in parts), unit=unit)
    text = re.sub(r"(\d|\})\s*degrees", r"\1\\cdot\\frac{\\pi}{180}", text)
    if re.search(r"(?<![\\A-Za-z{])(?:[A-Za-z]{4,}|not|the|but)(?![A-Za-z])", text):
        raise UnparsableAnswerError("words in a formula")
    if re.search(r"(?<![\\A-Za-z])[A-Za-z]+\s+[A-Za-z]{2,}(?![A-Za-z])", text):
        raise UnparsableAnswerError("words in a formula")
    if "!!" in text:
        raise UnparsableAnswerError("a double factorial")
    # math-verify takes minutes for some texts that end inside brackets.
    if _is_unbalanced(text):
        raise UnparsableAnswerError("an open bracket")
    if re.fullmatch(r"-?\d{1,3}(?: \d{3})+", text):
        text = text.replace(" ", "")
    if re.search(r"(?<![\w.])\d[\d.]*\s+\d", text):
        raise UnparsableAnswerError("numbers side by side")
    # math-verify recognises the imaginary unit only if a space is before it.
    text = re.sub(r"(?<=\d)i(?![A-Za-z])", " i", text).replace(ROW_SEPARATOR, r"\\ ")
    return MathAnswer("expression", text, unit=unit)


def _is_unbalanced(text: str) -> bool:
    """Return whether the numbers of opening and closing brackets differ."""
    pairs = (("([", ")]"), ("{", "}"))
    return any(
        sum((character in opening) - (character in closing) for character in text)
        for opening, closing in pairs
    )


def split_top_level(text: str, separators: tuple[str, ...]) -> list[str]:
    """Return the parts between separators that are outside brackets."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        separator = next((s for s in separators if _has_separator(text, s, i)), None)
        if separator and not depth:
            parts.append(text[start:i])
            i = start = i + len(separator)
            continue
        if text.startswith((r"\{", r"\begin", r"\langle"), i):
            depth, i = depth + 1, i + 2
            continue
        if text.startswith((r"\}", r"\end", r"\rangle"), i):
            depth, i = depth - 1, i + 2
            continue
        if text[i] in BRACKET_PAIRS:
            depth += 1
        elif text[i] in CLOSING_BRACKETS:
            depth -= 1
        i += 2 if text[i] == "\\" else 1
    return [*parts, text[start:]]


def _has_separator(text: str, separator: str, position: int) -> bool:
    r"""Return whether a separator is at a position; ``\in`` is not the beginning of ``\infty``."""
    if not text.startswith(separator, position):
        return False
    end = position + len(separator)
    return not separator[-1].isalpha() or not text[end : end + 1].isalpha()
