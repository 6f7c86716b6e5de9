"""Normalise mathematical text: markup, currencies, spaces, LaTeX commands, and units of
measurement. Patterns are named after the text that they match."""

# ruff: noqa: RUF001

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

ROW_SEPARATOR = "\0"
"""Separator of the rows of a matrix in normalised text."""
BRACKET_PAIRS, CLOSING_BRACKETS = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}


class UnparsableAnswerError(ValueError):
    """A text has no answer, or none that can be parsed."""


_SYMBOL_REPLACEMENTS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/",
    "⁄": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "±": r"\pm ", "°": r"^\circ ",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "⟨": r"\langle ", "⟩": r"\rangle ",
    "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u200b": "", "\ufeff": "", "’": "'",
    "，": ",", "（": "(", "）": ")", "％": "%", "。": ".", "：": ":", "＝": "=", "≈": r"\approx ",
    "∴": " ", "ℝ": r"\mathbb{R} ", "ℤ": r"\mathbb{Z} ", "∨": r"\lor ", "∧": r"\land ", "…": "...",
    "“": '"', "”": '"', "∖": r"\setminus ",
}  # fmt: skip
_CURRENCY_SIGNS = {
    **{"\\$": "dollar", "$": "dollar", "€": "euro", "£": "sterling", "¥": "yen", "₹": "rupee"},
    **{"\\euro": "euro", "\\pounds": "sterling"},
}
_TEXT_COMMANDS = re.compile(
    r"\\(?:text(?:rm|bf|it|sf|tt|normal|up)?|mbox|hbox|math(?:rm|bf|it|sf|tt|normal)|boldsymbol|bm"
    r"|operatorname\*?|emph)\s*\{"
)
_FONT_COMMANDS = re.compile(r"\\math(?:bf|it|sf|tt|normal)|\\boldsymbol|\\bm")
_LAYOUT_COMMANDS = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|(?:text)?color\s*\{[a-zA-Z]*\}"
    r"|tiny|small|normalsize|large|Large|LARGE|huge|Huge)(?![A-Za-z])"
)
_SPACES = re.compile(r"\\(?:[,;:> ]|(?:quad|qquad|hspace\{[^}]*\}|hfill)(?![A-Za-z]))|~|\\(?=\s)")
_FORMULA_DELIMITERS = re.compile(r"\\[()\[\]]|\$")
_FUNCTION_NAMES = (
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
_PLAIN_NAMES = re.compile(
    rf"(?<![\\A-Za-z])({'|'.join(_FUNCTION_NAMES)}|pi|theta|alpha|beta|infinity|infty|inf|oo|sqrt)"
    r"(?![A-Za-z])"
)
_OVERLINED_DECIMAL = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}")
_DOTTED_DECIMAL = re.compile(r"(\d*)\.(\d*?)(\d{1,6}?)\3{2,}(?:\.\.\.|\\[lc]?dots)")
_SUPERSCRIPTS = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_REALS = re.compile(r"\\(?:math(?:bf|bb|rm|cal)|Bbb)\s*(?:\{\s*R\s*\}|R(?![A-Za-z]))")
_REALS_IN_WORDS = re.compile(r"(?:the\s+set\s+of\s+)?all\s+real(?:\s+number)?s", re.IGNORECASE)
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NUMBER_WORDS = {word: value for value, word in enumerate(_ONES.split())}
_NUMBER_WORDS |= {word: 10 * value for value, word in enumerate(_TENS.split(), 2)}
_SCIENTIFIC_NUMBER = re.compile(r"(?<![\w\\.}])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,3})(?![\w.])")


def normalize_latex(text: str) -> tuple[str, str]:
    """Return the text in a uniform spelling, and its currency, such as ``dollar^1`` (empty: none).
    ``½`` becomes ``\\frac``, ``2**3`` a power, and ``\\text{cm}`` the word. Commands for sizes and
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
    text, unit = _remove_currency(text)
    text = _FORMULA_DELIMITERS.sub(" ", text.replace(r"\left.", "").replace(r"\right.", ""))
    text = _LAYOUT_COMMANDS.sub("", text)
    text = re.sub(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))", ",", text)
    text = _SPACES.sub(" ", text)
    text = re.sub(r"\[\s*\\begin\{(?:matrix|array)\}(?:\{[lcr|]*\})?", r"\\begin{bmatrix}", text)
    text = re.sub(r"\\end\{(?:matrix|array)\}\s*\]", r"\\end{bmatrix}", text)
    text = re.sub(r"\(\s*\\begin\{(?:matrix|array)\}(?:\{[lcr|]*\})?", r"\\begin{pmatrix}", text)
    text = re.sub(r"\\end\{(?:matrix|array)\}\s*\)", r"\\end{pmatrix}", text)
    text = _remove_text_commands(text)
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
    text = _normalize_bases(_replace_repeating_decimals(text))
    text = _SCIENTIFIC_NUMBER.sub(lambda m: _plain_number(f"{m[1]}e{m[2]}"), text)
    text = re.sub(r"\s*\*\*\s*", "^", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt(?=\s*[\d(])", r"\\sqrt", text)
    text = _PLAIN_NAMES.sub(lambda m: rf"\{_LATEX_NAMES.get(m[1], m[1])} ", text)
    text = text.replace("*", r"\cdot ")
    text = _add_braces(text)
    text = re.sub(r"\^\s*(-?\d+)", r"^{\1}", text)
    text = re.sub(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"(\1+\\frac{\2}{\3})", text)
    text = re.sub(r"(?<![\d.^_{}])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})", text)
    text = re.sub(r"(?<![\d}])\.(?=\d)", "0.", text)
    text = re.sub(r"\s+", " ", text).strip()
    # An exclamation mark is a factorial here; the caller has removed exclamation marks of prose.
    text = re.sub(r"^(?:[=:]|\\approx(?![a-z]))\s*|(?:\s|(?<!\\)[.,;:?])+$", "", text)
    return _words_to_digits(_REALS_IN_WORDS.sub(r"\\mathbb{R}", text)), unit


_LATEX_NAMES = {"inf": "infty", "oo": "infty", "infinity": "infty"}
"""LaTeX commands for :data:`_PLAIN_NAMES` that are not commands themselves."""


def normalize_characters(text: str) -> str:
    """Return a text with ASCII and LaTeX instead of symbols, and without pictograms."""
    text = _SUPERSCRIPTS.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    spelled = (
        _spell(c) if following[:1].isalpha() else _spell(c).rstrip(" ") or " " * c.isspace()
        for c, following in zip(text, f"{text[1:]} ", strict=False)
    )
    return "".join(spelled).replace("^{−", "^{-")


def _replace_repeating_decimals(text: str) -> str:
    r"""Replace ``0.\overline{3}`` and ``0.333...`` by a fraction."""
    for pattern in (_OVERLINED_DECIMAL, _DOTTED_DECIMAL):
        text = pattern.sub(_fraction_of_repeating, text)
    return text


def _normalize_bases(text: str) -> str:
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


def _words_to_digits(text: str) -> str:
    """Return a number in words below a hundred in digits; any other text unchanged."""
    tens, _, ones = text.lower().replace("-", " ").partition(" ")
    if tens not in _NUMBER_WORDS or (ones and not 0 < _NUMBER_WORDS.get(ones, 0) < 10):
        return text
    if ones and _NUMBER_WORDS[tens] < 20:
        return text
    return str(_NUMBER_WORDS[tens] + _NUMBER_WORDS.get(ones, 0))


def _spell(character: str) -> str:
    """Return the ASCII or LaTeX form of a symbol, fraction, superscript or subscript; a space for a
    pictogram."""
    if character in _SYMBOL_REPLACEMENTS:
        return _SYMBOL_REPLACEMENTS[character]
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


def _remove_currency(text: str) -> tuple[str, str]:
    """Return a text without its currency sign, and the currency as a unit. A pair of ``$`` delimits
    a formula; a single or escaped ``$`` is money."""
    for sign, unit in _CURRENCY_SIGNS.items():
        if sign == "$" and text.replace(r"\$", "").count("$") % 2 == 0:
            continue
        if sign in text:
            start = text.find(sign)
            return text[:start] + " " + text[start:].replace(sign, " "), f"{unit}^1"
    return text, ""


def _plain_number(scientific: str) -> str:
    return f"{Decimal(scientific):f}"


def _remove_text_commands(text: str) -> str:
    r"""Return a text with ``\text{...}`` and font commands replaced by their arguments. Words stay
    separated from the text before."""
    while match := _TEXT_COMMANDS.search(text):
        end = find_closing_bracket(text, match.end() - 1)
        inner = text[match.end() :] if end is None else text[match.end() : end]
        rest = "" if end is None else text[end + 1 :]
        is_symbol = len(inner.strip()) == 1 and inner.strip() in "eid"
        space = "" if is_symbol or _FONT_COMMANDS.match(match[0]) else " "
        known = inner.strip() in _FUNCTION_NAMES
        inner = (
            rf"\{inner.strip()} " if known else f"{space}{inner}{space if rest[:1] != '^' else ''}"
        )
        text = text[: match.start()] + inner + rest
    return text


def _add_braces(text: str) -> str:
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
            argument, position = _next_argument(text, position, command)
            out.append(f"{{{_add_braces(argument)}}}")
    return "".join([*out, text[position:]])


def _next_argument(text: str, start: int, command: str) -> tuple[str, int]:
    """Return the argument of a command that begins at ``start`` or after spaces, and the position
    after it."""
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
                _, end = _next_argument(text, end, word[0])
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


_UNITS_BY_NAME = {
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
_SCALE_WORDS = {
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_UNIT = r"(?:(?<![A-Za-z\\])[A-Za-zµμΩ][A-Za-zΩ.'-]*|k?\\Omega(?![A-Za-z]))(?:\^\{-?\d\})?"
_JOIN = r"(?:\s*/\s*|\s*\\cdot\s*|\s+)"
_QUOTIENT = rf"\\frac\{{\s*{_UNIT}\s*\}}\{{\s*{_UNIT}\s*\}}"
_TRAILING_UNIT = re.compile(
    rf"(?P<gap>\s*)(?P<unit>%|{_QUOTIENT}|{_UNIT}(?:{_JOIN}{_UNIT}|\s+\([a-z]+\))*)\s*$"
)
_VALUE_END = re.compile(r"(?:[\d})]|\\pi|\\infty)\s*$")
_FUNCTION_COMMAND = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|log|ln)(?![a-z])")


def split_unit(text: str) -> tuple[str, str]:
    """Return a value without the unit or noun after it, and the unit in a uniform spelling. The
    unit is empty if it is unknown, as in ``12 apples``. The value is multiplied by a scale, as in
    ``2 million``. A text without a unit is unchanged; ``2t`` and ``5x`` are products."""
    match = _TRAILING_UNIT.search(text)
    if match is None or not match.start():
        return text, ""
    head = text[: match.start()]
    if not _VALUE_END.search(head) or re.search(r"(?<![\\A-Za-z{])[A-Za-z]{2,}", head):
        return text, ""
    if _FUNCTION_COMMAND.search(head):
        return text, ""
    unit = re.sub(rf"\\frac\{{\s*({_UNIT})\s*\}}\{{\s*({_UNIT})\s*\}}", r"\1 / \2", match["unit"])
    words = re.findall(r"\\cdot|/|%|[^\s/%]+", re.sub(r"/|\\cdot", r" \g<0> ", unit))
    scale = 1
    while words and words[0].lower() in _SCALE_WORDS:
        scale *= _SCALE_WORDS[words.pop(0).lower()]
    if not all(_is_unit_or_noun(word, bool(match["gap"])) for word in words):
        return text, ""
    return _multiply(head.strip(), scale), _normalize_unit(words)


def is_unit(text: str) -> bool:
    """Return whether a text is a known unit, such as ``m/s^{2}``."""
    return re.match(r"[A-Za-zµμΩ%\\]", text) is not None and split_unit(f"1 {text}")[1] != ""


def _is_unit_or_noun(word: str, has_gap: bool) -> bool:
    """Return whether a word after a value is a unit or noun; ``has_gap``: a space is between."""
    bare = re.sub(r"\^\{-?\d\}", "", word)
    if bare in ("/", "\\cdot", "%", "of", "in"):
        return True
    is_known = bare in _UNITS_BY_NAME or (bare.lower() in _UNITS_BY_NAME and len(bare) > 1)
    if len(bare) == 1 and not has_gap:
        return False
    return is_known or (len(bare) >= 3 and has_gap)


def _multiply(value: str, scale: int) -> str:
    if scale == 1:
        return value
    if re.fullmatch(r"-?\d+(?:\.\d+)?", value):
        return f"{Decimal(value) * scale:f}"
    return f"({value})\\cdot {scale}"


def _normalize_unit(words: list[str]) -> str:
    """Return units in a uniform spelling, ``m*s^-2`` for ``m/s^{2}``; empty if a word is not a
    unit."""
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
            name = _UNITS_BY_NAME.get(bare, _UNITS_BY_NAME.get(bare.lower(), ""))
            if not name:
                return ""
            numerator, _, denominator = name.partition("/")
            power = sign * power * (int(exponent[1]) if exponent else 1)
            powers[numerator] = powers.get(numerator, 0) + power
            if denominator:
                powers[denominator] = powers.get(denominator, 0) - power
            last, sign, power = numerator, 1, 1
    return "*".join(f"{name}^{powers[name]}" for name in sorted(powers) if powers[name])
