"""Colours and markers of labels: the same colour for the same attention, task and landmark sampler in every figure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

ATTENTION_COLOURS = {
    "softmax": "#444444",
    "kernelized": "#1f6fb4",
    "skyformer": "#d62728",
    "nystromformer": "#23892f",
    "linformer": "#8250b8",
    "informer": "#8c564b",
    "performer": "#d66a00",
    "reformer": "#cc4599",
    "bigbird": "#0b8496",
    "tilted": "#7d7d00",
}

OTHER_NAMES = {"sdpa": "softmax", "self-attention": "softmax", "nystrom-attention": "nystromformer"}
"""Names under which an attention of `ATTENTION_COLOURS` is known elsewhere."""

FIXED_COLOURS = {
    "text": "#003f5c",
    "listops": "#b5438a",
    "retrieval": "#4a8500",
    "pathfinder": "#b87400",
    "image": "#7a5195",
    "uniform": "#003f5c",
    "stratified": "#b5438a",
    "queries": "#4a8500",
    "leverage": "#7a5195",
    "probe": "#b87400",
    "segment_means": "#008a8a",
}
"""Colours of tasks and of landmark samplers."""

OTHER_COLOURS = ("#003f5c", "#b5438a", "#4a8500", "#b87400", "#7a5195", "#008a8a", "#777777", "#a05d00")
"""For labels that name neither an attention nor anything else with a colour of its own."""

_SHADES = (0.0, -0.5, 0.4, -0.75)
"""Of the first, second, ... label with the same attention: a share of black if negative, else of white."""
_MARKERS = ("o", "s", "^", "D")


@dataclass(frozen=True)
class Style:
    """How all series of a label look."""

    colour: str
    marker: str = "o"
    emphasised: bool = False


def label_styles(labels: Sequence[str]) -> dict[str, Style]:
    """A style for each label: a shade of the attention that it names, a fixed colour, or the next of the others."""
    styles: dict[str, Style] = {}
    counts: dict[str, int] = {}
    free = _other_colours([colour for label in labels if (colour := FIXED_COLOURS.get(label.lower()))])
    # The plain name of an attention comes first, and gets its colour itself.
    for label in sorted(dict.fromkeys(labels), key=lambda label: label.lower() not in ATTENTION_COLOURS):
        attention = named_attention(label)
        if attention:
            nth = counts.get(attention, 0)
            counts[attention] = nth + 1
            colour = shaded(ATTENTION_COLOURS[attention], _SHADES[nth % len(_SHADES)])
            styles[label] = Style(colour, _MARKERS[nth % len(_MARKERS)], attention == "skyformer")
        else:
            styles[label] = Style(FIXED_COLOURS.get(label.lower()) or next(free))
    return styles


def label_colours(labels: Sequence[str]) -> dict[str, str]:
    """The colour of each label."""
    return {label: style.colour for label, style in label_styles(labels).items()}


def attention_of(label: str) -> str | None:
    """The attention that a label such as "Skyformer (128 landmarks)" begins with; None if it begins with no name."""
    word = re.match(r"[\w-]*", label.strip().lower().removeprefix("transformers "))
    return _attention_named(word[0]) if word else None


def named_attention(label: str) -> str | None:
    """The first attention that a label names anywhere, such as "the paper, Kernelized Attention"."""
    return next(filter(None, map(_attention_named, re.findall(r"[\w-]+", label.lower()))), None)


def _attention_named(word: str) -> str | None:
    first = OTHER_NAMES.get(word, word.partition("-")[0])
    return first if first in ATTENTION_COLOURS else None


def shaded(colour: str, share: float) -> str:
    """The colour with a share of white, or of black if the share is negative."""
    target, share = (255, share) if share > 0 else (0, -share)
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + share * (target - part)):02x}" for part in parts)


def _other_colours(taken: Sequence[str]) -> Iterator[str]:
    """The other colours again and again, without those that the figure has already if that leaves any."""
    yield from cycle([colour for colour in OTHER_COLOURS if colour not in taken] or OTHER_COLOURS)
