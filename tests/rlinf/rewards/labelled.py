"""Answers whose labels are right by construction: no grader has a part in them.

MATH-style pairs are made from expressions of sympy: the equal ones are the same value written in
another way, the unequal ones are another value, told apart by exact arithmetic or, where there are
variables, by numbers put in for them. GSM8K-style answers are a whole number in many surface
forms, right with the number of the reference and wrong with another.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import sympy
from sympy import Expr, Rational, latex

X, Y = sympy.symbols("x y", real=True)


@dataclass(frozen=True)
class Labelled:
    """A reference, a response, and whether that is right."""

    answer: str
    response: str
    right: bool


def agreement(labelled: list[Labelled], scores: list[float]) -> float:
    """Share of grades that are as labelled."""
    return sum((s == 1) == item.right for item, s in zip(labelled, scores, strict=True)) / len(
        scores
    )


# ------------------------------------------------------------------------------------ MATH


def math_pairs(count: int = 500, seed: int = 0) -> list[Labelled]:
    """Pairs of LaTeX, half of them equal; kinds of value and ways of writing in turns."""
    made: list[Labelled] = []
    draw = random.Random(seed)
    while len(made) < count:
        kind = KINDS[len(made) // 2 % len(KINDS)]
        reference, equal, unequal = kind(draw)
        for text, right in ((equal, True), (unequal, False)):
            made.append(Labelled(reference, draw.choice(FRAMES).format(text), right))
    return made[:count]


FRAMES = (
    "{}",
    "${}$",
    "So we have \\[\\boxed{{{}}}\\]",
    "First \\boxed{{7}}, corrected: the value is $\\boxed{{{}}}$.",
    "The final answer is ${}$.",
    "$x$ was $4$ before.\n\n#### {}",
)

Kind = Callable[[random.Random], tuple[str, str, str]]


def _whole(draw: random.Random, low: int = 2, high: int = 30) -> int:
    return draw.randint(low, high)


def _fraction(draw: random.Random) -> Rational:
    value = Rational(1)
    while value.q == 1:
        value = Rational(draw.choice((-1, 1)) * _whole(draw, 1, 40), _whole(draw, 2, 24))
    return value


def _spelled(draw: random.Random, text: str) -> str:
    """The same LaTeX with other spaces, sizes and fractions."""
    changes: list[Callable[[str], str]] = [
        lambda t: t,
        lambda t: t.replace(r"\frac", r"\dfrac"),
        lambda t: t.replace(r"\frac", r"\tfrac"),
        lambda t: t.replace(" ", r"\, "),
        lambda t: f"\\displaystyle {t}",
        lambda t: t.replace(r"\left", "").replace(r"\right", ""),
    ]
    return draw.choice(changes)(text)


def _ratio(draw: random.Random) -> tuple[str, str, str]:
    value = _fraction(draw)
    other = value + draw.choice((1, -1, Rational(1, 7), -2 * value))
    k = _whole(draw, 2, 5)
    forms = [latex(value), f"{value.p}/{value.q}"]
    forms.append(rf"\frac{{{value.p * k}}}{{{value.q * k}}}")
    sign = "-" if value < 0 else ""
    p, q = abs(value.p), value.q
    forms.append(rf"{sign}\frac{{{p}}}{{{q}}}")
    if p < 10 and q < 10:
        forms.append(rf"{sign}\frac{p}{q}")
    if set(sympy.factorint(q)) <= {2, 5}:
        forms.append(f"{sign}{_decimal(p, q)}")
    if p > q:
        forms.append(rf"{sign}{p // q}\frac{{{p % q}}}{{{q}}}")
    return latex(value), _spelled(draw, draw.choice(forms)), latex(other)


def _decimal(p: int, q: int) -> str:
    digits = next(n for n in range(1, 12) if p * 10**n % q == 0)
    whole = p * 10**digits // q
    return f"{whole // 10**digits}.{whole % 10**digits:0{digits}d}"


def _root(draw: random.Random) -> tuple[str, str, str]:
    square_free = draw.choice((2, 3, 5, 6, 7, 10, 11, 13, 51))
    a, b, c = _whole(draw, 2, 9), _whole(draw, 2, 9), draw.randint(-9, 9)
    value = c + Rational(a, b) * sympy.sqrt(square_free)
    inner = rf"\sqrt{{{a * a * square_free}}}"
    forms = [
        latex(value),
        rf"{c}+\frac{{{inner}}}{{{b}}}",
        rf"\frac{{{c * b}+{inner}}}{{{b}}}",
        # Not rationalised: a sqrt(n) / b = a n / (b sqrt(n)).
        rf"{c}+\frac{{{a * square_free}}}{{{b}\sqrt{{{square_free}}}}}",
        rf"\frac{{{a}\sqrt{{{square_free}}}}}{{{b}}}+{c}",
    ]
    others = [value + 1, c - Rational(a, b) * sympy.sqrt(square_free), value * 2 + 1]
    others.append(c + Rational(a, b) * square_free)
    return latex(value), _spelled(draw, draw.choice(forms)), latex(draw.choice(others))


def _circle(draw: random.Random) -> tuple[str, str, str]:
    value = _fraction(draw) if draw.random() < 0.7 else Rational(_whole(draw))
    forms = [
        latex(value * sympy.pi),
        rf"{value.p}\pi/{value.q}" if value.q > 1 else rf"\pi\cdot {value.p}",
        rf"\frac{{{value.p}}}{{{value.q}}}\pi",
        rf"\frac{{{value.p}\pi}}{{{value.q}}}",
        f"{value.p}*pi/{value.q}",
    ]
    others = [latex(value), latex((value + 1) * sympy.pi), latex(value * sympy.pi**2)]
    return latex(value * sympy.pi), _spelled(draw, draw.choice(forms)), draw.choice(others)


def _different(left: Expr, right: Expr) -> bool:
    """Whether two polynomials or quotients differ at some point; exact."""
    points = ((Rational(17, 5), Rational(23, 7)), (Rational(-31, 11), Rational(41, 13)))
    return any(left.subs({X: x, Y: y}) != right.subs({X: x, Y: y}) for x, y in points)


def _polynomial(draw: random.Random) -> tuple[str, str, str]:
    roots = [draw.randint(-9, 9) for _ in range(draw.choice((2, 2, 3)))]
    lead = draw.choice((1, 1, 2, 3))
    product = lead * sympy.prod([X - root for root in roots])
    value = sympy.expand(product)
    terms = [latex(term) for term in value.as_ordered_terms()]
    draw.shuffle(terms)
    # Every "+ -" is a way of writing too, but no common one.
    reordered = "+".join(terms).replace("+-", "-")
    python = str(value)
    forms = [latex(value), latex(product), reordered, python, latex(sympy.factor(value))]
    other = value + draw.choice((1, X, -X, 2))
    assert _different(value, other)
    pair = (value, product) if draw.random() < 0.5 else (product, value)
    return latex(pair[0]), _spelled(draw, draw.choice(forms)), latex(other)


def _quotient(draw: random.Random) -> tuple[str, str, str]:
    a, b = draw.sample(range(-9, 10), 2)
    c = _whole(draw, 2, 7)
    over, under = X + a, X + b
    value = over / under
    forms = [
        latex(value),
        rf"\frac{{{latex(sympy.expand(c * over))}}}{{{latex(sympy.expand(c * under))}}}",
        latex(1 + (a - b) / under),
        rf"\frac{{{latex(sympy.expand(over * (X + c)))}}}{{{latex(under * (X + c))}}}",
    ]
    others = [under / over, (over + 1) / under, value + 1]
    other = draw.choice([o for o in others if _different(value, o)])
    return latex(value), _spelled(draw, draw.choice(forms)), latex(other)


def _complex(draw: random.Random) -> tuple[str, str, str]:
    a, b = _whole(draw, 1, 9), _whole(draw, 2, 9)
    forms = [f"{a} + {b}i", f"{b}i + {a}", f"{a}+{b}\\cdot i", rf"{a} + {b}\mathrm{{i}}"]
    return f"{a} + {b}i", draw.choice(forms), draw.choice([f"{a} - {b}i", f"{b + 1}i", f"{a + b}"])


def _entries(draw: random.Random, count: int) -> list[Rational]:
    """Different numbers, one of them a fraction."""
    found = [_fraction(draw)]
    while len(found) < count:
        value = Rational(draw.choice((1, -1)) * draw.choice((_whole(draw), 100 * _whole(draw))))
        if value not in found and -value not in found:
            found.append(value)
    draw.shuffle(found)
    return found


def _written(draw: random.Random, value: Rational) -> str:
    return draw.choice((latex(value), f"{value.p}/{value.q}" if value.q > 1 else str(value.p)))


def _tuple(draw: random.Random) -> tuple[str, str, str]:
    values = _entries(draw, draw.choice((2, 3)))
    reference = r"\left(" + ", ".join(map(latex, values)) + r"\right)"
    comma = draw.choice((",", ", ", r",\, "))
    equal = "(" + comma.join(_written(draw, v) for v in values) + ")"
    others = [values[::-1], [values[0] + 1, *values[1:]], [*values, Rational(1)]]
    unequal = "(" + ",".join(map(latex, draw.choice(others))) + ")"
    return reference, equal, unequal


def _set(draw: random.Random) -> tuple[str, str, str]:
    values = _entries(draw, draw.choice((2, 3)))
    reference = r"\left\{" + ", ".join(map(latex, values)) + r"\right\}"
    shuffled = draw.sample(values, len(values))
    body = ", ".join(_written(draw, v) for v in shuffled)
    equal = draw.choice((rf"\{{{body}\}}", rf"\lbrace {body} \rbrace", body))
    others = [values[1:], [*values[1:], values[0] + 1], [*values, Rational(1, 97)]]
    return reference, equal, r"\{" + ",".join(map(latex, draw.choice(others))) + r"\}"


def _interval(draw: random.Random) -> tuple[str, str, str]:
    low, high = sorted(_entries(draw, 2))
    left, right = draw.choice("(["), draw.choice(")]")
    ends = [latex(low), latex(high)]
    if draw.random() < 0.3:
        right, ends[1] = ")", r"\infty"
    body = ",".join(ends)
    other_left = "[" if left == "(" else "("
    unequal = draw.choice(
        (f"{other_left}{body}{right}", f"{left}{latex(low - 1)},{ends[1]}{right}")
    )
    if draw.random() < 0.4:
        tail = r" \cup \left(500, 600\right]"
        return f"{left}{body}{right}{tail}", rf"(500,600]\cup {left}{body}{right}", unequal + tail
    return rf"\left{left}{body}\right{right}", f"{left}{ends[0]}, {ends[1]}{right}", unequal


def _matrix(draw: random.Random) -> tuple[str, str, str]:
    values = _entries(draw, 4)

    def written(entries: list[Rational], kind: str, width: int = 2) -> str:
        rows = [entries[i : i + width] for i in range(0, len(entries), width)]
        body = r" \\ ".join(" & ".join(map(latex, row)) for row in rows)
        return rf"\begin{{{kind}}} {body} \end{{{kind}}}"

    others = [values[::-1], [values[0] + 1, *values[1:]]]
    unequal = draw.choice((written(draw.choice(others), "pmatrix"), written(values, "pmatrix", 4)))
    equal = draw.choice((written(values, "pmatrix").replace(" ", ""), written(values, "bmatrix")))
    return written(values, "pmatrix"), equal, unequal


def _equation(draw: random.Random) -> tuple[str, str, str]:
    a, b = _whole(draw, 2, 9), _whole(draw, 1, 20)
    value = a * X + b
    forms = [f"y = {b} + {a}x", f"y={a}x+{b}", f"{a}x + {b}"]
    return f"y = {latex(value)}", draw.choice(forms), f"y = {latex(value + draw.choice((1, X)))}"


def _power(draw: random.Random) -> tuple[str, str, str]:
    base, exponent = _whole(draw, 2, 5), _whole(draw, 10, 14)
    value = base**exponent
    forms = [str(value), f"{value:,}", f"{base}^{exponent}", f"{base}**{exponent}"]
    forms.append(f"{value:,}".replace(",", r"{,}"))
    forms.append(f"{value:,}".replace(",", r",\!"))
    others = [str(value + 1), f"{base}^{{{exponent + 1}}}", f"{base * exponent}"]
    return rf"{base}^{{{exponent}}}", draw.choice(forms), draw.choice(others)


def _words(draw: random.Random) -> tuple[str, str, str]:
    name, other = draw.sample(("Evelyn", "Monday", "ellipse", "even", "Carla", "two lines"), 2)
    forms = [name, rf"\text{{{name}}}", rf"\mathrm{{{name}}}", name.lower(), f"**{name}**"]
    return rf"\text{{{name}}}", draw.choice(forms), rf"\text{{{other}}}"


def _quantity(draw: random.Random) -> tuple[str, str, str]:
    value = _fraction(draw) if draw.random() < 0.3 else Rational(_whole(draw, 2, 400))
    written = latex(value)
    unit, long, other = draw.choice(
        (
            ("cm", "centimeters", "m"),
            (r"m^2", "square meters", "cm"),
            ("km/h", "km per hour", "m/s"),
            (r"^\circ", "degrees", "percent"),
        )
    )
    sign = unit.startswith("^")
    reference = written + (unit if sign else rf"\text{{ {unit}}}")
    forms = [written, rf"{written}\text{{ {long}}}", f"{written} {long}"]
    unequal = draw.choice((latex(value + 1), rf"{latex(value * 2)}\text{{ {long}}}"))
    if not sign and draw.random() < 0.3:
        unequal = rf"{written}\text{{ {other}}}"
    return reference, draw.choice(forms), unequal


KINDS: tuple[Kind, ...] = (
    _ratio, _root, _circle, _polynomial, _quotient, _complex, _tuple, _set, _interval, _matrix,
    _equation, _power, _words, _quantity,
)  # fmt: skip


# ------------------------------------------------------------------------------------ GSM8K

FORMS = (
    "{n}", "#### {n}", "#### {n}.", "#### ${n}", "#### {n} dollars", "#### **{n}**", "#### {c}",
    "#### ${c}", "#### {n}.00", "#### ${n}.00", "#### \\${n}", "#### €{n}", "#### {n} km/h",
    "#### {n}%", "#### x = {n}", "#### $$ {n} $$", "#### \\boxed{{{n}}}",
    "\\boxed{{{n}}}", "\\boxed{{\\text{{{n}}}}}", "\\boxed{{{n}\\text{{ dollars}}}}",
    "$\\boxed{{{c}}}$", "\\[ \\boxed{{\\${n}}} \\]", "\\boxed{{7}}, no: \\boxed{{{n}}}",
    "The answer is {n}.", "The answer is **{n}**.", "The answer is ${n}$.",
    "The final answer is: ${c}.", "Answer: {n} apples", "**Answer:** {n}",
    "So the answer is \\({n}\\).", "She has {n} apples left.", "In total he pays ${c}.",
    "5 + 3 = 8, and 8 + 2 = 10.\nThat makes {n} in all.", "#### <<1+1={n}>>{n}", "#### {n} km",
    "`{n}`", "_{n}_", "\\$ {n}", "#### {m} + 1", "#### {d}/2",
)  # fmt: skip
REFERENCES = (
    "{n}",
    "He pays 2 * 3 = $<<2*3=6>>6 more.\n#### {n}",
    "It costs $5 and <<4+1=5>>5 more.\nSo in the end:\n#### {c}",
)


def gsm8k_answers(seed: int = 0) -> list[Labelled]:
    """Every surface form with four numbers, each time right and wrong."""
    draw = random.Random(seed)
    made = []
    for number, form in enumerate(FORMS):
        for size in (9, 99, 4_000, 2_000_000):
            n = draw.randint(size // 3 + 8, size + 20)
            wrong = draw.choice((n + 1, n - 1, n * 10, 2 * n + 1, n + 100))
            reference = REFERENCES[(number + size) % len(REFERENCES)]
            for value in (n, wrong):
                response = form.format(n=value, c=f"{value:,}", m=value - 1, d=2 * value)
                made.append(Labelled(reference.format(n=n, c=f"{n:,}"), response, value == n))
    return made
