"""Own data from every kind of source: the same examples, labels by name, seeded splits, and clear errors."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyformer.errors import DataError, InputError
from skyformer.lra.dataset import Task, load_variant
from skyformer.lra.preparation import Prepared
from skyformer.lra.tasks import Split
from skyformer.own import own_data
from skyformer.own.preparation import prepare_again
from skyformer.training.presets import load_preset
from skyformer.training.runs import create_run
from tests.helpers import refused

ROWS = [{"text": f'"{word}" film,\nnumber {n} é', "label": word} for n in range(20) for word in ("good", "bad", "good")]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_gzip(path: Path, rows: list[dict[str, Any]]) -> Path:
    # Without the time of writing, which would make two files of the same rows differ.
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0))
    return path


def as_dataset(path: Path, rows: list[dict[str, Any]]) -> Any:
    import datasets

    named = datasets.ClassLabel(names=["good", "bad"])
    return datasets.Dataset.from_list(rows).cast_column("label", named)


def as_folder(path: Path, rows: list[dict[str, Any]]) -> Path:
    as_dataset(path, rows).save_to_disk(str(path))
    return path


def as_lists(path: Path, rows: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    return [row["text"] for row in rows], [row["label"] for row in rows]


def loaded(prepared: Prepared) -> Task:
    return load_variant(prepared.manifest.variant, prepared.folder.parent)


def texts_of(task: Task, split: Split) -> list[tuple[str, str]]:
    names = task.spec.label_names
    found = [(bytes((example.tokens - 1).tolist()).decode(), names[example.label]) for example in task[split]]
    return sorted(found)


SOURCES: dict[str, Callable[[Path, list[dict[str, Any]]], Any]] = {
    "films.jsonl": write_jsonl,
    "films.jsonl.gz": write_gzip,
    "films.csv": write_csv,
    "films.tsv": write_csv,
    "films.parquet": write_parquet,
    "folder": as_folder,
    "dataset": as_dataset,
    "lists": as_lists,
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_examples(name: str, tmp_path: Path) -> None:
    prepared = own_data(SOURCES[name](tmp_path / name, ROWS), name="films", data_dir=tmp_path / "data")
    task = loaded(prepared)
    assert task.spec.label_names == ("bad", "good")
    assert {str(split): len(task[split]) for split in Split} == {"train": 48, "dev": 6, "test": 6}
    everything = sorted(pair for split in Split for pair in texts_of(task, split))
    assert everything == sorted((row["text"], row["label"]) for row in ROWS)
    # Labels are in proportion: a third is bad in every split.
    assert [int((task[split].stored.labels == 0).sum()) for split in Split] == [16, 2, 2]
    again = own_data(SOURCES[name](tmp_path / name, ROWS), name="films", data_dir=tmp_path / "data")
    assert (again.folder, again.fresh, prepared.fresh) == (prepared.folder, False, True)


def test_content_columns_seed_and_limit_decide_the_folder(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "My films.jsonl", ROWS)
    first = own_data(file, data_dir=tmp_path / "data")
    assert first.folder.name.startswith("my_films-")
    other = own_data(file, seed=1, data_dir=tmp_path / "data")
    small = own_data(file, limit=4, data_dir=tmp_path / "data")
    assert texts_of(loaded(first), Split.TEST) != texts_of(loaded(other), Split.TEST)
    assert [len(loaded(small)[split]) for split in Split] == [4, 4, 4]
    changed = own_data(write_jsonl(file, ROWS[:-1]), data_dir=tmp_path / "data")
    assert len({each.folder for each in (first, other, small, changed)}) == 4


def test_splits_from_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "films"
    folder.mkdir()
    train = write_jsonl(folder / "train.jsonl", ROWS[:40])
    test = write_csv(folder / "test.csv", ROWS[40:])
    by_option = own_data(train, test=test, data_dir=tmp_path / "data")
    by_folder = own_data(folder, data_dir=tmp_path / "data")
    assert by_option.folder == by_folder.folder
    assert by_option.folder.name.startswith("films-")
    assert [len(loaded(by_option)[split]) for split in Split] == [36, 4, 20]
    assert texts_of(loaded(by_option), Split.TEST) == sorted((row["text"], row["label"]) for row in ROWS[40:])
    with refused(InputError, "has a test split already", "leave out --test"):
        own_data(folder, test=test, data_dir=tmp_path / "data")
    write_csv(folder / "train.csv", ROWS)
    with refused(DataError, "has two train splits", "train.csv", "train.jsonl"):
        own_data(folder, data_dir=tmp_path / "data")


def test_data_from_a_folder_and_a_file_can_be_prepared_again(tmp_path: Path) -> None:
    folder = tmp_path / "films"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ROWS[:40])
    dev = write_jsonl(tmp_path / "dev.jsonl", ROWS[40:])
    for given in (dev, write_jsonl(tmp_path / "other.jsonl", ROWS[30:])):
        first = own_data(folder, dev=given)
        shutil.rmtree(first.folder)
        assert prepare_again(first.manifest.variant).manifest.variant == first.manifest.variant
    for data, given in ((as_lists(dev, ROWS), dev), (dev, as_lists(dev, ROWS))):
        partly = own_data(data, dev=given, name="films")
        with refused(DataError, "was not read from files"):
            prepare_again(partly.manifest.variant)


def test_pairs_numbers_and_booleans(tmp_path: Path) -> None:
    rows = [{"a": f"one {n}", "b": f"other {n}", "same": n % 12} for n in range(40)]
    task = loaded(own_data(write_jsonl(tmp_path / "p.jsonl", rows), text="a", text_b="b", label="same"))
    assert task.spec.paired
    assert task.spec.label_names == tuple(str(n) for n in range(12))
    example = task.train[0]
    assert example.second is not None
    assert bytes((example.second - 1).tolist()).startswith(b"other ")
    lists = [row["a"] for row in rows], [row["b"] for row in rows], np.arange(40) % 2 == 0
    assert loaded(own_data(lists)).spec.label_names == ("false", "true")
    alike = [f"text {n}" for n in range(40)], ["1", "01", "2", "001"] * 10
    assert loaded(own_data(alike)).spec.label_names == ("001", "01", "1", "2")


def test_a_tokenizer_gives_ids_and_is_kept(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["[UNK]", "film", "number", *(f"w{n}" for n in range(400))])}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]").save_pretrained(tmp_path / "t")
    lists = [f"film w{n} number" for n in range(40)], ["x", "y"] * 20
    prepared = own_data(lists, tokenizer=tmp_path / "t", data_dir=tmp_path / "data")
    task = loaded(prepared)
    assert task.spec.vocab_size == 404
    assert task.train.stored.tokens[0].dtype == np.uint16
    assert task.train[0].tokens[[0, 2]].tolist() == [2, 3]
    assert (prepared.folder / "tokenizer" / "tokenizer.json").is_file()
    shutil.rmtree(prepared.folder / "tokenizer")
    config = load_preset(prepared)
    with refused(DataError, "tokenizer is missing", "prepare the data again"):
        create_run(config, tmp_path / "runs", data_folder=prepared.folder)
    assert own_data(lists, tokenizer=tmp_path / "t", data_dir=tmp_path / "data").fresh
    assert create_run(config, tmp_path / "runs", data_folder=prepared.folder).tokenizer.is_dir()
    with refused(DataError, "the tokenizer", "cannot be loaded"):
        own_data(lists, tokenizer=tmp_path / "nothing", data_dir=tmp_path / "data")


GOOD = {"text": "good film", "label": "good"}
BAD_ROWS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "missing column": ([{"txt": "a", "label": 1}] * 5, ["no column 'text'", "'txt', 'label'", "--text", "mean 'txt'"]),
    "one class": ([GOOD] * 5, ["only one label, 'good'", "at least two"]),
    "empty text": ([*ROWS, {"text": " \n", "label": "bad"}], ["line 61", "'text' is empty", "remove the row"]),
    "missing text": ([*ROWS, {"label": "bad"}], ["line 61 has no column 'text'"]),
    "number as text": ([*ROWS, {"text": 3, "label": "bad"}], ["line 61", "must be text; got int"]),
    "missing label": ([*ROWS, {"text": "a", "label": None}], ["line 61", "label in column 'label' is missing"]),
    "fraction as label": ([*ROWS, {"text": "a", "label": 0.5}], ["is 0.5", "a name or a whole number"]),
    "ids as labels": ([{"text": "a", "label": n} for n in range(300)], ["300 different labels in 300 rows", "--label"]),
    "few rows": (ROWS[:2], ["has 2 rows", "at least 3"]),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_bad_rows_are_named_and_leave_nothing(what: str, tmp_path: Path) -> None:
    rows, words = BAD_ROWS[what]
    with refused(DataError, *words):
        own_data(write_jsonl(tmp_path / "films.jsonl", rows), data_dir=tmp_path / "data")
    assert not (tmp_path / "data").exists() or list((tmp_path / "data").iterdir()) == []


def test_bad_files_are_named(tmp_path: Path) -> None:
    def attempt(name: str, content: bytes, *words: str) -> None:
        (tmp_path / name).write_bytes(content)
        with refused(DataError, name, *words):
            own_data(tmp_path / name, data_dir=tmp_path / "data")

    attempt("a.jsonl", b'{"text": "a"', "line 1 is not JSON")
    attempt("b.jsonl", b"[1, 2]\n", "line 1 must be a JSON object", "got list")
    attempt("c.csv", b"text,label\na,b\nc\n", "line 3: expected 2 fields (text, label); got 1", "must be quoted")
    attempt("d.csv", b'text,label\n"a,b\n', "unexpected end of data")
    attempt("e.csv", b"text,label\n\xff,b\n", "must be UTF-8")
    attempt("s.csv", b"text;label\na;b\n", "must have ',' between its columns; its first line is 'text;label'")
    attempt("f.csv", b"", "has no rows")
    attempt("g.txt", b"hello", "one of these formats: .jsonl")
    attempt("h.parquet", b"hello", "cannot be read as Parquet")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    attempt("i.jsonl.gz", gzip.compress(lines)[:-20], "is truncated")
    attempt("j.jsonl.xz", lzma.compress(lines)[:-20], "is truncated")
    attempt("k.jsonl.xz", lzma.compress(lines)[:60] + bytes(40), "damaged")
    with refused(DataError, "nothing.jsonl does not exist"):
        own_data(tmp_path / "nothing.jsonl")
    with refused(InputError, "same length; got 2, 1"):
        own_data((["a", "b"], [1]))
    with refused(InputError, "name must be of lower case"):
        own_data((["a", "b"] * 5, [1, 2] * 5), name="text")


def test_a_label_that_is_not_in_the_training_data(tmp_path: Path) -> None:
    train, test = (
        write_jsonl(tmp_path / "a.jsonl", ROWS),
        write_jsonl(tmp_path / "b.jsonl", [{"text": "x", "label": "so"}]),
    )
    with refused(DataError, "b.jsonl has the label 'so' in 1 rows", "not in the training data; known: bad, good"):
        own_data(train, test=test, data_dir=tmp_path / "data")
