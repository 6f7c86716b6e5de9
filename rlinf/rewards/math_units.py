"""Units of measurement behind a number: read them in one spelling, and take them off."""

from __future__ import annotations

import re
from decimal import Decimal

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
    """Return a value without the unit, the scale or the plain noun behind it, and the unit.

    The unit is in one spelling, and empty where it is not known: ``12 apples``. A text without
    one comes back unchanged; ``2t`` and ``5x`` are products.
    """
    found = _TRAIL.search(text)
    if found is None or not found.start():
        return text, ""
    head = text[: found.start()]
    if not _VALUE_END.search(head) or re.search(r"(?<![\\A-Za-z{])[A-Za-z]{2,}", head):
        return text, ""
    if _FUNCTION.search(head):
        return text, ""
    unit = re.sub(rf"\\frac\{{\s*({_WORD})\s*\}}\{{\s*({_WORD})\s*\}}", r"\1 / \2", found["unit"])
    words = re.findall(r"\\cdot|/|%|[^\s/%]+", re.sub(r"/|\\cdot", r" \g<0> ", unit))
    scale = 1
    while words and words[0].lower() in _SCALES:
        scale *= _SCALES[words.pop(0).lower()]
    if not all(_is_unit_or_noun(word, bool(found["gap"])) for word in words):
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
    """``m*s^-2`` for ``m/s^{2}``; empty if a word is no unit."""
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
            over, _, under = known.partition("/")
            power = sign * power * (int(exponent[1]) if exponent else 1)
            powers[over] = powers.get(over, 0) + power
            if under:
                powers[under] = powers.get(under, 0) - power
            last, sign, power = over, 1, 1
    return "*".join(f"{name}^{powers[name]}" for name in sorted(powers) if powers[name])
