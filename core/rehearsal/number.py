"""Numbers as exact text: two texts are equal if and only if the numbers have the same bits."""

import math


def exact_text(number: complex) -> str:
    """The text of a bool, an int, a float or a complex number.

    Examples:
        >>> exact_text(0.1), exact_text(-0.0), exact_text(7), exact_text(True)
        ('0x1.999999999999ap-4', '-0x0.0p+0', '7', 'True')
        >>> exact_text(complex(1, 2))
        '0x1.0000000000000p+0 0x1.0000000000000p+1j'
    """
    if isinstance(number, bool | int):
        return str(number)
    if isinstance(number, complex):
        return f"{number.real.hex()} {number.imag.hex()}j"
    return number.hex()


def float_of(text: str) -> float:
    """The number of a text as a float, or NaN: for pictures, tables and tolerances.

    Examples:
        >>> float_of("0x1.8p+1"), float_of("7"), float_of("True"), math.isnan(float_of("0x0p+0 0x1p+0j"))
        (3.0, 7.0, 1.0, True)
    """
    if text in ("True", "False"):
        return float(text == "True")
    try:
        return float.fromhex(text) if "x" in text or text.lstrip("-") in ("nan", "inf") else float(text)
    except ValueError:
        return math.nan


def relative_difference(one: str, other: str) -> float:
    """How far apart two numbers are, relative to the larger one; 0 for equal texts, infinite if a number is not finite.

    Examples:
        >>> relative_difference(exact_text(2.0), exact_text(1.0)), relative_difference("nan", "nan")
        (0.5, 0.0)
        >>> relative_difference("nan", "1")
        inf
    """
    if one == other:
        return 0.0
    a, b = float_of(one), float_of(other)
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    largest = max(abs(a), abs(b))
    return abs(a - b) / largest if largest else 0.0
