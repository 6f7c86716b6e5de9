"""Compare two answers mathematically.

rlinf/rewards/math_parsing.py parses answers; rlinf/rewards/math_text_answers.py parses choices and
words. math-verify parses the expressions in them and compares those with variables. Numbers are
compared here, exactly or to a relative tolerance, because math-verify rounds to six decimal places
and so treats both 1.6e-19 and 1.7e-19 as zero.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlinf.rewards.math_extraction import SEARCHED_CHARS, marked_answers
from rlinf.rewards.math_normalization import UnparsableAnswerError, normalize_latex
from rlinf.rewards.math_parsing import MathAnswer, extract_answer, parse_answer, split_top_level
from rlinf.rewards.math_text_answers import choice_letter, ends_with_words, normalize_words

RELATIVE_TOLERANCE = 1e-12
"""Relative difference below which two irrational numbers are the same."""
ROUNDING_DIGITS = 6
"""A decimal number of so many significant digits may stand for the fraction that it rounds."""
_RATIONAL = re.compile(
    r"([-+]?)\s*(?:(\d+(?:\.\d+)?)(?:\s*/\s*(\d+)|\s*\\(?:times|cdot)\s*10\^\{([-+]?\d{1,3})\})?"
    r"|\\frac\{(-?\d+)\}\{(-?\d+)\})"
)
_CHOICE = re.compile(r"\s*\(?([A-J])\)?[.:]?\s*")
_CHOICE_WITH_TEXT = re.compile(r"\s*(?:\(([A-J])\)|([A-J])[.):])\s+(\S.*)", re.DOTALL)


def grade_response(response: str, answer: str) -> bool:
    """Return whether a response ends in the reference answer, as mathematics.

    The kind of the reference decides what is looked for: the letter of a choice, words, or a
    mathematical answer.

    Raises:
        UnparsableAnswerError: one of them has no answer that can be read.
    """
    reference = parse_reference(answer)
    if reference.name == "choice":
        return _same_choice(reference, response)
    return _is_given(reference, response)


def _is_given(reference: MathAnswer, response: str) -> bool:
    """Whether a response ends in an answer that is no choice."""
    if reference.kind == "words":
        return ends_with_words(response, reference.text)
    if reference.phrase and ends_with_words(response, reference.phrase):
        return True
    given = extract_answer(response)
    return equivalent(reference, given) or bool(
        given.alternative and equivalent(reference, given.alternative)
    )


@lru_cache(maxsize=256)
def parse_reference(text: str) -> MathAnswer:
    """Return what a reference answer is made of; one that is no mathematics is words.

    Raises:
        UnparsableAnswerError: it is empty.
    """
    found = marked_answers(text)
    if found is None and len(text.strip().split("\n")) > 1:
        return extract_answer(text)
    inner = ", ".join(found) if found else text.strip()
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
        _check(answer)
    except UnparsableAnswerError:
        return MathAnswer("words", normalize_words(inner))
    if answer.kind == "words" and not answer.name:
        return replace(answer, text=normalize_words(inner))
    if answer.kind == "list" and answer.text:
        return replace(answer, phrase=normalize_words(inner))
    return answer


def _same_choice(reference: MathAnswer, response: str) -> bool:
    """Whether the letter is the same; without a letter, whether the text of the option is."""
    try:
        return choice_letter(response) == reference.text
    except UnparsableAnswerError:
        if not reference.items:
            raise
        return _is_given(reference.items[0], response)


def _check(answer: MathAnswer) -> None:
    """Parse all expressions of an answer.

    Raises:
        UnparsableAnswerError: math-verify cannot parse one.
    """
    for item in answer.items:
        _check(item)
    if answer.kind == "expression" and _rational(answer.text) is None:
        _expression(answer.text)


def grade_with_math_verify(response: str, answer: str) -> bool:
    """Return what plain math-verify says, without any reading of ours."""
    from math_verify import parse as plain_parse
    from math_verify import verify

    given = plain_parse(response[-SEARCHED_CHARS:], parsing_timeout=None)
    return bool(verify(_plain_reference(answer), given, timeout_seconds=None))


@lru_cache(maxsize=256)
def _plain_reference(answer: str) -> Any:
    from math_verify import parse as plain_parse

    found = marked_answers(answer)
    inner = found[-1] if found else answer
    parsed = plain_parse(f"${inner}$", parsing_timeout=None)
    return parsed or plain_parse(inner, parsing_timeout=None)


# ------------------------------------------------------------------------------- comparison


def equivalent(reference: MathAnswer, given: MathAnswer) -> bool:
    """Return whether two answers are equal.

    Sets and lists have no order; tuples and intervals have one, and their brackets count. A unit
    may be missing, but not another one; ``18%`` is 0.18, and 18 where per cent were asked for.

    Raises:
        UnparsableAnswerError: an expression that math-verify cannot parse.
    """
    kinds = {reference.kind, given.kind}
    if kinds == {"expression"}:
        return _same_expressions(reference, given)
    if kinds == {"words"}:
        return reference.text == given.text
    if _is_region(reference) or _is_region(given):
        return _same_regions(reference, given)
    if _values_of_names(reference) or _values_of_names(given):
        return _same_named(reference, given)
    if reference.name and given.name and reference.name != given.name:
        return False
    if kinds & {"list", "set"}:
        return _same_collections(reference, given)
    if len(kinds) > 1 or _other_units(reference, given):
        return False
    return reference.text == given.text and _same_in_order(reference.items, given.items)


def _same_collections(reference: MathAnswer, given: MathAnswer) -> bool:
    """Whether two lists or sets, or one of them and something else, have the same members."""
    kinds = {reference.kind, given.kind}
    if "ordered" in kinds:
        tuples = [answer for answer in (reference, given) if answer.kind == "ordered"]
        if kinds == {"ordered", "list"} and tuples[0].text == "()":
            return _same_in_order(reference.items, given.items)
        return _same_members((reference,), given.items) or _same_members(reference.items, (given,))
    if {reference.text, given.text} == {"and", "or"}:
        return False
    if kinds <= {"list", "set", "expression", "words"}:
        left, right = (a.items if a.kind in ("list", "set") else (a,) for a in (reference, given))
        return _same_members(left, right)
    return False


def _same_in_order(left: tuple[MathAnswer, ...], right: tuple[MathAnswer, ...]) -> bool:
    return len(left) == len(right) and all(map(equivalent, left, right))


def _same_members(left: tuple[MathAnswer, ...], right: tuple[MathAnswer, ...]) -> bool:
    """Whether each has its equal on the other side; a repeated one counts once."""
    return all(any(equivalent(a, b) for b in right) for a in left) and all(
        any(equivalent(a, b) for a in left) for b in right
    )


# ------------------------------------------------------------------ values of several unknowns


def _values_of_names(answer: MathAnswer) -> dict[str, MathAnswer] | None:
    """Values of different unknowns, ``x=1, y=2`` or ``(x,y)=(1,2)``; None for anything else."""
    if answer.kind == "ordered" and "," in answer.name:
        names = answer.name.strip("()").split(",")
        return (
            dict(zip(names, answer.items, strict=True)) if len(names) == len(answer.items) else None
        )
    names = [item.name for item in answer.items]
    # Two roots are x_1 and x_2 as well, in any order.
    different = {re.sub(r"_\{?\w+\}?$", "", name) for name in names}
    if answer.kind not in ("list", "set") or not all(names) or len(different) < len(names):
        return None
    return {item.name: replace(item, name="") for item in answer.items} if len(names) > 1 else None


def _same_named(reference: MathAnswer, given: MathAnswer) -> bool:
    """Whether each unknown has the same value; without names the order decides."""
    left, right = _values_of_names(reference), _values_of_names(given)
    if left is not None and right is not None:
        return left.keys() == right.keys() and all(
            equivalent(left[name], right[name]) for name in left
        )
    named, other = (left, given) if left is not None else (right, reference)
    assert named is not None
    if other.kind == "list" or (other.kind == "ordered" and other.text == "()"):
        values = (
            named if left is not None and reference.kind != "list" else dict(sorted(named.items()))
        )
        return _same_in_order(tuple(values.values()), other.items)
    return False


# ------------------------------------------------------------------------ intervals and regions


def _is_region(answer: MathAnswer) -> bool:
    """Whether an answer is a set of numbers for certain; ``(1, 2)`` may be a point."""
    if answer.kind == "expression":
        return bool(re.search(r"\\mathbb|\\setminus", answer.text))
    if answer.kind != "ordered" or len(answer.items) != 2 or answer.text == "::":
        return answer.kind == "region"
    return answer.text in ("(]", "[)") or any("infty" in item.text for item in answer.items)


def _same_regions(reference: MathAnswer, given: MathAnswer) -> bool:
    if reference.kind == given.kind == "ordered":
        return reference.text == given.text and _same_in_order(reference.items, given.items)
    left, right = _relation_symbols(reference), _relation_symbols(given)
    if left and right and left != right:
        return False
    try:
        sets = [_as_set(reference), _as_set(given)]
    except UnparsableAnswerError:
        raise
    except (TypeError, ValueError, NotImplementedError, AttributeError):
        return _same_relations(reference, given)
    if None in sets:
        return _same_relations(reference, given)
    return _equal_sets(*sets)


def _same_relations(reference: MathAnswer, given: MathAnswer) -> bool:
    """Inequalities of several variables, or of what has no set of solutions."""
    if reference.kind != given.kind:
        return False
    if len(reference.items) == len(given.items) == 1:
        return _verify(reference.items[0].text, given.items[0].text)
    return reference.text == given.text and _same_members(reference.items, given.items)


def _relation_symbols(answer: MathAnswer) -> frozenset[Any]:
    if answer.kind != "region" or not all(
        item.kind in ("expression", "region") for item in answer.items
    ):
        return frozenset()
    found: frozenset[Any] = frozenset()
    for item in answer.items:
        found |= (
            _relation_symbols(item)
            if item.kind == "region"
            else frozenset(_expression(item.text).free_symbols)
        )
    return found


def _equal_sets(left: Any, right: Any) -> bool:
    if left == right:
        return True
    return bool(left.symmetric_difference(right).is_empty)


def _as_set(answer: MathAnswer) -> Any:
    """The set of real numbers that an answer describes; None: it describes none."""
    import sympy

    if answer.kind == "ordered" and len(answer.items) == 2 and answer.text != "::":
        low, high = (_expression(item.text).doit() for item in answer.items)
        interval = sympy.Interval(low, high, answer.text[0] == "(", answer.text[1] == ")")
        # What ends before it begins is a slip, not the empty set.
        return None if interval is sympy.S.EmptySet else interval
    if answer.kind == "set":
        return sympy.FiniteSet(*(_expression(item.text) for item in answer.items))
    if answer.kind == "expression":
        return _set_of_expression(_expression(answer.text))
    if answer.kind != "region":
        return None
    parts = [_as_set(item) for item in answer.items]
    if None in parts:
        return None
    joined = (sympy.Union if answer.text == "or" else sympy.Intersection)(*parts)
    # "x < 1, x > 2" can only mean either.
    return sympy.Union(*parts) if answer.text == "," and joined.is_empty else joined


def _set_of_expression(expression: Any) -> Any:
    import sympy
    from sympy.logic.boolalg import Boolean

    if isinstance(expression, sympy.Complement):
        universe, without = expression.args
        # The parser's own class of finite sets is not simplified.
        finite = isinstance(without, sympy.FiniteSet)
        return sympy.Complement(universe, sympy.FiniteSet(*without.args) if finite else without)
    if isinstance(expression, sympy.Set):
        return expression
    return expression.as_set() if isinstance(expression, Boolean) else None


# ---------------------------------------------------------------------- expressions and numbers


def _same_expressions(reference: MathAnswer, given: MathAnswer) -> bool:
    left, right = _as_equation(reference), _as_equation(given)
    if left and right and (reference.name != given.name or not reference.name):
        return _same_equations(left, right)
    if left and not reference.name:
        return False
    # "a + b = 10" is 10 where a number is asked for.
    return _same_values(
        reference, replace(given, text=split_top_level(given.text, ("=",))[-1].strip())
    )


def _as_equation(answer: MathAnswer) -> str:
    """The equation that an answer is; empty: it is none. Names in words are no variables."""
    if len(split_top_level(answer.text, ("=",))) > 1:
        return answer.text
    return f"{answer.name}={answer.text}" if _is_variable(answer.name) else ""


def _is_variable(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z](?:_\{?\w+\}?)?|[a-z]\([a-z]\)", name) is not None


def _same_equations(left: str, right: str) -> bool:
    """Whether two equations have the same solutions: one side's difference is a multiple of the
    other's."""
    import sympy

    if _tight(left) == _tight(right):
        return True
    first, second = _expression(left), _expression(right)
    if not (isinstance(first, sympy.Eq) and isinstance(second, sympy.Eq)):
        return False
    differences = [side.lhs - side.rhs for side in (first, second)]
    if differences[0].free_symbols != differences[1].free_symbols:
        return False
    quotient = sympy.simplify(differences[0] / differences[1])
    return bool(quotient.is_number and quotient.is_finite and not quotient.is_zero)


def _other_units(reference: MathAnswer, given: MathAnswer) -> bool:
    return len({reference.unit, given.unit} - {""}) > 1


def _same_values(reference: MathAnswer, given: MathAnswer) -> bool:
    if reference.unit and not given.unit:
        # "450J" is a product unless joules were asked for.
        separated = parse_answer(re.sub(r"(?<=\d)(?=[A-Za-z]+$)", " ", given.text))
        given = separated if separated.unit == reference.unit else given
    units = {reference.unit, given.unit} - {""}
    angles = {"degree^1": r"\cdot\frac{\pi}{180}", "rad^1": ""}
    if units and units <= angles.keys() and reference.unit != given.unit:
        radians = [f"({a.text}){angles.get(a.unit, '')}" for a in (reference, given)]
        if _equal(*radians):
            return True
    if len(units) > 1:
        return False
    if "percent^1" in units and reference.unit != given.unit:
        plain, share = (given, reference) if reference.unit == "percent^1" else (reference, given)
        if _equal(plain.text, rf"\frac{{{share.text}}}{{100}}"):
            return True
        number = _rational(plain.text)
        # 0.5 % is not 0.5, but whoever asks for per cent may leave the sign out.
        if number is not None and abs(number) < 1:
            return False
    return _equal(reference.text, given.text)


def _equal(reference: str, given: str) -> bool:
    if _tight(reference) == _tight(given):
        return True
    bases = [re.fullmatch(r"(\w+)_\{?(\d+)\}?", _tight(text)) for text in (reference, given)]
    if any(base and base[1].isalnum() and base[1][0].isdigit() for base in bases):
        return all(bases) and bases[0].groups() == bases[1].groups()  # type: ignore[union-attr]
    left, right = _rational(reference), _rational(given)
    if left is not None and right is not None:
        # 99999.999 is not 100000: one is a decimal number and the other is none.
        rounded = reference if "." in reference else given
        other = left if rounded is given else right
        return left == right or (("." in reference) != ("." in given) and _rounds(rounded, other))
    first, second = _expression(reference), _expression(given)
    numbers = [_is_number(expression) for expression in (first, second)]
    if all(numbers):
        return _same_numbers(first, second)
    return not any(numbers) and _verify(reference, given)


def _rounds(decimal: str, exact: Fraction) -> bool:
    """Whether a decimal number of enough digits is a fraction, rounded or cut off."""
    found = re.fullmatch(r"[-+]?0*(?:\.0*)?(\d*)\.?(\d*)", decimal.strip())
    if found is None or len(found[1] + found[2]) < ROUNDING_DIGITS or exact.denominator == 1:
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


def _verify(reference: str, given: str) -> bool:
    from math_verify import verify

    return bool(verify([_expression(reference)], [_expression(given)], timeout_seconds=None))


@lru_cache(maxsize=512)
def _expression(latex: str) -> Any:
    """The expression of computer algebra, with exact numbers; references come again and again.

    Raises:
        UnparsableAnswerError: math-verify cannot parse it.
    """
    import sympy
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig
    from math_verify import parse as plain_parse

    # Its rules for units take the variable of 2t for a ton.
    config = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none"
    )
    found = plain_parse(
        f"${latex}$",
        [LatexExtractionConfig(normalization_config=config, boxed_match_priority=-1)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    if not found:
        raise UnparsableAnswerError(f"not a formula: {latex}")
    expression = found[0]
    if not isinstance(expression, sympy.Basic):
        return expression
    exact = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    imaginary = {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
    if len(imaginary) < len(expression.free_symbols):
        imaginary = {}
    return expression.xreplace(exact | imaginary) if exact or imaginary else expression


def _rational(text: str) -> Fraction | None:
    found = _RATIONAL.fullmatch(text.strip())
    if found is None:
        return None
    sign, number, under, power, over, below = found.groups()
    if number is None:
        number, under = over, below
    if under is not None and not int(under):
        return None
    value = Fraction(number) / int(under or 1) * Fraction(10) ** int(power or 0)
    return -value if sign == "-" else value


def _tight(text: str) -> str:
    return re.sub(r"(?<=\\[a-z])\s+(?=[A-Za-z])|\s+", "", text)
