"""Reading mathematical answers: where a response has its answer, and of what it is made.

Text alone: what is left are expressions in LaTeX that a computer algebra system compares
(rlinf/rewards/math.py). Brackets, commas, units and markup are read here, because a parser of
formulas takes them for something else: a comma for thousands, ``m`` for a variable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal

from rlinf.rewards.math_spelling import CLOSE, OPEN, ROW, UnreadError, closing_at, spell

_FINAL = re.compile(r"(?<!#)####(?!#)([^\n]*)")
"""GSM8K marks the final answer of a worked solution so; in Markdown it is a heading."""
LONGEST = 2000
"""Characters; what is longer is no answer."""

LOOKED_THROUGH = 10_000
"""Characters at the end of a response without a mark; some patterns take the square of it."""

Kind = Literal["expression", "words", "list", "set", "union", "ordered", "matrix", "row"]


@dataclass(frozen=True)
class Answer:
    """An expression, words, or several answers."""

    kind: Kind
    text: str
    """LaTeX of an expression, lower-case words, the brackets of ``ordered`` such as ``(]``."""
    items: tuple[Answer, ...] = ()
    name: str = ""
    """Left-hand side of ``x = 5``."""
    unit: str = ""
    """Known units in one spelling; empty for none or one that is not known."""


# ---------------------------------------------------------------------------- where it stands

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_SAID = re.compile(
    r"\b(?:final\s+)?answer(?:\s+is|\s*[:=])\s*(?:\*\*)?\s*(?:equal\s+to\s*)?[:=]?\s*(?:\*\*)?\s*"
    r"(?P<rest>[^\s:=][^\n]*)",
    re.IGNORECASE,
)
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<![\\$])\$(?![\s$])([^$\n]{1,500}?)(?<![\s\\])\$"
    r"(?!\d)",
    re.DOTALL,
)
_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+\b)?"
_NUMBERS = re.compile(
    rf"(?<![\w.,])(?:{_NUMBER}(?:\s*/\s*\d+)?%?)(?:\s+or\s+{_NUMBER}(?:\s*/\s*\d+)?%?)*"
)


def read(text: str) -> Answer:
    """The answer of a response or of a reference.

    The last ``\\boxed{}`` or ``####`` has it, unless that is a heading of Markdown (words with text
    below them); without either, what stands behind "the answer is", there or on the next line, the
    whole of a short text, its last formula or its last number, in that order.

    Raises:
        UnreadError: no answer was found, or it has more than :data:`LONGEST` characters.
    """
    marked = _marked(text)
    if marked is not None:
        return _whole_or_number(marked)
    text = text[-LOOKED_THROUGH:]
    said = list(_SAID.finditer(text))
    if said:
        rest = said[-1]["rest"]
        if not re.search(r"[^\W_]", rest) and (
            formula := _FORMULA.match(text, said[-1].start("rest"))
        ):
            return _parse(_inside(formula))  # one of several lines
        return _whole_or_number(_sentence(rest))
    try:
        return _parse(text)
    except UnreadError:
        pass
    formulas = list(_FORMULA.finditer(text))
    if formulas:
        return _parse(_inside(formulas[-1]))
    numbers = _NUMBERS.findall(text)
    if not numbers:
        raise UnreadError("no answer")
    return _parse(numbers[-1])


def _marked(text: str) -> str | None:
    """What is marked as the answer by the last ``\\boxed{}`` or ``####``; None: nothing is."""
    boxes = list(_BOX.finditer(text))
    final = next((mark for mark in reversed([*_FINAL.finditer(text)]) if _marks(mark)), None)
    if boxes and (final is None or boxes[-1].start() > final.start()):
        start = boxes[-1].end()
        if not text.startswith("{", start):
            found = re.match(r"\S+", text[start:])
            return found[0] if found else ""
        end = closing_at(text, start)
        return text[start + 1 :] if end is None else text[start + 1 : end]
    if final is None:
        return None
    return final[1].strip() or final.string[final.end() :].strip().split("\n", 1)[0]


def _marks(final: re.Match[str]) -> bool:
    """Whether it is no heading: nothing is below its line, or there is a number or formula on it
    and no other words."""
    rest = final[1].strip()
    if not rest or not final.string[final.end() :].strip():
        return True
    try:
        return len(rest) <= LONGEST and _parse(rest).kind != "words"
    except UnreadError:
        return False


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None)


def _sentence(rest: str) -> str:
    """Up to the end of the sentence."""
    return re.split(r"(?<=[^\s.])[.!?](?:\s+[A-Z]|\s*$)", rest, maxsplit=1)[0]


def _whole_or_number(text: str) -> Answer:
    """A marked answer with words around it counts if it has one number or formula."""
    if len(text) > LONGEST:
        raise UnreadError("too long for an answer")
    try:
        return _parse(text)
    except UnreadError:
        formulas = _FORMULA.findall(text)
        if len(formulas) == 1:
            return _parse(next(group for group in formulas[0] if group))
        numbers = set(_NUMBERS.findall(text))
        if len(numbers) == 1 and "\\" not in text:
            return _parse(numbers.pop())
        raise


_UNITS = {
    name: unit
    for unit, names in {
        "percent": "percent percentage pct %",
        "degree": "degree degrees deg",
        "dollar": "dollar dollars bucks usd", "cent": "cent cents", "euro": "euro euros eur",
        "mm": "mm millimeter millimeters millimetre millimetres",
        "cm": "cm centimeter centimeters centimetre centimetres",
        "m": "m meter meters metre metres",
        "km": "km kilometer kilometers kilometre kilometres kms",
        "in": "inch inches", "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mile miles mi",
        "g": "g gram grams gm", "mg": "mg milligram milligrams",
        "kg": "kg kilogram kilograms kgs kilos", "lb": "lb lbs pound pounds",
        "oz": "oz ounce ounces", "t": "ton tons tonne tonnes",
        "s": "s sec secs second seconds", "min": "min mins minute minutes",
        "h": "h hr hrs hour hours", "day": "day days", "week": "week weeks",
        "month": "month months", "year": "year years yr yrs",
        "l": "l L liter liters litre litres", "ml": "ml mL milliliter milliliters",
        "km/h": "km/h kmh kph kmph", "mph": "mph", "am": "am a.m", "pm": "pm p.m",
        "rad": "rad radian radians",
    }.items()
    for name in names.split()
}  # fmt: skip
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "dozen": 12}
_WORD = r"(?<![A-Za-z\\])[A-Za-z][A-Za-z.'-]*(?:\^\{[23]\})?"
_TRAIL = re.compile(
    rf"(?P<gap>\s*)(?P<unit>%|{_WORD}(?:\s*/\s*{_WORD}|\s+{_WORD}|\s+\([a-z]+\))*)$"
)
_LETTERS = re.compile(r"[A-Za-z][A-Za-z'\- ]*")
_SHORT_WORDS = {"yes", "no", "odd", "even", "one", "two", "six", "ten", "all", "any", "true"}
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,]*,?\d)")
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_FUNCTION_NAME = r"[A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z]\))?|\\[a-z]+"


def _parse(text: str) -> Answer:
    """An answer without anything around it."""
    if len(text) > LONGEST:
        raise UnreadError("too long for an answer")
    spelled, unit = spell(text)
    if not spelled:
        raise UnreadError("an empty answer")
    answer = _several(spelled)
    return replace(answer, unit=unit) if unit and answer.kind == "expression" else answer


def _several(text: str) -> Answer:
    """A list with commas, ``and`` or ``or``; else one thing."""
    text = _bare_thousands(text)
    parts = [
        piece.strip()
        for part in re.split(r"(?<![A-Za-z\\]),?\s*(?:and|or)(?![A-Za-z])", text)
        for piece in _split(part, (",", ";"))
    ]
    if _LETTERS.fullmatch(text):
        return _one(text)
    parts = [part for part in parts if part]
    if not parts:
        raise UnreadError("an empty answer")
    if len(parts) == 1:
        return _one(parts[0])
    return Answer("list", "", tuple(item for part in parts for item in _both_signs(part)))


def _bare_thousands(text: str) -> str:
    """Commas of thousands taken out of numbers that stand in no brackets."""
    out, depth, at = [], 0, 0
    for found in re.finditer(r"\\[{}]|[()\[\]]|$", text):
        piece = text[at : found.start()]
        out.append(_THOUSANDS.sub(lambda m: m[0].replace(",", ""), piece) if not depth else piece)
        out.append(found[0])
        depth += {"(": 1, "[": 1, "\\{": 1, "": 0}.get(found[0], -1)
        at = found.end()
    return "".join(out)


def _both_signs(text: str) -> tuple[Answer, ...]:
    if r"\pm" not in text:
        return (_one(text),)
    return tuple(_one(re.sub(r"\\pm\s*", sign, text).lstrip("+")) for sign in "+-")


def _one(text: str) -> Answer:
    text = text.strip()
    if r"\pm" in text:
        return Answer("list", "", _both_signs(text))
    if not re.search(r"[<>]|\\(?:le|ge|ne)\b", text):
        sides = [side.strip() for side in re.split(r"=|\\approx|\\in(?![a-z])", text)]
        if len(sides) > 1 and all(sides):
            named = re.fullmatch(_FUNCTION_NAME, sides[0])
            variable = re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", sides[0])
            if len(sides) == 2 and variable and not named:
                return Answer("expression", text)
            name = sides[0] if named else ""
            return replace(_several(sides[-1]), name=name)
    unions = _split(text, (r"\cup",))
    if len(unions) > 1:
        return Answer("union", "", tuple(_one(part) for part in unions))
    return _matrix(text) or _bracketed(text) or _words(text) or _value(text)


def _matrix(text: str) -> Answer | None:
    found = _MATRIX.fullmatch(text)
    if found is None or r"\begin" in found[2]:
        return None
    lines = [line for line in re.split(rf"{ROW}(?:\[[^\]]*\])?", found[2]) if line.strip()]
    rows = (Answer("row", "", tuple(_one(c) for c in line.split("&"))) for line in lines)
    return Answer("matrix", "|" if found[1] == "vmatrix" else "", tuple(rows))


def _bracketed(text: str) -> Answer | None:
    """A tuple, an interval or a set."""
    if text in (r"\emptyset", r"\varnothing", r"\{\}", r"\{ \}"):
        return Answer("set", "")
    text = text.replace(r"\langle", "(").replace(r"\rangle", ")")
    braces = text.startswith(r"\{") and text.endswith(r"\}")
    if braces:
        inner = text[2:-2]
    elif (
        text[:1] in "([" and text[-1:] in ")]" and closing_at(text, 0, mixed=True) == len(text) - 1
    ):
        inner = text[1:-1]
    elif text[:1] == "{" and closing_at(text, 0) == len(text) - 1:
        inner, braces = text[1:-1], True
    else:
        return None
    parts = _split(inner, (",", ";"))
    if not all(part.strip() for part in parts):
        return None
    if braces:
        if "|" in inner or r"\mid" in inner or ":" in inner:
            return None
        if text[:1] == "{" and len(parts) == 1:
            return _one(inner)
        return Answer("set", "", tuple(item for part in parts for item in _both_signs(part)))
    if len(parts) > 1:
        return Answer("ordered", text[0] + text[-1], tuple(_one(part) for part in parts))
    if re.fullmatch(r"\s*[A-Za-z]\s*", inner):
        return _one(inner)
    return None


def _words(text: str) -> Answer | None:
    if re.fullmatch(r"\(?[A-Z]\)", text):
        text = text.strip("()")
    if not _LETTERS.fullmatch(text):
        return None
    longest = max(map(len, re.split(r"[\s'-]+", text)))
    if len(text) <= 3 and text.lower() not in _SHORT_WORDS and " " not in text:
        return None
    return Answer("words", " ".join(text.lower().split())) if longest > 1 else None


def _value(text: str) -> Answer:
    """An expression, with its unit taken off."""
    unit = ""
    ratio = re.fullmatch(r"(\d+(?:\.\d+)?)\s*:\s*(\d+(?:\.\d+)?)(?P<rest>(?:\s*:\s*\d+)*)", text)
    if ratio:
        parts = text.split(":")
        return Answer("ordered", "::", tuple(Answer("expression", p.strip()) for p in parts))
    found = _TRAIL.search(text)
    if found and found.start() and (head := _without(text[: found.start()], found)):
        text, unit = head
    text = re.sub(r"(\d|\})\s*degrees", r"\1\\cdot\\frac{\\pi}{180}", text)
    if re.search(r"(?<![\\A-Za-z{])[A-Za-z]{4,}", text):
        raise UnreadError("words in a formula")
    if re.search(r"(?<![\\A-Za-z])[A-Za-z]+\s+[A-Za-z]{2,}(?![A-Za-z])", text):
        raise UnreadError("words in a formula")
    if re.fullmatch(r"-?\d{1,3}(?: \d{3})+", text):
        text = text.replace(" ", "")
    # math-verify sees the imaginary unit where it stands apart.
    text = re.sub(r"(?<=\d)i(?![A-Za-z])", " i", text).replace(ROW, r"\\ ")
    return Answer("expression", text, unit=unit)


def _without(head: str, found: re.Match[str]) -> tuple[str, str] | None:
    """The expression before a unit and the unit; None if it is none."""
    words = re.split(r"[\s/]+", re.sub(r"\^\{[23]\}", "", found["unit"]))
    trigonometric = re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])", head)
    if not re.search(r"[\d})]\s*$|\\pi\s*$|\\infty\s*$", head) or trigonometric:
        return None
    if re.search(r"(?<![\\A-Za-z{])[A-Za-z]{2,}", head):
        return None
    scale = 1
    while words and words[0].lower() in _SCALES:
        scale *= _SCALES[words.pop(0).lower()]
    for word in words:
        known = word in _UNITS or (word.lower() in _UNITS and len(word) > 1)
        if not known and (len(word) < 3 or not found["gap"]) and word not in ("of", "in"):
            return None
        if len(word) == 1 and not found["gap"] and word != "%":
            return None
    expression = f"({head.strip()})\\cdot {scale}" if scale > 1 else head.strip()
    if scale > 1 and re.fullmatch(r"-?\d+(?:\.\d+)?", head.strip()):
        expression = f"{Decimal(head.strip()) * scale:f}"
    return expression, _unit(found["unit"], words)


def _unit(spelled: str, words: list[str]) -> str:
    """Known units in one spelling with their powers; empty where one is not known."""
    names = [
        _UNITS.get(w, _UNITS.get(w.lower(), "")) for w in words if w not in ("square", "cubic")
    ]
    per = [n for n in words if n == "per"]
    if per and len(names) == 3:
        names = [names[0], names[2]]
    if not names or not all(names):
        return ""
    power = "^2" if "square" in words or "^{2}" in spelled else ""
    power = "^3" if "cubic" in words or "^{3}" in spelled else power
    return "/".join(names) + power


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """Parts between separators that stand in no brackets."""
    parts, depth, last, at = [], 0, 0, 0
    while at < len(text):
        found = next((s for s in separators if text.startswith(s, at)), None)
        if found and not depth:
            parts.append(text[last:at])
            at = last = at + len(found)
            continue
        if text.startswith((r"\{", r"\begin", r"\langle"), at):
            depth, at = depth + 1, at + 2
            continue
        if text.startswith((r"\}", r"\end", r"\rangle"), at):
            depth, at = depth - 1, at + 2
            continue
        if text[at] in OPEN:
            depth += 1
        elif text[at] in CLOSE:
            depth -= 1
        at += 2 if text[at] == "\\" else 1
    return [*parts, text[last:]]
