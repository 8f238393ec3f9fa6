"""Look at prepared data: list and verify its folders, and show examples as text or pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from skyformer.errors import DataError
from skyformer.files import write_atomic
from skyformer.lra.examples import Symbols
from skyformer.lra.folders import Manifest, data_dir_or_default, find_damage, prepared_folders, read_manifest
from skyformer.lra.listops import to_source
from skyformer.lra.tasks import TaskSpec

_SHADES = " .:-=+*#%@"
_GAP = 2
_GAP_SHADE = 96


@dataclass(frozen=True)
class FolderStatus:
    """A folder of prepared data, its manifest (None if that cannot be read), and what is wrong with it."""

    name: str
    manifest: Manifest | None
    problems: list[str]


def inspect_folders(
    data_dir: Path | str | None = None, names: Sequence[str] = (), *, check_hashes: bool = False
) -> list[FolderStatus]:
    """The state of all prepared folders, or of those called `names`.

    Args:
        check_hashes: compare the content of each file with its SHA-256 sum in the manifest, not only its size.
    """
    root = data_dir_or_default(data_dir)
    folders = {folder.name: folder for folder in prepared_folders(root)}
    for name in names:
        if name not in folders:
            raise DataError(f"{name!r} is not prepared in {root}; prepared are: {', '.join(folders) or 'none'}")
    return [_inspect(folders[name], check_hashes) for name in names or folders]


def _inspect(folder: Path, check_hashes: bool) -> FolderStatus:
    try:
        manifest = read_manifest(folder)
    except DataError as error:
        return FolderStatus(folder.name, None, [str(error)])
    problems = find_damage(folder, manifest, check_hashes=check_hashes) if manifest else ["it has no manifest"]
    return FolderStatus(folder.name, manifest, problems)


def as_text(symbols: Symbols, spec: TaskSpec) -> str:
    """An expression or a text, without characters that would control a terminal."""
    if spec.name == "listops":
        return to_source(symbols)
    decoded = symbols.tobytes().decode("utf-8", errors="replace")
    return "".join(letter if letter.isprintable() else " " for letter in decoded)


def as_letters(image: Symbols) -> str:
    """A grey image as text: two characters per pixel, emptier for darker pixels."""
    shades = image.astype(np.int64) * len(_SHADES) // 256
    return "\n".join("".join(_SHADES[shade] * 2 for shade in row).rstrip() for row in shades)


def as_half_blocks(image: Symbols) -> str:
    """A grey image for a terminal with colours: one character shows two pixels, one above the other."""
    lines = []
    for upper, lower in zip(image[::2].tolist(), image[1::2].tolist(), strict=True):
        cells = (f"\x1b[38;2;{top};{top};{top};48;2;{low};{low};{low}m▀" for top, low in zip(upper, lower, strict=True))
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines)


def save_images(images: Sequence[Symbols], path: Path, columns: int = 10, scale: int = 4) -> None:
    """Write images of equal size side by side to one PNG file, enlarged without smoothing."""
    height, width = images[0].shape
    rows = -(-len(images) // columns)
    canvas = np.full((rows * (height + _GAP) + _GAP, columns * (width + _GAP) + _GAP), _GAP_SHADE, np.uint8)
    for number, image in enumerate(images):
        top, left = (_GAP + place * (height + _GAP) for place in divmod(number, columns))
        canvas[top : top + height, left : left + width] = image
    png = BytesIO()
    Image.fromarray(canvas.repeat(scale, axis=0).repeat(scale, axis=1)).save(png, format="PNG", optimize=True)
    try:
        write_atomic(path, png.getvalue())
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
