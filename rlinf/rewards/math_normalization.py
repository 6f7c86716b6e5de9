"""Normalise mathematical text: markup, currencies, spaces, LaTeX commands, and units of
measurement."""

# ruff: noqa: RUF001

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

ROW_SEPARATOR = "\0"
"""Separator of the rows of a matrix."""
BRACKET_PAIRS, CLOSING_BRACKETS = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}


class UnparsableAnswerError(ValueError):
    """Error of a text that has no answer, or no answer that can be parsed."""


_SYMBOLS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/",
    "⁄": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "±": r"\pm ", "°": r"^\circ ",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "⟨": r"\langle ", "⟩": r"\rangle ",
    "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u200b": "", "\ufeff": "", "’": "'",
    "，": ",", "（": "(", "）": ")", "％": "%", "。": ".", "：": ":", "＝": "=", "≈": r"\approx ",
    "∴": " ", "ℝ": r"\mathbb{R} ", "ℤ": r"\mathbb{Z} ", "∨": r"\lor ", "∧": r"\land ", "…": "...",
    "“": '"', "”": '"', "∖": r"\setminus ",
}  # fmt: skip
_CURRENCIES = {
    **{"\\$": "dollar", "$": "dollar", "€": "euro", "£": "sterling", "¥": "yen", "₹": "rupee"},
    **{"\\euro": "euro", "\\pounds": "sterling"},
}
_WRAPPERS = re.compile(
    r"\\(?:text(?:rm|bf|it|sf|tt|normal|up)?|mbox|hbox|math(?:rm|bf|it|sf|tt|normal)|boldsymbol|bm"
    r"|operatorname\*?|emph)\s*\{"
)
_TIGHT = re.compile(r"\\math(?:bf|it|sf|tt|normal)|\\boldsymbol|\\bm")
_SIZES = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|(?:text)?color\s*\{[a-zA-Z]*\}"
    r"|tiny|small|normalsize|large|Large|LARGE|huge|Huge)(?![A-Za-z])"
)
_SPACES = re.compile(r"\\(?:[,;:> ]|(?:quad|qquad|hspace\{[^}]*\}|hfill)(?![A-Za-z]))|~|\\(?=\s)")
_DELIMITERS = re.compile(r"\\[()\[\]]|\$")
_FUNCTIONS = (
    "arcsin",
    "arccos",
    "arctan",
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "log",
    "ln",
    "exp",
)
_PLAIN = re.compile(
    rf"(?<![\\A-Za-z])({'|'.join(_FUNCTIONS)}|pi|theta|alpha|beta|infinity|infty|inf|oo|sqrt)"
    r"(?![A-Za-z])"
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}")
_DOTTED = re.compile(r"(\d*)\.(\d*?)(\d{1,6}?)\3{2,}(?:\.\.\.|\\[lc]?dots)")
_SUPERSCRIPTS = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_REALS = re.compile(r"\\(?:math(?:bf|bb|rm|cal)|Bbb)\s*(?:\{\s*R\s*\}|R(?![A-Za-z]))")
_ALL_REALS = re.compile(r"(?:the\s+set\s+of\s+)?all\s+real(?:\s+number)?s", re.IGNORECASE)
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NUMBER_WORDS = {word: value for value, word in enumerate(_ONES.split())}
_NUMBER_WORDS |= {word: 10 * value for value, word in enumerate(_TENS.split(), 2)}
_SCIENTIFIC = re.compile(r"(?<![\w\\.}])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,3})(?![\w.])")


def normalize_latex(text: str) -> tuple[str, str]:
    """Return the text in a uniform spelling, and its currency as a unit (empty: none). ``½``
    becomes ``\\frac``, ``2**3`` a power, and ``\\text{cm}`` the word. Commands for sizes and
    spaces, emphasis and formula delimiters are removed."""
    text = normalize_characters(re.sub(r"<<[^<>]*>>", "", text)).strip()
    while match := re.match(r"^(\*\*|__|\*|_|`+)(?=\S)(.+?)(?<=\S)\1(.*)$", text, re.DOTALL):
        text = match[2] + match[3]
    # A double backslash is a new row of a matrix; elsewhere it is an escaped backslash.
    text = text.replace("\\\\", ROW_SEPARATOR if r"\begin" in text else "\\")
    text = re.sub(r",\\!\s*", ",", text).replace(r"\!", "").replace("{,}", ",")
    text = _REALS.sub(r"\\mathbb{R} ", text)
    text = text.replace(r"\colon", ":").replace(r"\text{:}", ":")
    text = re.sub(r"(?<![\\A-Za-z])(?:USD|US\$)", "$", text)
    text, unit = _currency(text)
    text = _DELIMITERS.sub(" ", text.replace(r"\left.", "").replace(r"\right.", ""))
    text = _SIZES.sub("", text)
    text = re.sub(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))", ",", text)
    text = _SPACES.sub(" ", text)
    text = re.sub(r"\[\s*\\begin\{(?:matrix|array)\}(?:\{[lcr|]*\})?", r"\\begin{bmatrix}", text)
    text = re.sub(r"\\end\{(?:matrix|array)\}\s*\]", r"\\end{bmatrix}", text)
    text = re.sub(r"\(\s*\\begin\{(?:matrix|array)\}(?:\{[lcr|]*\})?", r"\\begin{pmatrix}", text)
    text = re.sub(r"\\end\{(?:matrix|array)\}\s*\)", r"\\end{pmatrix}", text)
    text = _unwrapped(text)
    text = re.sub(r"\\(?:dfrac|tfrac|cfrac)(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\[dt]binom(?![A-Za-z])", r"\\binom", text)
    text = re.sub(r"\\log\s*_\s*\{?\s*e\s*\}?(?![A-Za-z])", r"\\ln ", text)
    text = re.sub(r"\\(?:lbrace|lbrack)(?![A-Za-z])", r"\\{", text)
    text = re.sub(r"\\(?:rbrace|rbrack)(?![A-Za-z])", r"\\}", text)
    text = re.sub(r"\\(?:leq|leqslant)(?![A-Za-z])", r"\\le", text)
    text = re.sub(r"\\(?:geq|geqslant)(?![A-Za-z])", r"\\ge", text)
    text = text.replace("<=", r"\le ").replace(">=", r"\ge ").replace(r"\%", "%")
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", " degrees ", text)
    text = re.sub(r"(?<=\d)\s*x\s*(?=10\s*\^)", r"\\times ", text)
    text = re.sub(r"\{([^{}]+)\\choose([^{}]+)\}", r"\\binom{\1}{\2}", text)
    text = re.sub(r"(?<![\\A-Za-z])C\((\d+),\s*(\d+)\)", r"\\binom{\1}{\2}", text)
    text = _bases(_repeating(text))
    text = _SCIENTIFIC.sub(lambda m: _plain_number(f"{m[1]}e{m[2]}"), text)
    text = re.sub(r"\s*\*\*\s*", "^", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt(?=\s*[\d(])", r"\\sqrt", text)
    text = _PLAIN.sub(lambda m: rf"\{_LONG.get(m[1], m[1])} ", text)
    text = text.replace("*", r"\cdot ")
    text = _arguments(text)
    text = re.sub(r"\^\s*(-?\d+)", r"^{\1}", text)
    text = re.sub(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"(\1+\\frac{\2}{\3})", text)
    text = re.sub(r"(?<![\d.^_{}])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})", text)
    text = re.sub(r"(?<![\d}])\.(?=\d)", "0.", text)
    text = re.sub(r"\s+", " ", text).strip()
    # An exclamation mark is a factorial here; the caller has removed exclamation marks of prose.
    text = re.sub(r"^(?:[=:]|\\approx(?![a-z]))\s*|(?:\s|(?<!\\)[.,;:?])+$", "", text)
    return _number_words(_ALL_REALS.sub(r"\\mathbb{R}", text)), unit


_LONG = {"inf": "infty", "oo": "infty", "infinity": "infty"}


def normalize_characters(text: str) -> str:
    """Return a text with ASCII and LaTeX instead of symbols, and without pictograms."""
    text = _SUPERSCRIPTS.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    spelled = (
        _character(c) if following[:1].isalpha() else _character(c).rstrip(" ") or " " * c.isspace()
        for c, following in zip(text, f"{text[1:]} ", strict=False)
    )
    return "".join(spelled).replace("^{−", "^{-")


def _repeating(text: str) -> str:
    r"""Replace ``0.\overline{3}`` and ``0.333...`` by a fraction."""
    for pattern in (_REPEATING, _DOTTED):
        text = pattern.sub(_fraction_of_repeating, text)
    return text


def _bases(text: str) -> str:
    """Replace ``(1010)_2``, ``1010 base 2`` and ``1010_{two}`` by ``1010_{2}``."""
    text = re.sub(r"\b(\w+),?\s+(?:in\s+)?base[\s-]*(\w+)\b", r"\1_{\2}", text)
    text = re.sub(r"\((\d+)\)\s*_", r"\1_", text)
    return re.sub(
        r"(?<=\d)_\s*\{\s*([a-z]+)\s*\}",
        lambda m: f"_{{{_NUMBER_WORDS.get(m[1], m[1])}}}",
        text,
    )


def _fraction_of_repeating(match: re.Match[str]) -> str:
    integer, prefix, period = match[1] or "0", match[2], match[3]
    denominator = (10 ** len(period) - 1) * 10 ** len(prefix)
    numerator = int(integer + prefix + period) - int(integer + prefix)
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _number_words(text: str) -> str:
    """Return a number below a hundred in digits if it is in words; any other text unchanged."""
    tens, _, ones = text.lower().replace("-", " ").partition(" ")
    if tens not in _NUMBER_WORDS or (ones and not 0 < _NUMBER_WORDS.get(ones, 0) < 10):
        return text
    if ones and _NUMBER_WORDS[tens] < 20:
        return text
    return str(_NUMBER_WORDS[tens] + _NUMBER_WORDS.get(ones, 0))


def _character(character: str) -> str:
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    if character == "√":
        return r"\sqrt "
    if ord(character) < 128:
        return character
    category = unicodedata.category(character)
    if category == "So" or character == "\ufe0f":
        return " "
    if category != "No":
        return character
    plain = unicodedata.normalize("NFKC", character)
    if "⁄" in plain:
        numerator, denominator = plain.split("⁄")
        return rf"\frac{{{numerator}}}{{{denominator}}}" if denominator else character
    form = unicodedata.decomposition(character)
    return f"^{{{plain}}}" if "<super>" in form else f"_{{{plain}}}" if "<sub>" in form else plain


def _currency(text: str) -> tuple[str, str]:
    """Remove a currency sign. A pair of ``$`` delimits a formula; a single or escaped one is
    money."""
    for sign, unit in _CURRENCIES.items():
        if sign == "$" and text.replace(r"\$", "").count("$") % 2 == 0:
            continue
        if sign in text:
            start = text.find(sign)
            return text[:start] + " " + text[start:].replace(sign, " "), f"{unit}^1"
    return text, ""


def _plain_number(scientific: str) -> str:
    return f"{Decimal(scientific):f}"


def _unwrapped(text: str) -> str:
    r"""Remove the commands of ``\text{...}`` and fonts. Words stay separated from the text
    before."""
    while match := _WRAPPERS.search(text):
        end = find_closing_bracket(text, match.end() - 1)
        inner = text[match.end() :] if end is None else text[match.end() : end]
        rest = "" if end is None else text[end + 1 :]
        single = len(inner.strip()) == 1 and inner.strip() in "eid"
        space = "" if single or _TIGHT.match(match[0]) else " "
        known = inner.strip() in _FUNCTIONS
        inner = (
            rf"\{inner.strip()} " if known else f"{space}{inner}{space if rest[:1] != '^' else ''}"
        )
        text = text[: match.start()] + inner + rest
    return text


def _arguments(text: str) -> str:
    r"""Add missing braces around the arguments of ``\frac``, ``\sqrt`` and ``^``."""
    out, position = [], 0
    pattern = re.compile(r"\\frac(?![A-Za-z])|\\binom(?![A-Za-z])|\\sqrt(?![A-Za-z])|\^")
    while match := pattern.search(text, position):
        out.append(text[position : match.start()])
        command, position = match[0], match.end()
        out.append(command)
        if command == r"\sqrt" and (root := re.match(r"\s*\[[^\[\]]*\]", text[position:])):
            out.append(root[0].strip())
            position += root.end()
        for _ in range(2 if command in (r"\frac", r"\binom") else 1):
            argument, position = _argument(text, position, command)
            out.append(f"{{{_arguments(argument)}}}")
    return "".join([*out, text[position:]])


def _argument(text: str, start: int, command: str) -> tuple[str, int]:
    """Return the argument of a command, from a start position, and its end."""
    while start < len(text) and text[start] == " ":
        start += 1
    if start >= len(text):
        raise UnparsableAnswerError(f"{command} without its argument")
    if text[start] == "{" or (text[start] == "(" and command not in (r"\frac", r"\binom")):
        end = find_closing_bracket(text, start)
        if end is None:
            raise UnparsableAnswerError("an open brace")
        return text[start + 1 : end], end + 1
    # A radicand or exponent of several digits is one number; TeX would use the first digit only.
    number = re.match(r"-?\d+" if command == "^" else r"\d+(?:\.\d+)?", text[start:])
    if number and command not in (r"\frac", r"\binom"):
        return number[0], start + number.end()
    if word := re.match(r"\\[A-Za-z]+", text[start:]):
        end = start + word.end()
        if word[0] in (r"\sqrt", r"\frac"):
            for _ in range(1 if word[0] == r"\sqrt" else 2):
                _, end = _argument(text, end, word[0])
        return text[start:end], end
    return text[start], start + 1


def find_closing_bracket(text: str, start: int, mixed: bool = False) -> int | None:
    """Return the position of the bracket that closes the one at ``start``; None if there is none.
    With ``mixed``, ``)`` may close ``[``."""
    depth, position = 0, start
    opening, closing = ("([", ")]") if mixed else (text[start], BRACKET_PAIRS[text[start]])
    while position < len(text):
        if text[position] == "\\":
            position += 2
            continue
        if text[position] in opening:
            depth += 1
        elif text[position] in closing:
            depth -= 1
            if not depth:
                return position
        position += 1
    return None


_NAMES = {
    name: unit
    for unit, names in {
        "percent": "percent percentage pct % percents",
        "degree": "degree degrees deg",
        "rad": "rad radian radians",
        "dollar": "dollar dollars bucks usd", "cent": "cent cents", "euro": "euro euros eur",
        "nm": "nm nanometer nanometers", "µm": "µm μm micrometer micrometers",
        "mm": "mm millimeter millimeters millimetre millimetres",
        "cm": "cm centimeter centimeters centimetre centimetres",
        "m": "m meter meters metre metres",
        "km": "km kilometer kilometers kilometre kilometres kms",
        "in": "inch inches", "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mile miles mi",
        "g": "g gram grams gm", "mg": "mg milligram milligrams",
        "kg": "kg kilogram kilograms kgs kilos", "lb": "lb lbs pound pounds",
        "oz": "oz ounce ounces", "t": "ton tons tonne tonnes",
        "ms": "ms millisecond milliseconds",
        "s": "s sec secs second seconds", "min": "min mins minute minutes",
        "h": "h hr hrs hour hours", "day": "day days", "week": "week weeks",
        "month": "month months", "year": "year years yr yrs",
        "l": "l L liter liters litre litres", "ml": "ml mL milliliter milliliters",
        "km/h": "kmh kph kmph", "mi/h": "mph", "am": "am a.m a.m.", "pm": "pm p.m p.m.",
        "J": "J joule joules", "kJ": "kJ kilojoule kilojoules", "MJ": "MJ megajoules",
        "eV": "eV electronvolt electronvolts", "keV": "keV", "MeV": "MeV", "cal": "cal calories",
        "N": "N newton newtons", "kN": "kN kilonewtons", "W": "W watt watts",
        "kW": "kW kilowatt kilowatts", "kWh": "kWh", "MW": "MW megawatts",
        "Pa": "Pa pascal pascals", "kPa": "kPa kilopascals", "atm": "atm atmospheres",
        "V": "V volt volts", "kV": "kV kilovolts", "mV": "mV millivolts",
        "A": "A amp amps ampere amperes", "mA": "mA milliamps milliamperes",
        "ohm": "ohm ohms Ω Ω \\Omega", "kohm": "kΩ k\\Omega",
        "C": "C coulomb coulombs", "µC": "µC μC microcoulombs", "nC": "nC nanocoulombs",
        "F": "F farad farads", "µF": "µF μF microfarads", "H": "H henry henries",
        "T": "T tesla teslas", "Wb": "Wb webers", "Hz": "Hz hertz", "kHz": "kHz kilohertz",
        "MHz": "MHz megahertz", "K": "K kelvin kelvins", "mol": "mol mole moles",
        "mmol": "mmol millimoles", "M": "M molar", "mM": "mM", "rpm": "rpm",
    }.items()
    for name in names.split()
}  # fmt: skip
_SCALES = {
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_WORD = r"(?:(?<![A-Za-z\\])[A-Za-zµμΩ][A-Za-zΩ.'-]*|k?\\Omega(?![A-Za-z]))(?:\^\{-?\d\})?"
_GAP = r"(?:\s*/\s*|\s*\\cdot\s*|\s+)"
_QUOTIENT = rf"\\frac\{{\s*{_WORD}\s*\}}\{{\s*{_WORD}\s*\}}"
_TRAIL = re.compile(
    rf"(?P<gap>\s*)(?P<unit>%|{_QUOTIENT}|{_WORD}(?:{_GAP}{_WORD}|\s+\([a-z]+\))*)\s*$"
)
_VALUE_END = re.compile(r"(?:[\d})]|\\pi|\\infty)\s*$")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|log|ln)(?![a-z])")


def split_unit(text: str) -> tuple[str, str]:
    """Return a value without the unit, scale or noun after it, and the unit. The unit has a uniform
    spelling; it is empty if it is unknown, as in ``12 apples``. A text without a unit is unchanged;
    ``2t`` and ``5x`` are products."""
    match = _TRAIL.search(text)
    if match is None or not match.start():
        return text, ""
    head = text[: match.start()]
    if not _VALUE_END.search(head) or re.search(r"(?<![\\A-Za-z{])[A-Za-z]{2,}", head):
        return text, ""
    if _FUNCTION.search(head):
        return text, ""
    unit = re.sub(rf"\\frac\{{\s*({_WORD})\s*\}}\{{\s*({_WORD})\s*\}}", r"\1 / \2", match["unit"])
    words = re.findall(r"\\cdot|/|%|[^\s/%]+", re.sub(r"/|\\cdot", r" \g<0> ", unit))
    scale = 1
    while words and words[0].lower() in _SCALES:
        scale *= _SCALES[words.pop(0).lower()]
    if not all(_is_unit_or_noun(word, bool(match["gap"])) for word in words):
        return text, ""
    return _scaled(head.strip(), scale), _spelled(words)


def is_unit(text: str) -> bool:
    """Return whether a text is a known unit, such as ``m/s^{2}``."""
    return re.match(r"[A-Za-zµμΩ%\\]", text) is not None and split_unit(f"1 {text}")[1] != ""


def _is_unit_or_noun(word: str, has_gap: bool) -> bool:
    bare = re.sub(r"\^\{-?\d\}", "", word)
    if bare in ("/", "\\cdot", "%", "of", "in"):
        return True
    known = bare in _NAMES or (bare.lower() in _NAMES and len(bare) > 1)
    if len(bare) == 1 and not has_gap:
        return False
    return known or (len(bare) >= 3 and has_gap)


def _scaled(head: str, scale: int) -> str:
    if scale == 1:
        return head
    if re.fullmatch(r"-?\d+(?:\.\d+)?", head):
        return f"{Decimal(head) * scale:f}"
    return f"({head})\\cdot {scale}"


def _spelled(words: list[str]) -> str:
    """Return ``m*s^-2`` for ``m/s^{2}``; empty if a word is not a unit."""
    powers: dict[str, int] = {}
    sign, power, last = 1, 1, ""
    for word in words:
        if word in ("/", "per"):
            sign = -1
        elif word in ("square", "sq", "cubic"):
            power = 3 if word == "cubic" else 2
        elif word in ("squared", "cubed") and last:
            powers[last] *= 3 if word == "cubed" else 2
        elif word != "\\cdot":
            bare = re.sub(r"\^\{-?\d\}", "", word)
            exponent = re.search(r"\^\{(-?\d)\}", word)
            known = _NAMES.get(bare, _NAMES.get(bare.lower(), ""))
            if not known:
                return ""
            numerator, _, denominator = known.partition("/")
            power = sign * power * (int(exponent[1]) if exponent else 1)
            powers[numerator] = powers.get(numerator, 0) + power
            if denominator:
                powers[denominator] = powers.get(denominator, 0) - power
            last, sign, power = numerator, 1, 1
    return "*".join(f"{name}^{powers[name]}" for name in sorted(powers) if powers[name])
