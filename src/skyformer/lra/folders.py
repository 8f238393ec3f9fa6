"""Prepared data on disk: which folder holds which version of a task, and the manifest that describes its files.

The folder of a task contains one Arrow file per split, named after its content, and `manifest.json`, which has the size
and the SHA-256 sum of each file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import platformdirs
from pydantic import ConfigDict

from skyformer.checks import check_at_least
from skyformer.errors import DataError, InputError
from skyformer.files import dump_json, read_json, sha256_of, write_atomic
from skyformer.lra.listops import ListOpsOptions
from skyformer.lra.own import OwnData
from skyformer.lra.pathfinder import Level
from skyformer.lra.tasks import Split, TaskSpec, task_spec
from skyformer.settings import Settings

ENVIRONMENT_VARIABLE = "SKYFORMER_DATA"
MANIFEST = "manifest.json"
VERIFIED = ".verified.json"
"""Sizes and times of the files when their SHA-256 sums were last checked."""
FORMAT_VERSION = 1
_LARGEST_SEED = 2**63 - 1
_PREPARE_AGAIN = "prepare the task again with --force"


class _Recorded(Settings):
    """Part of a manifest; not strict, because JSON has no tuples and no enumerations."""

    model_config = ConfigDict(strict=False)


class Variant(_Recorded):
    """A version of a task: the options that decide its content."""

    task: str
    seed: int = 0
    limit: int | None = None
    level: Level | None = None
    max_length: int | None = None
    own: OwnData | None = None

    @classmethod
    def of(
        cls,
        task: str,
        *,
        seed: int = 0,
        limit: int | None = None,
        level: str | None = None,
        max_length: int | None = None,
        own: OwnData | None = None,
    ) -> Variant:
        """The version with these options, each checked; `own` is data of one's own, which `task` names.

        Only ListOps has a version per `max_length`; the examples of other tasks are stored complete.
        """
        (task_spec(task) if own is None else own.spec(task)).cut_to(max_length)
        check_at_least("seed", seed, 0, _LARGEST_SEED)
        if limit is not None:
            check_at_least("limit", limit, 1)
        if level is not None and task != "pathfinder":
            raise InputError(f"level must be left out for {task}, because only pathfinder has levels; got {level!r}")
        return cls(
            task=task,
            seed=seed,
            limit=limit,
            level=_level(level) if task == "pathfinder" else None,
            max_length=_shorter_than_default(max_length) if task == "listops" else None,
            own=own,
        )

    @property
    def spec(self) -> TaskSpec:
        spec = task_spec(self.task) if self.own is None else self.own.spec(self.task)
        return spec.cut_to(self.max_length)

    @property
    def name(self) -> str:
        """The name of the folder: the task, followed by the options that differ from the default."""
        if self.own is not None:
            return f"{self.task}-{self.own.digest}"
        prefixes = {"--level": "", "--max-length": "length", "--data-seed": "seed", "--limit": "limit"}
        return "-".join([self.task, *(f"{prefixes[option]}{value}" for option, value in self.options.items())])

    @property
    def options(self) -> dict[str, object]:
        """The options of `skyformer data prepare` and `skyformer train` that differ from the default."""
        level = None if self.level == Level.HARD else self.level
        values = {
            "--level": level,
            "--max-length": self.max_length,
            "--data-seed": self.seed or None,
            "--limit": self.limit,
        }
        return {option: value for option, value in values.items() if value is not None}

    def difference(self, other: Variant) -> str:
        """The options to give, or to leave out, to have this version instead of `other`."""
        give = [f"{option} {value}" for option, value in self.options.items() if other.options.get(option) != value]
        missing = [option for option in other.options if option not in self.options]
        settings = [f"--set task.{option.removeprefix('--').replace('-', '_')}=null" for option in missing]
        leave = [f"without {', '.join(missing)} (or {' '.join(settings)} where a preset sets it)"] if missing else []
        return " and ".join([f"with {' '.join(give)}"] * bool(give) + leave)

    def size(self, split: Split) -> int:
        """Number of examples of a generated split."""
        complete = self.spec.sizes[split]
        return complete if self.limit is None else min(self.limit, complete)


def _level(name: str | None) -> Level:
    if name is None:
        return Level.HARD
    if name not in list(Level):
        raise InputError(f"level must be one of {', '.join(Level)}; got {name!r}")
    return Level(name)


def _shorter_than_default(max_length: int | None) -> int | None:
    if max_length is None or ListOpsOptions.up_to(max_length) == ListOpsOptions():
        return None
    return max_length


class SplitRecord(_Recorded):
    """The manifest's entry for one Arrow file."""

    file: str
    examples: int
    symbols: int
    shortest: int
    longest: int
    label_counts: tuple[int, ...]
    bytes: int
    sha256: str


class Manifest(_Recorded):
    """What a folder contains, and where it comes from."""

    format: int
    skyformer: str
    variant: Variant
    source: str
    splits: dict[Split, SplitRecord]

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.splits.values())

    @property
    def hashes(self) -> dict[str, str]:
        """The SHA-256 sum of each split's file."""
        return {str(split): self.splits[split].sha256 for split in Split}


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None if the folder has none."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = Manifest(**read_json(path))
        if manifest.format != FORMAT_VERSION:
            raise DataError(f"{path} has format {manifest.format}, but this version reads format {FORMAT_VERSION}")
        lacking = [split for split in Split if split not in manifest.splits]
        outside = [record.file for record in manifest.splits.values() if Path(record.file).name != record.file]
        if lacking or outside:
            wrong = f"no split {lacking[0]}" if lacking else f"the file {outside[0]!r}, which is not in its folder"
            raise DataError(f"{path} is damaged: it lists {wrong}")
    except DataError as error:
        raise DataError(f"{error}; {_PREPARE_AGAIN}") from error
    except InputError as error:
        raise DataError(f"{path} is damaged ({error}); {_PREPARE_AGAIN}") from error
    return manifest


def find_damage(folder: Path, manifest: Manifest, *, check_hashes: bool) -> list[str]:
    """What is wrong with the files of a manifest: missing, wrong size, or with `check_hashes` wrong content."""
    problems = []
    for record in manifest.splits.values():
        path = folder / record.file
        if not path.exists():
            problems.append(f"{path} is missing")
        elif path.stat().st_size != record.bytes:
            problems.append(f"{path} has {path.stat().st_size:,} bytes instead of the manifest's {record.bytes:,}")
        elif check_hashes and sha256_of(path) != record.sha256:
            problems.append(f"{path} has changed: its SHA-256 sum differs from the manifest's")
    return problems


def find_changed(folder: Path, manifest: Manifest) -> list[str]:
    """As `find_damage` with hashes, but quick if no file has changed its size or times since the last check."""
    marks = {record.file: _mark(folder / record.file, record) for record in manifest.splits.values()}
    stamp = folder / VERIFIED
    with suppress(DataError):
        if stamp.exists() and read_json(stamp) == marks:
            return []
    problems = find_damage(folder, manifest, check_hashes=True)
    if not problems:
        with suppress(OSError):  # in a folder that is read only, the files are hashed every time
            write_atomic(stamp, dump_json(marks))
    return problems


def _mark(path: Path, record: SplitRecord) -> list[int | str]:
    """What changes if a file does: its size and times, and the sum it should have."""
    try:
        status = path.stat()
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, record.sha256]


def data_dir_or_default(data_dir: Path | str | None = None) -> Path:
    """The given folder, or else that of the environment variable SKYFORMER_DATA, or else the user's data folder."""
    chosen = data_dir or os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(chosen).expanduser() if chosen else platformdirs.user_data_path("skyformer", appauthor=False)


def prepared_folders(root: Path) -> Iterator[Path]:
    """The folders in `root` that contain a prepared task."""
    for manifest in sorted(root.glob(f"*/{MANIFEST}")):
        yield manifest.parent


def find_prepared(variant: Variant, data_dir: Path | str | None = None) -> tuple[Path, Manifest]:
    """Folder and manifest of a prepared task; if it is missing or damaged, the error says which command to run."""
    folder = data_dir_or_default(data_dir) / variant.name
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(
            f"{variant.name} is not prepared in {folder.parent}{_other_versions(folder, variant)}; "
            f"run: {prepare_command(variant, data_dir)}"
        )
    problems = find_changed(folder, manifest)
    if problems:
        raise DataError(f"{problems[0]}; {_repair(variant, data_dir)}")
    return folder, manifest


def _repair(variant: Variant, data_dir: Path | str | None) -> str:
    """What to do about damaged data."""
    if variant.own is not None:
        return "train on the same file again (skyformer train --data), which prepares it again"
    return f"run: {prepare_command(variant, data_dir)} --force"


def _other_versions(folder: Path, variant: Variant) -> str:
    """Prepared versions of the same task, because one of them may be the intended one."""
    others = []
    for path in prepared_folders(folder.parent):
        with suppress(DataError):
            manifest = read_manifest(path)
            if manifest is not None and manifest.variant.task == variant.task:
                others.append(f"{path.name} (use it {manifest.variant.difference(variant)})")
    if not others:
        return ""
    return f"; prepared are: {', '.join(others)}"


def prepare_command(variant: Variant, data_dir: Path | str | None = None) -> str:
    """The command that prepares a version of a task."""
    options = {} if data_dir is None else {"--data-dir": data_dir}
    words = [f"{option} {value}" for option, value in (options | variant.options).items()]
    return " ".join(["skyformer data prepare", variant.task, *words])
