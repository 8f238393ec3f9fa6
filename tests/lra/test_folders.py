"""Prepared folders: where they are, how versions are named, what their manifests say, and how examples are shown."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import platformdirs
import pytest
from PIL import Image

from skyformer.errors import DataError, InputError
from skyformer.lra import load_task, prepare
from skyformer.lra.folders import MANIFEST, Variant, data_dir_or_default, find_damage, read_manifest
from skyformer.lra.inspection import as_half_blocks, as_letters, inspect_folders, save_images
from skyformer.lra.tasks import Split


def test_given_then_environment_then_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYFORMER_DATA", str(tmp_path / "environment"))
    assert data_dir_or_default(tmp_path / "given") == tmp_path / "given"
    assert data_dir_or_default() == tmp_path / "environment"
    monkeypatch.delenv("SKYFORMER_DATA")
    assert data_dir_or_default() == platformdirs.user_data_path("skyformer", appauthor=False)


def test_variant_names() -> None:
    assert Variant.of("listops").name == "listops"
    assert Variant.of("pathfinder", level="hard").name == "pathfinder"
    assert Variant.of("pathfinder", level="easy", seed=3, limit=10).name == "pathfinder-easy-seed3-limit10"
    assert Variant.of("listops", max_length=256, seed=3, limit=10).name == "listops-length256-seed3-limit10"
    assert Variant.of("listops", max_length=2000).name == "listops"
    assert Variant.of("text", max_length=100).name == "text"
    assert Variant.of("image", max_length=1024).name == "image"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "text", "level": "easy"}, "only pathfinder has levels; got 'easy'"),
        ({"task": "pathfinder", "level": "brutal"}, "level must be one of easy, intermediate, hard; got 'brutal'"),
        ({"task": "text", "limit": 0}, "limit must be an integer of at least 1; got 0"),
        ({"task": "text", "seed": -1}, "seed must be an integer of at least 0; got -1"),
        ({"task": "listops", "max_length": 15}, "max_length of listops must be from 16 to 2000; got 15"),
        ({"task": "listops", "max_length": 2001}, "max_length of listops must be from 16 to 2000; got 2001"),
        ({"task": "pathfinder", "max_length": 1000}, "at least 1024 for pathfinder, because its thin lines .*got 1000"),
        ({"task": "text", "max_length": -1}, "max_length must be at least 1; got -1"),
    ],
)
def test_bad_variants(options: dict[str, str | int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Variant.of(**options)


def test_manifests_of_earlier_versions_are_read() -> None:
    """Before listops had lengths, and with the text of a manifest that was written then."""
    prepared = prepare("pathfinder", limit=1, level="easy")
    content = json.loads((prepared.folder / MANIFEST).read_text())
    assert content["variant"] == {"task": "pathfinder", "seed": 0, "limit": 1, "level": "easy", "max_length": None}
    assert set(content) == {"format", "skyformer", "variant", "source", "splits"}
    assert list(content["splits"]) == ["train", "dev", "test"]
    del content["variant"]["max_length"]
    (prepared.folder / MANIFEST).write_text(json.dumps(content))
    assert read_manifest(prepared.folder) == prepared.manifest
    assert load_task("pathfinder", limit=1, level="easy").manifest.variant.level == "easy"


def test_damage_is_found() -> None:
    prepared = prepare("listops", limit=20, max_length=64)
    path = prepared.folder / prepared.manifest.splits[Split.DEV].file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert find_damage(prepared.folder, prepared.manifest, check_hashes=False) == []
    assert "has changed" in find_damage(prepared.folder, prepared.manifest, check_hashes=True)[0]
    path.write_bytes(content[:-8])
    assert "instead of the manifest's" in find_damage(prepared.folder, prepared.manifest, check_hashes=False)[0]
    path.unlink()
    assert "is missing" in find_damage(prepared.folder, prepared.manifest, check_hashes=False)[0]
    (status,) = inspect_folders()
    assert (status.name, status.manifest) == ("listops-length64-limit20", prepared.manifest)
    assert status.problems == [f"{path} is missing"]


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"format": 99}', "\xff"])
def test_damaged_manifest(data_dir: Path, content: str) -> None:
    folder = data_dir / "listops"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=r"is damaged.*; prepare the task again with --force"):
        read_manifest(folder)
    (status,) = inspect_folders()
    assert status.manifest is None
    assert "is damaged" in status.problems[0]


def test_a_manifest_lists_all_splits_in_its_folder() -> None:
    folder = prepare("listops", limit=5, max_length=64).folder
    manifest = json.loads((folder / MANIFEST).read_text())
    dev = manifest["splits"].pop("dev")
    for splits, words in (({}, "no split dev"), ({"dev": dev | {"file": "../other.arrow"}}, "not in its folder")):
        (folder / MANIFEST).write_text(json.dumps(manifest | {"splits": manifest["splits"] | splits}))
        with pytest.raises(DataError, match=f"is damaged: .*{words}.*; prepare the task again"):
            read_manifest(folder)


def test_manifest_of_another_format() -> None:
    folder = prepare("listops", limit=5, max_length=64).folder
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(DataError, match="has format 2, but this version reads format 1; prepare the task again"):
        read_manifest(folder)


RAMP = np.array([[0, 255], [128, 64]], np.uint8)


def test_images_in_a_terminal() -> None:
    assert as_letters(RAMP) == "  @@\n++::"
    drawn = as_half_blocks(RAMP)
    assert drawn.count("▀") == 2
    assert drawn.startswith("\x1b[38;2;0;0;0;48;2;128;128;128m")
    assert drawn.endswith("\x1b[0m")


def test_images_in_a_file(tmp_path: Path) -> None:
    save_images([RAMP] * 3, tmp_path / "deep" / "sheet.png", columns=2, scale=3)
    with Image.open(tmp_path / "deep" / "sheet.png") as sheet:
        assert (sheet.format, sheet.size) == ("PNG", (30, 30))
        assert sheet.getpixel((3 * 3, 2 * 3)) == 255
    with pytest.raises(DataError, match="cannot write"):
        save_images([RAMP], tmp_path / "deep" / "sheet.png" / "inside.png")
