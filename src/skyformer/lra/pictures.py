"""Pictures of the image tasks: in a terminal as half blocks or letters, in a file as a sheet of many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from skyformer.errors import DataError, InputError
from skyformer.lra.examples import Symbols

_SHADES = " .:-=+*#%@"
_GAP = 2


def in_letters(image: Symbols) -> str:
    """A grey image as letters, two a pixel, darker pixels emptier."""
    shades = image.astype(np.int64) * len(_SHADES) // 256
    return "\n".join("".join(_SHADES[shade] * 2 for shade in row).rstrip() for row in shades)


def in_half_blocks(image: Symbols) -> str:
    """A grey image for terminals with colours: one letter is two pixels, one above the other."""
    lines = []
    for upper, lower in zip(image[::2], image[1::2], strict=True):
        cells = (
            f"\x1b[38;2;{top};{top};{top};48;2;{bottom};{bottom};{bottom}m▀"
            for top, bottom in zip(upper.tolist(), lower.tolist(), strict=True)
        )
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines)


def sheet(images: Sequence[Symbols], columns: int = 10, scale: int = 4) -> Image.Image:
    """Images of equal size side by side, enlarged without smoothing."""
    if not images:
        raise InputError("a sheet needs at least one image, got none")
    height, width = images[0].shape
    rows = -(-len(images) // columns)
    canvas = np.full((rows * (height + _GAP) + _GAP, columns * (width + _GAP) + _GAP), 96, np.uint8)
    for number, image in enumerate(images):
        top, left = (_GAP + place * (height + _GAP) for place in divmod(number, columns))
        canvas[top : top + height, left : left + width] = image
    small = Image.fromarray(canvas)
    return small.resize((small.width * scale, small.height * scale), Image.Resampling.NEAREST)


def save(picture: Image.Image, path: Path) -> None:
    """Write a picture as PNG."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path, format="PNG", optimize=True)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error}") from error
