"""`skyformer data` as a user types it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from PIL import Image

from skyformer.errors import DataError, install_command
from skyformer.lra import preparation
from tests.cli.conftest import CommandLine
from tests.lra.fake_files import pair_files, review_files, write_folder, write_tar

SMALL = ("listops", "--max-length", 64, "--limit", 5)


@pytest.fixture
def data(skyformer: CommandLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys, "data")


def test_prepare_prints_folder_and_size(data: CommandLine, data_dir: Path, tmp_path: Path) -> None:
    outcome = data("prepare", *SMALL)
    assert outcome.code == 0
    assert str(data_dir / "listops-length64-limit5") in outcome.output
    assert "5 train, 5 dev, 5 test; 0.0 MB" in outcome.output
    assert "was already prepared" in data("prepare", *SMALL).output
    assert "is prepared" in data("prepare", *SMALL, "--force").output
    archive = write_tar(tmp_path / "aclImdb.tar.xz", review_files(10), "w:xz")
    outcome = data("prepare", "text", "--from", archive)
    assert "18 train, 2 dev, 20 test" in outcome.output
    assert f"note: {archive} has 40 examples; the complete official data has 50,000" in outcome.errors


def test_prepare_all_continues_after_a_failure(data: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise DataError("cannot download")

    monkeypatch.setattr(preparation.Download, "run", fail)
    outcome = data("prepare", "all", "--limit", 3, "--level", "easy", "--max-length", 64, "--workers", 1)
    assert outcome.code == 2
    assert "listops-length64-limit3 is prepared" in outcome.output
    assert "pathfinder-easy-limit3 is prepared" in outcome.output
    assert "3 of 5 tasks could not be prepared: text, retrieval, image" in outcome.errors


def test_list_and_show_pairs(data: CommandLine, tmp_path: Path) -> None:
    data("prepare", "retrieval", "--from", write_folder(tmp_path / "pairs", pair_files(4)))
    lines = data("list").output.splitlines()
    assert lines[0] == f"data folder: {tmp_path / 'data'}"
    assert "4 train, 4 dev, 4 test" in lines[1]
    assert "source: pairs" in lines[1]
    assert len(lines) == 6
    assert "skyformer data prepare listops" in "\n".join(lines[2:])
    shown = data("show", "retrieval", "-n", 1).output
    assert "abab" in shown
    assert "cdcd" in shown


def test_show_text_cannot_steer_the_terminal(data: CommandLine, tmp_path: Path) -> None:
    files = dict.fromkeys(review_files(10), b"\x1b[31mred\x07")
    data("prepare", "text", "--from", write_folder(tmp_path / "reviews", files))
    outcome = data("show", "text", "-n", 3)
    assert outcome.code == 0
    assert "red" in outcome.output
    assert "\x1b" not in outcome.output


def test_show_pictures(data: CommandLine, tmp_path: Path) -> None:
    options = ("pathfinder", "--level", "easy", "--limit", 4)
    data("prepare", *options, "--workers", 1)
    drawn = data("show", *options, "-n", 1).output
    assert len(drawn.splitlines()) >= 32
    assert "##" in drawn
    assert data("show", *options, "-n", 4, "--png", tmp_path / "paths.png").code == 0
    with Image.open(tmp_path / "paths.png") as picture:
        assert picture.format == "PNG"


def test_show_and_verify_expressions(data: CommandLine, data_dir: Path, tmp_path: Path) -> None:
    assert "nothing is prepared" in data("verify").output
    data("prepare", *SMALL)
    shown = data("show", *SMALL, "-n", 2, "--split", "dev").output
    assert shown.count("label") == 2
    assert "[M" in shown
    assert "--png needs a task with images" in data.refused("show", *SMALL, "--png", tmp_path / "x.png")
    assert data("verify").output == "listops-length64-limit5: ok\n"
    (file,) = (data_dir / "listops-length64-limit5").glob("dev-*.arrow")
    file.write_bytes(file.read_bytes().replace(b"\x01", b"\x02", 1))
    outcome = data("verify", "listops-length64-limit5")
    assert outcome.code == 2
    assert file.name in outcome.output
    assert "damaged: listops-length64-limit5" in outcome.errors
    assert "'text' is not prepared" in data("verify", "text").errors
    file.unlink()
    assert f"damaged: {file} is missing" in data("list").output


def test_without_the_extra_it_says_what_to_install(data: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    monkeypatch.delitem(sys.modules, "skyformer.lra.folders", raising=False)
    assert install_command("lra") in data.refused("list")
