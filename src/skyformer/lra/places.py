"""Where data lies: the folder for all of it, one for each prepared task, one for downloads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from skyformer.errors import DataError
from skyformer.lra.storage import MANIFEST, Manifest, Variant, damage, read_manifest

ENVIRONMENT_VARIABLE = "SKYFORMER_DATA"


def data_dir_or_default(data_dir: Path | str | None = None) -> Path:
    """The folder given, or that of the environment, or the platform's place for a user's data."""
    chosen = data_dir or os.environ.get(ENVIRONMENT_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return platformdirs.user_data_path("skyformer", appauthor=False)


def task_dir(root: Path, variant: Variant) -> Path:
    return root / variant.name


def downloads_dir(root: Path) -> Path:
    return root / "downloads"


def prepared_dirs(root: Path) -> Iterator[Path]:
    """The folders under `root` that hold a prepared task."""
    for manifest in sorted(root.glob(f"*/{MANIFEST}")):
        yield manifest.parent


def find(variant: Variant, data_dir: Path | str | None = None) -> tuple[Path, Manifest]:
    """Folder and manifest of a prepared task; if it is not there or not whole, an error says what to do."""
    folder = task_dir(data_dir_or_default(data_dir), variant)
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(
            f"{variant.name} is not prepared in {folder.parent}{_alternatives(folder, variant)}; "
            f"run: {prepare_command(variant, data_dir)}"
        )
    problems = damage(folder, manifest, thorough=False)
    if problems:
        raise DataError(f"{problems[0]}; run: {prepare_command(variant, data_dir)} --force")
    return folder, manifest


def _alternatives(folder: Path, variant: Variant) -> str:
    """Other versions of the same task that are there, because one of them may be what is meant."""
    others = [path.name for path in prepared_dirs(folder.parent) if path.name.split("-")[0] == variant.task]
    return f", though {', '.join(others)} is, found with the options it was prepared with" if others else ""


def prepare_command(variant: Variant, data_dir: Path | str | None = None) -> str:
    """What a user types to make a variant ready, in the folder that was asked for."""
    parts = ["skyformer data prepare", variant.task]
    if data_dir is not None:
        parts.append(f"--data-dir {data_dir}")
    if variant.seed:
        parts.append(f"--seed {variant.seed}")
    if variant.max_length is not None:
        parts.append(f"--max-length {variant.max_length}")
    if variant.limit is not None:
        parts.append(f"--limit {variant.limit}")
    if variant.level is not None and variant.level != "hard":
        parts.append(f"--level {variant.level}")
    return " ".join(parts)
