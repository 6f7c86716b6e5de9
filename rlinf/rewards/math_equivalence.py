"""Compare two answers mathematically.

rlinf/rewards/math_parsing.py parses mathematical answers; this module parses choices and words.
math-verify parses expressions, and compares expressions with variables. Numbers are compared here,
exactly or to a relative tolerance, because math-verify rounds to six decimal places and so treats
both 1.6e-19 and 1.7e-19 as zero. Patterns are named after the text that they match.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlinf.rewards.math_extraction import (
    FORMULA,
    SEARCHED_CHARS,
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
from rlinf.rewards.math_parsing import MathAnswer, extract_answer, parse_answer, split_top_level

RELATIVE_TOLERANCE = 1e-12
"""Relative difference below which two irrational numbers are equal."""
ROUNDING_DIGITS = 6
"""Minimum number of significant digits of a decimal number that equals a fraction by rounding."""
_RATIONAL = re.compile(
    r"([-+]?)\s*(?:(\d+(?:\.\d+)?)(?:\s*/\s*(\d+)|\s*\\(?:times|cdot)\s*10\^\{([-+]?\d{1,3})\})?"
    r"|\\frac\{(-?\d+)\}\{(-?\d+)\})"
)
_CHOICE = re.compile(r"\s*\(?([A-J])\)?[.:]?\s*")
_CHOICE_WITH_TEXT = re.compile(r"\s*(?:\(([A-J])\)|([A-J])[.):])\s+(\S.*)", re.DOTALL)


def grade_response(response: str, answer: str) -> bool:
    """Return whether a response ends with an answer that is equivalent to the reference.

    The kind of the reference determines what is extracted: the letter of a choice, words, or a
    mathematical answer.

    Raises:
        UnparsableAnswerError: the response or the reference has no answer that can be parsed.
    """
    reference = parse_reference(answer)
    if reference.name == "choice":
        return _same_choice(reference, response)
    return _matches(reference, response)


def _matches(reference: MathAnswer, response: str) -> bool:
    """Return whether a response ends with an answer equivalent to a reference that is no choice."""
    if reference.kind == "words":
        return ends_with_words(response, reference.text)
    if reference.phrase and ends_with_words(response, reference.phrase):
        return True
    actual = extract_answer(response)
    return equivalent(reference, actual) or bool(
        actual.alternative and equivalent(reference, actual.alternative)
    )


@lru_cache(maxsize=256)
def parse_reference(text: str) -> MathAnswer:
    """Parse a reference answer. Text that is not mathematics becomes words.

    Raises:
        UnparsableAnswerError: the text is empty.
    """
    marked = marked_answers(text)
    if marked is None and len(text.strip().split("\n")) > 1:
        return extract_answer(text)
    inner = ", ".join(marked) if marked else text.strip()
    plain, _ = normalize_latex(inner)
    if not plain:
        raise UnparsableAnswerError("an empty reference")
    if letter := _CHOICE.fullmatch(plain):
        return MathAnswer("words", letter[1], name="choice")
    if (option := _CHOICE_WITH_TEXT.fullmatch(plain)) and not option[3].startswith(("(", "x")):
        return MathAnswer(
            "words", option[1] or option[2], (parse_reference(option[3]),), name="choice"
        )
    try:
        answer = parse_answer(inner)
        _check_parsable(answer)
    except UnparsableAnswerError:
        return MathAnswer("words", normalize_words(inner))
    if answer.kind == "words" and not answer.name:
        return replace(answer, text=normalize_words(inner))
    if answer.kind == "list" and answer.text:
        return replace(answer, phrase=normalize_words(inner))
    return answer


def _same_choice(reference: MathAnswer, response: str) -> bool:
    """Return whether the letters are equal; without a letter, compare the option's text."""
    try:
        return choice_letter(response) == reference.text
    except UnparsableAnswerError:
        if not reference.items:
            raise
        return _matches(reference.items[0], response)


def _check_parsable(answer: MathAnswer) -> None:
    """Parse all expressions of an answer.

    Raises:
        UnparsableAnswerError: math-verify cannot parse an expression.
    """
    for item in answer.items:
        _check_parsable(item)
    if answer.kind == "expression" and _parse_rational(answer.text) is None:
        _parse_expression(answer.text)


def grade_with_math_verify(response: str, answer: str) -> bool:
    """Return the grade of plain math-verify, without any of our parsing."""
    from math_verify import parse as plain_parse
    from math_verify import verify

    actual = plain_parse(response[-SEARCHED_CHARS:], parsing_timeout=None)
    return bool(verify(_parse_plain_reference(answer), actual, timeout_seconds=None))


@lru_cache(maxsize=256)
def _parse_plain_reference(answer: str) -> Any:
    from math_verify import parse as plain_parse

    marked = marked_answers(answer)
    inner = marked[-1] if marked else answer
    parsed = plain_parse(f"${inner}$", parsing_timeout=None)
    return parsed or plain_parse(inner, parsing_timeout=None)


# ------------------------------------------------------------------------------- comparison


def equivalent(reference: MathAnswer, actual: MathAnswer) -> bool:
    """Return whether two answers are equivalent.

    Sets and lists are unordered. Tuples and intervals are ordered and need equal brackets. A unit
    may be missing, but must not differ. ``18%`` is 0.18, or 18 if the reference is in per cent.

    Raises:
        UnparsableAnswerError: math-verify cannot parse an expression.
    """
    kinds = {reference.kind, actual.kind}
    if kinds == {"expression"}:
        return _same_expressions(reference, actual)
    if kinds == {"words"}:
        return reference.text == actual.text
    if _is_region(reference) or _is_region(actual):
        return _same_regions(reference, actual)
    if _values_by_unknown(reference) or _values_by_unknown(actual):
        return _same_named(reference, actual)
    if reference.name and actual.name and reference.name != actual.name:
        return False
    if kinds & {"list", "set"}:
        return _same_collections(reference, actual)
    if len(kinds) > 1 or _have_different_units(reference, actual):
        return False
    return reference.text == actual.text and _same_in_order(reference.items, actual.items)


def _same_collections(reference: MathAnswer, actual: MathAnswer) -> bool:
    """Return whether two answers have the same members; at least one of them is a list or a set."""
    kinds = {reference.kind, actual.kind}
    if "ordered" in kinds:
        tuples = [answer for answer in (reference, actual) if answer.kind == "ordered"]
        if kinds == {"ordered", "list"} and tuples[0].text == "()":
            return _same_in_order(reference.items, actual.items)
        return _same_members((reference,), actual.items) or _same_members(
            reference.items, (actual,)
        )
    if {reference.text, actual.text} == {"and", "or"}:
        return False
    if kinds <= {"list", "set", "expression", "words"}:
        left, right = (a.items if a.kind in ("list", "set") else (a,) for a in (reference, actual))
        return _same_members(left, right)
    return False


def _same_in_order(left: tuple[MathAnswer, ...], right: tuple[MathAnswer, ...]) -> bool:
    return len(left) == len(right) and all(map(equivalent, left, right))


def _same_members(left: tuple[MathAnswer, ...], right: tuple[MathAnswer, ...]) -> bool:
    """Return whether each member has an equal one on the other side; duplicates are ignored."""
    return all(any(equivalent(a, b) for b in right) for a in left) and all(
        any(equivalent(a, b) for a in left) for b in right
    )


# ------------------------------------------------------------------ values of several unknowns


def _values_by_unknown(answer: MathAnswer) -> dict[str, MathAnswer] | None:
    """Return the values of different unknowns, ``x=1, y=2`` or ``(x,y)=(1,2)``; None for any other
    answer."""
    if answer.kind == "ordered" and "," in answer.name:
        names = answer.name.strip("()").split(",")
        return (
            dict(zip(names, answer.items, strict=True)) if len(names) == len(answer.items) else None
        )
    names = [item.name for item in answer.items]
    # x_1 and x_2 are two roots of one unknown, in any order.
    unknowns = {re.sub(r"_\{?\w+\}?$", "", name) for name in names}
    if answer.kind not in ("list", "set") or not all(names) or len(unknowns) < len(names):
        return None
    return {item.name: replace(item, name="") for item in answer.items} if len(names) > 1 else None


def _same_named(reference: MathAnswer, actual: MathAnswer) -> bool:
    """Return whether each unknown has the same value. Values without names must be in the order of
    the reference's tuple of unknowns, or else in alphabetical order of the unknowns."""
    left, right = _values_by_unknown(reference), _values_by_unknown(actual)
    if left is not None and right is not None:
        return left.keys() == right.keys() and all(
            equivalent(left[name], right[name]) for name in left
        )
    named, other = (left, actual) if left is not None else (right, reference)
    assert named is not None
    if other.kind == "list" or (other.kind == "ordered" and other.text == "()"):
        values = (
            named if left is not None and reference.kind != "list" else dict(sorted(named.items()))
        )
        return _same_in_order(tuple(values.values()), other.items)
    return False


# ------------------------------------------------------------------------ intervals and regions


def _is_region(answer: MathAnswer) -> bool:
    """Return whether an answer is certainly a set of numbers; ``(1, 2)`` may be a point."""
    if answer.kind == "expression":
        return bool(re.search(r"\\mathbb|\\setminus", answer.text))
    if answer.kind != "ordered" or len(answer.items) != 2 or answer.text == "::":
        return answer.kind == "region"
    return answer.text in ("(]", "[)") or any("infty" in item.text for item in answer.items)


def _same_regions(reference: MathAnswer, actual: MathAnswer) -> bool:
    if reference.kind == actual.kind == "ordered":
        return reference.text == actual.text and _same_in_order(reference.items, actual.items)
    left, right = _region_unknowns(reference), _region_unknowns(actual)
    if left and right and left != right:
        return False
    try:
        sets = [_as_set(reference), _as_set(actual)]
    except UnparsableAnswerError:
        raise
    except (TypeError, ValueError, NotImplementedError, AttributeError):
        return _same_relations(reference, actual)
    if None in sets:
        return _same_relations(reference, actual)
    return _equal_sets(*sets)


def _same_relations(reference: MathAnswer, actual: MathAnswer) -> bool:
    """Compare inequalities that have several variables, or whose solution set is unknown."""
    if reference.kind != actual.kind:
        return False
    if len(reference.items) == len(actual.items) == 1:
        return _verify(reference.items[0].text, actual.items[0].text)
    return reference.text == actual.text and _same_members(reference.items, actual.items)


def _region_unknowns(answer: MathAnswer) -> frozenset[Any]:
    """Return the unknowns of a region; empty for any other answer."""
    if answer.kind != "region" or not all(
        item.kind in ("expression", "region") for item in answer.items
    ):
        return frozenset()
    symbols: frozenset[Any] = frozenset()
    for item in answer.items:
        symbols |= (
            _region_unknowns(item)
            if item.kind == "region"
            else frozenset(_parse_expression(item.text).free_symbols)
        )
    return symbols


def _equal_sets(left: Any, right: Any) -> bool:
    if left == right:
        return True
    return bool(left.symmetric_difference(right).is_empty)


def _as_set(answer: MathAnswer) -> Any:
    """Return the set of real numbers that an answer describes; None if it describes none."""
    import sympy

    if answer.kind == "ordered" and len(answer.items) == 2 and answer.text != "::":
        low, high = (_parse_expression(item.text).doit() for item in answer.items)
        interval = sympy.Interval(low, high, answer.text[0] == "(", answer.text[1] == ")")
        # Reversed bounds are a mistake, not the empty set.
        return None if interval is sympy.S.EmptySet else interval
    if answer.kind == "set":
        return sympy.FiniteSet(*(_parse_expression(item.text) for item in answer.items))
    if answer.kind == "expression":
        return _set_of_expression(_parse_expression(answer.text))
    if answer.kind != "region":
        return None
    sets = [_as_set(item) for item in answer.items]
    if None in sets:
        return None
    combined = (sympy.Union if answer.text == "or" else sympy.Intersection)(*sets)
    # "x < 1, x > 2" can only be a union.
    return sympy.Union(*sets) if answer.text == "," and combined.is_empty else combined


def _set_of_expression(expression: Any) -> Any:
    import sympy
    from sympy.logic.boolalg import Boolean

    if isinstance(expression, sympy.Complement):
        universe, excluded = expression.args
        # sympy does not simplify the parser's own class of finite sets.
        if isinstance(excluded, sympy.FiniteSet):
            excluded = sympy.FiniteSet(*excluded.args)
        return sympy.Complement(universe, excluded)
    if isinstance(expression, sympy.Set):
        return expression
    return expression.as_set() if isinstance(expression, Boolean) else None


# ---------------------------------------------------------------------- expressions and numbers


def _same_expressions(reference: MathAnswer, actual: MathAnswer) -> bool:
    left, right = _as_equation(reference), _as_equation(actual)
    if left and right and (reference.name != actual.name or not reference.name):
        return _same_equations(left, right)
    if left and not reference.name:
        return False
    # "a + b = 10" is taken as 10 if the reference is a number.
    return _same_values(
        reference, replace(actual, text=split_top_level(actual.text, ("=",))[-1].strip())
    )


def _as_equation(answer: MathAnswer) -> str:
    """Return the equation of an answer; empty if it is not one. Words are not variables."""
    if len(split_top_level(answer.text, ("=",))) > 1:
        return answer.text
    return f"{answer.name}={answer.text}" if _is_variable(answer.name) else ""


def _is_variable(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z](?:_\{?\w+\}?)?|[a-z]\([a-z]\)", name) is not None


def _same_equations(left: str, right: str) -> bool:
    """Return whether two equations are equivalent: the left minus the right side of one is a
    constant multiple of the left minus the right side of the other."""
    import sympy

    if _unspaced(left) == _unspaced(right):
        return True
    first, second = _parse_expression(left), _parse_expression(right)
    if not (isinstance(first, sympy.Eq) and isinstance(second, sympy.Eq)):
        return False
    differences = [equation.lhs - equation.rhs for equation in (first, second)]
    if differences[0].free_symbols != differences[1].free_symbols:
        return False
    quotient = sympy.simplify(differences[0] / differences[1])
    return bool(quotient.is_number and quotient.is_finite and not quotient.is_zero)


def _have_different_units(reference: MathAnswer, actual: MathAnswer) -> bool:
    return len({reference.unit, actual.unit} - {""}) > 1


def _same_values(reference: MathAnswer, actual: MathAnswer) -> bool:
    """Return whether two values are equal; degrees and radians, and per cent, are converted."""
    if reference.unit and not actual.unit:
        # "450J" is a product unless the reference is in joules.
        spaced = parse_answer(re.sub(r"(?<=\d)(?=[A-Za-z]+$)", " ", actual.text))
        actual = spaced if spaced.unit == reference.unit else actual
    units = {reference.unit, actual.unit} - {""}
    angles = {"degree^1": r"\cdot\frac{\pi}{180}", "rad^1": ""}
    if units and units <= angles.keys() and reference.unit != actual.unit:
        radians = [f"({a.text}){angles.get(a.unit, '')}" for a in (reference, actual)]
        if _same_formulas(*radians):
            return True
    if len(units) > 1:
        return False
    if "percent^1" in units and reference.unit != actual.unit:
        is_percent = reference.unit == "percent^1"
        plain, percent = (actual, reference) if is_percent else (reference, actual)
        if _same_formulas(plain.text, rf"\frac{{{percent.text}}}{{100}}"):
            return True
        number = _parse_rational(plain.text)
        # 0.5 % is not 0.5, but "%" may be missing if the reference is in per cent.
        if number is not None and abs(number) < 1:
            return False
    return _same_formulas(reference.text, actual.text)


def _same_formulas(reference: str, actual: str) -> bool:
    if _unspaced(reference) == _unspaced(actual):
        return True
    # Numbers with a base, such as 1010_2.
    in_base = [re.fullmatch(r"(\w+)_\{?(\d+)\}?", _unspaced(text)) for text in (reference, actual)]
    if any(match and match[1].isalnum() and match[1][0].isdigit() for match in in_base):
        return all(in_base) and in_base[0].groups() == in_base[1].groups()  # type: ignore[union-attr]
    left, right = _parse_rational(reference), _parse_rational(actual)
    if left is not None and right is not None:
        # 99999.999 is not 100000: only one of the two may be a decimal number.
        decimal = reference if "." in reference else actual
        exact = left if decimal is actual else right
        return left == right or (("." in reference) != ("." in actual) and _rounds(decimal, exact))
    first, second = _parse_expression(reference), _parse_expression(actual)
    numbers = [_is_number(expression) for expression in (first, second)]
    if all(numbers):
        return _same_numbers(first, second)
    return not any(numbers) and _verify(reference, actual)


def _rounds(decimal: str, exact: Fraction) -> bool:
    """Return whether a decimal number with enough digits is the rounded or truncated fraction."""
    match = re.fullmatch(r"[-+]?0*(?:\.0*)?(\d*)\.?(\d*)", decimal.strip())
    if match is None or len(match[1] + match[2]) < ROUNDING_DIGITS or exact.denominator == 1:
        return False
    places = len(decimal.strip().partition(".")[2])
    shifted, digits = abs(exact) * 10**places, abs(Fraction(decimal.strip())) * 10**places
    return (Fraction(decimal.strip()) < 0) == (exact < 0) and digits in (
        round(shifted),
        int(shifted),
    )


def _is_number(expression: Any) -> bool:
    import sympy

    return isinstance(expression, sympy.Expr) and not expression.free_symbols


def _same_numbers(left: Any, right: Any) -> bool:
    import sympy

    left, right = left.doit(), right.doit()
    if left == right:
        return True
    if left.is_Rational and right.is_Rational:
        return False
    difference, size = sympy.N(left - right, 30), sympy.N(left, 30)
    if not (difference.is_finite and size.is_finite):
        return False
    return bool(abs(difference) <= RELATIVE_TOLERANCE * abs(size))


def _verify(reference: str, actual: str) -> bool:
    from math_verify import verify

    return bool(
        verify([_parse_expression(reference)], [_parse_expression(actual)], timeout_seconds=None)
    )


@lru_cache(maxsize=512)
def _parse_expression(latex: str) -> Any:
    """Return the sympy expression, with exact numbers. References repeat, so results are cached.

    Raises:
        UnparsableAnswerError: math-verify cannot parse the text.
    """
    import sympy
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig
    from math_verify import parse as plain_parse

    # The unit rules of math-verify misread the variable of 2t as a ton.
    config = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none"
    )
    parsed = plain_parse(
        f"${latex}$",
        [LatexExtractionConfig(normalization_config=config, boxed_match_priority=-1)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    if not parsed:
        raise UnparsableAnswerError(f"not a formula: {latex}")
    expression = parsed[0]
    if not isinstance(expression, sympy.Basic):
        return expression
    exact = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    imaginary = {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
    if len(imaginary) < len(expression.free_symbols):  # then i is a variable too
        imaginary = {}
    return expression.xreplace(exact | imaginary) if exact or imaginary else expression


def _parse_rational(text: str) -> Fraction | None:
    """Return the value of a decimal number or a fraction; None for any other text."""
    match = _RATIONAL.fullmatch(text.strip())
    if match is None:
        return None
    sign, number, divisor, power, numerator, denominator = match.groups()
    if number is None:
        number, divisor = numerator, denominator
    if divisor is not None and not int(divisor):
        return None
    value = Fraction(number) / int(divisor or 1) * Fraction(10) ** int(power or 0)
    return -value if sign == "-" else value


def canonical_text(answer: MathAnswer) -> str:
    """Return a text that is the same for answers that differ only in how they are written.

    Equal numbers have one text (``1/2``, ``0.5`` and ``50/100``), also with and without a unit and
    ``x =``. Members of sets and lists are sorted. Formulas are compared as text without spaces, so
    ``x+1`` and ``1+x`` differ.
    """
    return _canonical_part(replace(answer, name=""))


def _canonical_part(answer: MathAnswer) -> str:
    """Return the canonical text of a part of an answer, such as ``x = 2`` of a list."""
    name = f"{answer.name}=" if answer.name else ""
    if answer.items:
        parts = [_canonical_part(item) for item in answer.items]
        if answer.kind in ("list", "set"):
            return name + "{" + ", ".join(sorted(parts)) + "}"
        return f"{name}{answer.kind} {answer.text} [{', '.join(parts)}]"
    value = _parse_rational(answer.text)
    if value is not None:
        return f"{name}{value}"
    # Spaces separate words, but mean nothing in a formula.
    return name + (answer.text if answer.kind == "words" else _unspaced(answer.text))


def _unspaced(text: str) -> str:
    return re.sub(r"(?<=\\[a-z])\s+(?=[A-Za-z])|\s+", "", text)


# ruff: noqa: RUF001


_MARKUP_SYMBOLS = re.compile(
    r"\\(?:text|math)(?:bf|rm|it|sf|tt|normal|up)?\s*\{|\*\*|__|[$`{}\x22]|\\[()\[\]]|\\(?=[\s,;])|"
    r"\\q?quad|\\[,;:!]"
)
_FILLER_WORDS = re.compile(
    r"[\s:>]*(?:(?:so|thus|hence|therefore|is|the|(?-i:an?)|(?:final\s+|correct\s+)?answer|option|"
    r"choice|correct|best)\b[\s:,]*)*",
    re.IGNORECASE,
)
_CHOICE_LETTER = re.compile(
    r"\((?P<bracketed>[A-Ja-j])\)|(?P<capital>[A-J])(?=\s*(?:[.,:;)]|$|[-–—]\s)|"
    r"\s+(?:is(?!\s+(?:not|wrong|incorrect|false)\b)|because|since|as|and|or)\b)|(?P<small>[a-j])(?=\)|[.]?\s*$)"
)
_FURTHER_CHOICE = re.compile(r"\s*[.)]?\s*(?:,|/|&|or|and)\s*\(?(?:[A-J]\)?(?![A-Za-z'])|not\b)")
_CHOICE_PHRASES = (
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
_MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
_NEGATED = re.compile(r"(?:\bnot|n't|\bneither|\brule\s+out)\b[^.,;\n]{0,20}$", re.IGNORECASE)


def choice_letter(response: str) -> str:
    """Return the letter of the choice that a response states as its answer, in upper case.

    Raises:
        UnparsableAnswerError: the response names no choice, or more than one.
    """
    marked = marked_answers(response)
    if marked is not None:
        return _single_letter(marked[-1]) if len(marked) == 1 else _raise_no_choice()
    text = _remove_markup(searchable_text(response))
    statement = announced_answer(text)
    if statement and re.match(r"\s*(?:correct|right|true)\b", statement):
        statement = None  # "Answer choice C is correct."
    statement_start = text.rfind(statement) if statement else -1
    choices = [
        (match.start("letter"), match["letter"].upper())
        for pattern in _CHOICE_PHRASES
        for match in pattern.finditer(text)
        if not _NEGATED.search(text[: match.start("letter")])
        and not re.search(r"(?:\band|\bor|[,&/])\s*\(?$", text[: match.start("letter")])
    ]
    if statement and statement_start >= max((start for start, _ in choices), default=-1):
        return _single_letter(statement)
    if choices:
        return max(choices)[1]
    lines = [line for line in text.split("\n") if line.strip()] or [""]
    try:
        return _single_letter(lines[-1])
    except UnparsableAnswerError:
        return _single_letter(lines[0])


def _raise_no_choice() -> str:
    raise UnparsableAnswerError("no single choice")


def _remove_markup(text: str) -> str:
    return _MARKUP_SYMBOLS.sub(" ", normalize_characters(text))


def _single_letter(text: str) -> str:
    """Return the letter with which a text begins; raise UnparsableAnswerError if there is none, or
    several."""
    bare = _remove_markup(text).strip()
    lead = _FILLER_WORDS.match(bare)
    assert lead is not None
    # "A" is also an article, so the lead may have consumed the letter itself.
    head = _CHOICE_LETTER.match(bare) or _CHOICE_LETTER.match(bare, lead.end())
    if head is None or _FURTHER_CHOICE.match(bare, head.end()):
        return _raise_no_choice()
    return str(head["bracketed"] or head["capital"] or head["small"]).upper()


def ends_with_words(response: str, words: str) -> bool:
    """Return whether a response ends with the words of the reference, see :func:`normalize_words`.

    Raises:
        UnparsableAnswerError: the response has no answer.
    """
    marked = marked_answers(response)
    if marked is not None:
        return len(marked) == 1 and _begins_with(_normalize_marked(marked[0]), words)
    text = searchable_text(response)
    statement = announced_answer(text)
    if statement is not None:
        return any(_begins_with(reading, words) for reading in _openings(statement))
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise UnparsableAnswerError("no answer")
    return any(reading == words for reading in _endings(lines[-1])) or _opens_bold(text, words)


def _normalize_marked(text: str) -> str:
    return re.sub(r"^(?:the )?(?:final )?answer(?: is|:)\s*", "", normalize_words(text))


def _openings(statement: str) -> Iterator[str]:
    """Yield the first sentence and the first line of a statement, in normalised words."""
    line = statement.strip().split("\n", 1)[0]
    yield normalize_words(
        re.split(r"(?<=[^\s.][^\s.])[.!?](?:\s|$)", _remove_markup(line), maxsplit=1)[0]
    )
    yield normalize_words(_remove_markup(line))


def _begins_with(text: str, words: str) -> bool:
    """Return whether a sentence begins with the words and has at most an aside after them."""
    rest = text.removeprefix(words)
    return (
        text.startswith(words)
        and bool(re.fullmatch(r"(?:\s*[,;:(].*|\s+(?:because|since|as|for)\b.*)?", rest))
        and not re.match(r"\s*,?\s*(?:or|and|but)\b", rest)
    )


def _endings(line: str) -> Iterator[str]:
    """Yield the last bold text, or else the last formula, or else the line and its predicate."""
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
    """Return words in lower case, without the markup, article and punctuation around them."""
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
