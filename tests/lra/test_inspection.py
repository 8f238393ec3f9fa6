"""Images as text for a terminal, and as one PNG file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from skyformer.errors import DataError
from skyformer.lra.inspection import as_half_blocks, as_letters, save_images

RAMP = np.array([[0, 255], [128, 64]], np.uint8)


def test_in_a_terminal() -> None:
    assert as_letters(RAMP) == "  @@\n++::"
    drawn = as_half_blocks(RAMP)
    assert drawn.count("▀") == 2
    assert drawn.startswith("\x1b[38;2;0;0;0;48;2;128;128;128m")
    assert drawn.endswith("\x1b[0m")


def test_in_a_file(tmp_path: Path) -> None:
    save_images([RAMP] * 3, tmp_path / "deep" / "sheet.png", columns=2, scale=3)
    with Image.open(tmp_path / "deep" / "sheet.png") as sheet:
        assert (sheet.format, sheet.size) == ("PNG", (30, 30))
        assert sheet.getpixel((3 * 3, 2 * 3)) == 255


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot write"):
        save_images([RAMP], tmp_path / "file" / "sheet.png")
