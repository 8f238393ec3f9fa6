"""The numbers at the axes of figures: where they stand on a logarithmic axis, and how they are written."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise


class Unit(enum.Enum):
    """What the numbers of a logarithmic axis are, for ticks such as 10 ms and 1 GB."""

    NUMBER = "number"
    SECONDS = "seconds"
    BYTES = "bytes"


_MOST_TICKS = 8


def measured_ticks(values: Sequence[float]) -> list[float]:
    """The values themselves if they are few, or else the powers of two among them; none if they are too many too."""
    if len(values) <= _MOST_TICKS:
        return list(values)
    powers = [x for x in values if x > 0 and math.log2(x).is_integer()]
    return powers if 2 < len(powers) <= _MOST_TICKS else []


def log_ticks(low: float, high: float) -> list[float]:
    """About three to seven round numbers from low to high on a logarithmic axis."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    chosen: list[float] = []
    for multiples in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)):
        chosen = [float(f"{m}e{power}") for power in range(first, last + 1) for m in multiples]
        chosen = [tick for tick in chosen if low <= tick <= high]
        if len(chosen) > _FEWEST_TICKS:
            break
    if len(chosen) <= _FEWEST_TICKS:
        from matplotlib.ticker import MaxNLocator

        return [tick for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]
    every = -(-len(chosen) // _MOST_TICKS)
    return chosen[(len(chosen) - 1) % every :: every]


_FEWEST_TICKS = 2


def that_fit(texts: Mapping[float, str], place: Callable[[float], float]) -> list[float]:
    """Every tick, or every second, third, ..., counted from the last, so that their texts do not touch."""
    ticks = sorted(texts)
    for every in range(1, len(ticks) + 1):
        kept = ticks[(len(ticks) - 1) % every :: every]
        if all(place(b) - place(a) >= 0.034 * (len(texts[a]) + len(texts[b])) + 0.08 for a, b in pairwise(kept)):
            return kept
    return ticks[-1:]


_UNITS = {
    Unit.SECONDS: ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s")),
    Unit.BYTES: ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB")),
}
_PLAIN_FROM, _PLAIN_TO = 1e-4, 1e7
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def tick_texts(values: Sequence[float], unit: Unit = Unit.NUMBER) -> list[str]:
    """Numbers as 0.05, 4,096, 10 ms or 1 GB; if one is very small or very large, all as powers of ten."""
    if unit in _UNITS:
        return [_with_unit(value, unit) for value in values]
    if all(value == 0 or _PLAIN_FROM <= abs(value) <= _PLAIN_TO for value in values):
        return [f"{value:,.10g}" for value in values]
    return [_as_power(value) for value in values]


def _with_unit(value: float, unit: Unit) -> str:
    fitting = [each for each in _UNITS[unit] if each[0] <= value * (1 + 1e-9)]
    size, name = fitting[-1] if fitting else _UNITS[unit][0]
    return f"{value / size:,.10g} {name}"


def _as_power(value: float) -> str:
    mantissa, power = f"{value:.2e}".split("e")
    if int(power) == 0:
        return f"{value:g}"
    factor = "" if float(mantissa) == 1 else f"{float(mantissa):g}·"
    return f"{factor}10{str(int(power)).translate(_SUPERSCRIPTS)}"
