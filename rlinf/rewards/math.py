"""Whether two answers are the same mathematics.

What an answer consists of is read in rlinf/rewards/math_answers.py; math-verify compares the
expressions in it.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlinf.rewards.math_answers import Answer, read
from rlinf.rewards.math_spelling import UnreadError

CLOSE = Fraction(1, 2_000_000)
"""A decimal number stands for a fraction from which it differs by no more."""
_RATIONAL = re.compile(r"([-+]?)\s*(?:(\d+(?:\.\d+)?)(?:\s*/\s*(\d+))?|\\frac\{(-?\d+)\}\{(\d+)\})")


def grade_one(response: str, answer: str) -> bool:
    """Whether a response ends in the reference answer, as mathematics.

    Raises:
        UnreadError: one of them has no answer that can be read.
    """
    return same(read(answer), read(response))


def same(reference: Answer, given: Answer) -> bool:
    """Whether they are equal.

    Sets and lists have no order; tuples and intervals have one, and their brackets count. A unit
    may be missing, but not another one; ``18%`` is 0.18, and 18 where per cent were asked for.

    Raises:
        UnreadError: an expression that math-verify cannot parse.
    """
    if reference.name and given.name and _tight(reference.name) != _tight(given.name):
        return False
    kinds = {reference.kind, given.kind}
    if kinds == {"expression"}:
        return _same_values(reference, given)
    if kinds == {"words"}:
        return reference.text == given.text
    if kinds <= {"list", "set", "expression", "words", "ordered"} and kinds & {"list", "set"}:
        if "ordered" in kinds and kinds != {"ordered", "list"}:
            return _same_members((reference,), given.items) or _same_members(
                reference.items, (given,)
            )
        ordered = "ordered" in kinds
        members = [
            a.items if a.kind in ("list", "set", "ordered") else (a,) for a in (reference, given)
        ]
        return (_same_in_order if ordered else _same_members)(*members)
    if len(kinds) > 1:
        relation = next((a for a in (reference, given) if re.search(_ORDER, a.text)), None)
        return relation is not None and _relation_is_set(reference, given)
    if reference.kind == "union":
        return _same_members(reference.items, given.items)
    return reference.text == given.text and _same_in_order(reference.items, given.items)


_ORDER = r"[<>]|\\le(?![a-z])|\\ge(?![a-z])"


def _same_in_order(left: tuple[Answer, ...], right: tuple[Answer, ...]) -> bool:
    return len(left) == len(right) and all(map(same, left, right))


def _same_members(left: tuple[Answer, ...], right: tuple[Answer, ...]) -> bool:
    """Whether each has its equal on the other side; a repeated one counts once."""
    return all(any(same(a, b) for b in right) for a in left) and all(
        any(same(a, b) for a in left) for b in right
    )


def _same_values(reference: Answer, given: Answer) -> bool:
    units = {reference.unit, given.unit} - {""}
    if len(units) > 1:
        return False
    if "percent" in units and reference.unit != given.unit:
        plain, share = (given, reference) if reference.unit == "percent" else (reference, given)
        hundredth = Answer("expression", rf"\frac{{{share.text}}}{{100}}")
        if _equal(plain.text, hundredth.text):
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
        if left == right:
            return True
        # A decimal number against a fraction: a rounded value of it.
        rounded = ("." in reference) != ("." in given)
        return rounded and abs(left - right) <= min(CLOSE, abs(left) / 1000)
    return _verify(reference, given)


def _verify(reference: str, given: str) -> bool:
    from math_verify import verify

    return bool(verify([_expression(reference)], [_expression(given)], timeout_seconds=None))


def _relation_is_set(reference: Answer, given: Answer) -> bool:
    """``x > 3`` against an interval."""
    return _verify(_latex(reference), _latex(given)) or _verify(_latex(given), _latex(reference))


def _latex(answer: Answer) -> str:
    inner = ", ".join(map(_latex, answer.items))
    if answer.kind == "union":
        return r" \cup ".join(map(_latex, answer.items))
    if answer.kind == "ordered":
        return f"{answer.text[0]}{inner}{answer.text[1]}"
    return answer.text if not answer.items else rf"\{{{inner}\}}"


@lru_cache(maxsize=256)
def _expression(latex: str) -> Any:
    """The expression of computer algebra; references come again and again.

    Raises:
        UnreadError: math-verify cannot parse it.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # Its rules for units take the variable of 2t for a ton.
    config = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none"
    )
    found = parse(
        f"${latex}$",
        [LatexExtractionConfig(normalization_config=config, boxed_match_priority=-1)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    if not found:
        raise UnreadError(f"not a formula: {latex}")
    return found[0]


def _rational(text: str) -> Fraction | None:
    found = _RATIONAL.fullmatch(text.strip())
    if found is None:
        return None
    sign, number, under, over, below = found.groups()
    if number is not None:
        below, over = under or "1", number
    if not int(below):
        return None
    return Fraction(over) / int(below) * (-1 if sign == "-" else 1)


def _tight(text: str) -> str:
    return re.sub(r"(?<=\\[a-z])\s+(?=[A-Za-z])|\s+", "", text)
