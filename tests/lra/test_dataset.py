"""A prepared task in code: ids, labels, lengths, and clear words when it is not there."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from skyformer.errors import DataError, InputError, UnknownNameError
from skyformer.lra import Split, load_task, prepare
from skyformer.lra.examples import Examples, Ragged
from skyformer.lra.listops import evaluate_symbols
from skyformer.lra.storage import SplitWriter
from skyformer.lra.tasks import TASKS

from .stand_ins import pair_files, review_files, write_folder


def test_items(tmp_path: Path) -> None:
    prepare("text", source=write_folder(tmp_path / "reviews", review_files(10)))
    task = load_task("text")
    example = task.train[0]
    assert example.tokens.dtype == torch.int64
    assert bytes((example.tokens - 1).tolist()) == task.train.stored.tokens[0].tobytes()
    assert (example.label, example.id, example.second) == (0, 0, None)
    assert task.train[-1].id == len(task.train) - 1
    with pytest.raises(IndexError):
        task.train[len(task.train)]


def test_pairs(tmp_path: Path) -> None:
    prepare("retrieval", source=write_folder(tmp_path / "pairs", pair_files(4)))
    example = load_task("retrieval").test[1]
    assert example.second is not None
    assert bytes((example.second - 1).tolist()) == b"cd" * 50
    assert example.label == 1


def test_black_pixels_are_not_padding(tmp_path: Path) -> None:
    from skyformer.lra.dataset import TaskDataset

    with SplitWriter(tmp_path / "split.arrow", TASKS["image"]) as writer:
        black = Ragged.from_matrix(np.zeros((1, 1024), np.uint8))
        writer.write(Examples(black, np.array([3], np.uint8), ["night"]))
    tokens = TaskDataset(tmp_path / "split.arrow", TASKS["image"])[0].tokens
    assert tokens.tolist() == [1] * 1024


def test_max_length_cuts_texts_as_they_are_loaded(tmp_path: Path) -> None:
    prepare("retrieval", source=write_folder(tmp_path / "pairs", pair_files(4)))
    task = load_task("retrieval", max_length=70)
    assert len(task.dev[0].tokens) == 70
    assert task.dev.lengths().tolist() == [70] * 4
    assert (task.spec.max_length, task.spec.padded_length) == (70, 128)
    assert load_task("retrieval").dev.lengths().min() > 70
    with pytest.raises(InputError, match="max_length must be at least 1, got 0"):
        load_task("retrieval", max_length=0)


def test_short_listops_is_a_version_of_its_own() -> None:
    prepare("listops", limit=20, max_length=100)
    task = load_task("listops", limit=20, max_length=100)
    assert (task.spec.max_length, task.spec.padded_length) == (100, 128)
    assert 25 < task.train.lengths().min() <= task.train.lengths().max() < 100
    for split in Split:
        for example in task[split]:
            assert evaluate_symbols((example.tokens - 1).tolist()) == example.label
    with pytest.raises(DataError, match=r"though listops-length100-limit20 is, found .*; run: .* listops --limit 20"):
        load_task("listops", limit=20)
    with pytest.raises(DataError, match=r"run: skyformer data prepare listops --max-length 64 --limit 20"):
        load_task("listops", limit=20, max_length=64)


def test_photographs_are_averaged_down_to_the_largest_square_that_fits(tmp_path: Path) -> None:
    from skyformer.lra.dataset import TaskDataset

    pixels = np.random.default_rng(0).integers(0, 256, (1, 1024), dtype=np.uint8)
    with SplitWriter(tmp_path / "split.arrow", TASKS["image"]) as writer:
        writer.write(Examples(Ragged.from_matrix(pixels), np.array([3], np.uint8), ["photo"]))
    for max_length, side in ((1024, 32), (1023, 16), (256, 16), (255, 8), (1, 1)):
        spec = TASKS["image"].cut_to(max_length)
        assert (spec.max_length, spec.image_side) == (side**2, side)
        dataset = TaskDataset(tmp_path / "split.arrow", spec)
        assert dataset.lengths().tolist() == [side**2]
        blocks = pixels.reshape(32, 32).reshape(side, 32 // side, side, 32 // side).astype(float)
        means = blocks.transpose(0, 2, 1, 3).reshape(side**2, -1).mean(-1)
        assert np.abs(dataset[0].tokens.numpy() - 1 - means).max() <= 0.5


def test_drawings_cannot_be_made_smaller() -> None:
    with pytest.raises(InputError, match=r"at least 1024 for pathfinder, whose thin lines .*; got 512"):
        load_task("pathfinder", max_length=512)


def test_specification_and_manifest() -> None:
    prepare("pathfinder", limit=3, level="easy")
    task = load_task("pathfinder", limit=3, level="easy")
    assert task.spec is TASKS["pathfinder"]
    assert task.manifest.variant.level == "easy"
    assert len(task[Split.TEST]) == 3


def test_survives_pickling_without_its_data() -> None:
    prepare("listops", limit=50)
    train = load_task("listops", limit=50).train
    expected = train[7].tokens
    sent = pickle.dumps(train)
    assert len(sent) < 2_000
    assert torch.equal(pickle.loads(sent)[7].tokens, expected)


def test_not_prepared_says_what_to_run() -> None:
    with pytest.raises(DataError, match=r"run: skyformer data prepare listops --seed 2 --limit 7"):
        load_task("listops", limit=7, seed=2)
    prepare("listops", limit=5)
    with pytest.raises(DataError, match="though listops-limit5 is"):
        load_task("listops")


def test_damaged_says_what_to_run() -> None:
    prepared = prepare("listops", limit=5)
    (prepared.folder / prepared.manifest.splits[Split.DEV].file).write_bytes(b"")
    with pytest.raises(DataError, match="--force"):
        load_task("listops", limit=5)


def test_unknown_task() -> None:
    with pytest.raises(UnknownNameError, match="'pathfinder'"):
        load_task("pathfindr")


def test_importing_is_cheap() -> None:
    """Neither the package nor its table of tasks brings in the heavy libraries."""
    check = (
        "import sys, skyformer.lra, skyformer.lra.tasks; "
        "sys.exit(bool({'datasets', 'pyarrow', 'PIL', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
