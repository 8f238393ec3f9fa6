"""A task in code: its specification, ids, labels, lengths, and errors that say which command to run."""

from __future__ import annotations

import pickle
import re
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

import skyformer.cli.data
from skyformer.errors import DataError, InputError, MissingExtraError, UnknownNameError, install_command
from skyformer.lra import Split, TaskDataset, load_task, prepare
from skyformer.lra.examples import Examples, Row
from skyformer.lra.listops import evaluate_symbols
from skyformer.lra.storage import SplitWriter
from skyformer.lra.tasks import TASKS, round_up, task_spec

from .fake_files import pair_files, review_files, write_folder


@pytest.mark.parametrize(
    ("name", "classes", "vocabulary", "length", "paired", "sizes"),
    [
        ("listops", 10, 16, 2000, False, [96_000, 2_000, 2_000]),
        ("text", 2, 257, 4000, False, [22_500, 2_500, 25_000]),
        ("retrieval", 2, 257, 4000, True, [147_086, 18_090, 17_437]),
        ("pathfinder", 2, 257, 1024, False, [160_000, 20_000, 20_000]),
        ("image", 10, 257, 1024, False, [45_000, 5_000, 10_000]),
    ],
)
def test_specifications(name: str, classes: int, vocabulary: int, length: int, paired: bool, sizes: list[int]) -> None:
    spec = task_spec(name)
    assert (spec.name, spec.num_classes, spec.vocab_size) == (name, classes, vocabulary)
    assert (spec.max_length, spec.paired) == (length, paired)
    assert [spec.sizes[split] for split in Split] == sizes


def test_order_unknown_names_and_rounding_up_to_multiples_of_64() -> None:
    assert list(TASKS) == ["listops", "text", "retrieval", "pathfinder", "image"]
    with pytest.raises(UnknownNameError, match="Did you mean 'listops'"):
        load_task("lstops")
    assert [round_up(length) for length in (0, 1, 64, 65, 2000)] == [64, 64, 64, 128, 2048]
    assert task_spec("text").padded_length == 4032


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


def test_pairs_and_max_length(tmp_path: Path) -> None:
    prepare("retrieval", source=write_folder(tmp_path / "pairs", pair_files(4)))
    example = load_task("retrieval").test[1]
    assert example.second is not None
    assert bytes((example.second - 1).tolist()) == b"cd" * 50
    assert example.label == 1
    short = load_task("retrieval", max_length=70)
    assert len(short.dev[0].tokens) == 70
    assert short.dev.lengths().tolist() == [70] * 4
    assert (short.spec.max_length, short.spec.padded_length) == (70, 128)
    assert load_task("retrieval").dev.lengths().min() > 70
    with pytest.raises(InputError, match="max_length must be at least 1; got 0"):
        load_task("retrieval", max_length=0)


def image_dataset(folder: Path, pixels: np.ndarray, max_length: int | None = None) -> TaskDataset:
    with SplitWriter(folder / "split.arrow", TASKS["image"]) as writer:
        writer.write(Examples.from_rows([Row(pixels, 3, "photo")]))
    return TaskDataset(folder / "split.arrow", TASKS["image"].cut_to(max_length))


@pytest.mark.parametrize(("max_length", "side"), [(1024, 32), (1023, 16), (256, 16), (255, 8), (1, 1)])
def test_photographs_are_averaged_down_to_the_largest_square_that_fits(
    tmp_path: Path, max_length: int, side: int
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, 1024, dtype=np.uint8)
    pixels[:4] = 0
    dataset = image_dataset(tmp_path, pixels, max_length)
    assert (dataset.spec.max_length, dataset.spec.image_side) == (side**2, side)
    assert dataset.lengths().tolist() == [side**2]
    blocks = pixels.reshape(side, 32 // side, side, 32 // side).astype(float)
    means = blocks.transpose(0, 2, 1, 3).reshape(side**2, -1).mean(-1)
    # Ids start at 1, so that a black pixel is not padding.
    assert np.abs(dataset[0].tokens.numpy() - 1 - means).max() <= 0.5


def test_short_listops_is_a_version_of_its_own() -> None:
    prepare("listops", limit=20, max_length=100)
    task = load_task("listops", limit=20, max_length=100)
    assert (task.spec.max_length, task.spec.padded_length) == (100, 128)
    assert 25 < task.train.lengths().min() <= task.train.lengths().max() < 100
    for split in Split:
        for example in task[split]:
            assert evaluate_symbols((example.tokens - 1).tolist()) == example.label
    message = (
        r"listops-length100-limit20 \(use it with --max-length 100\); run: skyformer data prepare listops --limit 20"
    )
    with pytest.raises(DataError, match=message):
        load_task("listops", limit=20)
    with pytest.raises(
        DataError, match=r"run: skyformer data prepare listops --max-length 64 --data-seed 2 --limit 20"
    ):
        load_task("listops", limit=20, max_length=64, seed=2)


def test_pickled_without_its_data_and_damage_says_what_to_run() -> None:
    options = {"limit": 50, "max_length": 64}
    prepared = prepare("listops", **options)
    train = load_task("listops", **options).train
    expected = train[7].tokens
    pickled = pickle.dumps(train)
    assert len(pickled) < 2_000
    assert torch.equal(pickle.loads(pickled)[7].tokens, expected)
    (prepared.folder / prepared.manifest.splits[Split.DEV].file).write_bytes(b"")
    with pytest.raises(DataError, match=r"run: skyformer data prepare listops --max-length 64 --limit 50 --force"):
        load_task("listops", **options)


def test_documented_examples() -> None:
    page = Path(__file__).parents[2] / "docs" / "data.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(block, {})


def test_importing_needs_no_extra_and_loading_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("skyformer.lra", "skyformer.cli."))]:
        monkeypatch.delitem(sys.modules, name)
    for parent, child in ((skyformer, "lra"), (skyformer.cli, "data")):
        monkeypatch.setattr(parent, child, getattr(parent, child))
    for name in ("datasets", "pyarrow", "PIL", "filelock", "platformdirs", "pandas"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("skyformer.cli.data", "skyformer.lra.tasks"):
        import_module(name)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("lra"))):
        _ = sys.modules["skyformer.lra"].load_task
