"""Pictures in letters, in half blocks and in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from skyformer.errors import DataError, InputError
from skyformer.lra import pictures

RAMP = np.array([[0, 255], [128, 64]], np.uint8)


def test_letters() -> None:
    assert pictures.in_letters(RAMP) == "  @@\n++::"


def test_half_blocks() -> None:
    drawn = pictures.in_half_blocks(RAMP)
    assert drawn.count("▀") == 2
    assert drawn.startswith("\x1b[38;2;0;0;0;48;2;128;128;128m")
    assert drawn.endswith("\x1b[0m")


def test_sheet(tmp_path: Path) -> None:
    pictures.save(pictures.sheet([RAMP] * 3, columns=2, scale=3), tmp_path / "deep" / "sheet.png")
    with Image.open(tmp_path / "deep" / "sheet.png") as sheet:
        assert sheet.size == (30, 30)
        assert sheet.getpixel((3 * 3, 2 * 3)) == 255


def test_nothing_to_show() -> None:
    with pytest.raises(InputError, match="at least one"):
        pictures.sheet([])


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot write"):
        pictures.save(pictures.sheet([RAMP]), tmp_path / "file" / "sheet.png")
