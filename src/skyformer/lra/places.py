"""Where data lies: the folder for all of it, one for each prepared task, one for downloads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from skyformer.lra.storage import MANIFEST, Variant

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
