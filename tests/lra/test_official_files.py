"""IMDb, CIFAR-10 and the pairs of papers: read from the archive or a folder, and checked."""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from skyformer.errors import DataError
from skyformer.lra import image, retrieval, text
from skyformer.lra.examples import Examples
from skyformer.lra.tasks import Split
from tests.helpers import refused

from .fake_files import cifar_files, pair_files, pair_lines, review_files, write_folder, write_tar

Read = Callable[[Path], Iterable[tuple[Split, Examples]]]
Files = dict[str, bytes]
OTHER_REVIEWS = {"aclImdb/README": b"", "aclImdb/train/unsup/0_0.txt": b"none", "aclImdb/train/urls_pos.txt": b""}
TASKS: dict[str, tuple[Read, Callable[[pytest.MonkeyPatch], Files], list[Split], str]] = {
    "text": (
        text.read,
        lambda _: review_files(12) | OTHER_REVIEWS,
        [Split.TRAIN, Split.TEST],
        "train/neg/0_2.txt",
    ),
    "image": (
        image.read,
        lambda monkeypatch: {f"cifar-10-batches-bin/{name}": data for name, data in cifar_files(monkeypatch).items()},
        [Split.TRAIN] * 5 + [Split.TEST],
        "data_batch_1.bin:0",
    ),
    "retrieval": (
        retrieval.read,
        lambda _: {f"lra_release/tsv_data/{name}": data for name, data in pair_files(7).items()},
        list(Split),
        "P0 Q0",
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_archive_and_folder_give_the_same(tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, make, splits, source = TASKS[task]
    files = make(monkeypatch)
    archive = write_tar(tmp_path / "archive.gz", {"other.bin": b"0" * 100_000} | files)
    parts, folder = list(read(archive)), list(read(write_folder(tmp_path / "folder", files)))
    assert [split for split, _ in parts] == splits
    assert parts[0][1].sources[0] == source
    for (_, one), (_, other) in zip(parts, folder, strict=True):
        assert one.sources == other.sources
        assert np.array_equal(one.labels, other.labels)
        for mine, theirs in zip(one.texts, other.texts, strict=True):
            assert mine.values.tobytes() == theirs.values.tobytes()


def test_reviews_are_in_order_of_their_numbers_and_cut(tmp_path: Path) -> None:
    files = review_files(12)
    files["aclImdb/train/pos/0_7.txt"] = b"x" * 9_999
    parts = dict(text.read(write_tar(tmp_path / "archive.gz", dict(reversed(files.items())))))
    assert parts[Split.TEST].sources[9:12] == ["test/neg/9_2.txt", "test/neg/10_2.txt", "test/neg/11_2.txt"]
    train = parts[Split.TRAIN]
    assert train.labels.tolist() == [0] * 12 + [1] * 12
    assert train.tokens.rows()[0].tobytes() == "neg train 0 é".encode()
    assert train.tokens.lengths.max() == 4_000


def test_images_become_grey() -> None:
    planes = np.array([[[255, 0, 0, 255, 10], [0, 255, 0, 255, 20], [0, 0, 255, 255, 30]]], np.uint8)
    assert image.grey(planes).tolist() == [[76, 150, 29, 255, 18]]


@pytest.mark.parametrize("suffix", ["", ".xz"])
def test_pairs_may_be_compressed_and_named_by_one_file(tmp_path: Path, suffix: str) -> None:
    pack = lzma.compress if suffix else bytes
    write_folder(tmp_path, {f"tsv/{name}{suffix}": pack(data) for name, data in pair_files(501).items()})
    for path in (tmp_path, tmp_path / "tsv" / f"new_aan_pairs.eval.tsv{suffix}"):
        totals = dict.fromkeys(Split, 0)
        for split, examples in retrieval.read(path):
            totals[split] += len(examples)
        assert totals == dict.fromkeys(Split, 501)


def test_lines_of_pairs(tmp_path: Path) -> None:
    lines = pair_lines(2) + b'1.0\ta\tb\t"open\tclose" it\n' + pair_lines(1, length=3_000)
    write_folder(tmp_path, pair_files(1) | {"new_aan_pairs.train.tsv": lines})
    _, examples = next(retrieval.read(tmp_path))
    assert examples.labels.tolist() == [0, 1, 1, 0]
    assert examples.sources == ["P0 Q0", "P1 Q1", "a b", "P0 Q0"]
    assert examples.second is not None
    assert examples.second.rows()[0].tobytes() == b"cd" * 50
    # Quotes have no meaning.
    assert examples.tokens.rows()[2].tobytes() == b'"open'
    # Both texts are cut.
    assert examples.tokens.lengths.tolist()[3] == examples.second.lengths.tolist()[3] == 4_000


PAIRS = "new_aan_pairs.train.tsv"


def changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Files], Files]:
    return lambda files: {old: change(data) if old == name else data for old, data in files.items()}


def without(part: str) -> Callable[[Files], Files]:
    return lambda files: {name: data for name, data in files.items() if part not in name}


@pytest.mark.parametrize(
    ("task", "change", "words"),
    [
        ("text", without("train/pos"), ["no reviews in"]),
        ("text", without("test/neg"), ["no reviews in"]),
        ("image", without("test_batch.bin"), ["lacks test_batch.bin"]),
        (
            "image",
            changed("cifar-10-batches-bin/data_batch_3.bin", lambda data: data[:-1] + b"!"),
            ["data_batch_3.bin is damaged, its MD5 is"],
        ),
        ("retrieval", without("eval"), ["no new_aan_pairs.eval.tsv"]),
        *(
            ("retrieval", changed(f"lra_release/tsv_data/{PAIRS}", lambda data, line=line: data + line), words)
            for line, words in [
                (b"1.0\ta\tb\ttext\n", ["line 8: expected five fields", "got 4"]),
                (b"2.0\ta\tb\ttext\ttext\n", ["line 8: the label must be 0.0 or 1.0; got b'2.0'"]),
                (b"\n", ["line 8: expected five fields"]),
            ]
        ),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_bad_files_are_named(
    tmp_path: Path,
    task: str,
    change: Callable[[Files], Files],
    words: list[str],
    packed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, make, *_ = TASKS[task]
    files = change(make(monkeypatch))
    source = write_tar(tmp_path / "archive.gz", files) if packed else write_folder(tmp_path / "folder", files)
    with refused(DataError, *words):
        list(read(source))


def test_truncated_pairs_are_named(tmp_path: Path) -> None:
    files = {f"{name}.xz": lzma.compress(data) for name, data in pair_files(50).items()}
    files[f"{PAIRS}.xz"] = files[f"{PAIRS}.xz"][:-20]
    with refused(DataError, "train.tsv.xz is truncated"):
        list(retrieval.read(write_folder(tmp_path, files)))
