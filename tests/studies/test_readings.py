"""The study readings: what each letter changes, and the tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyformer.errors import InputError
from skyformer.studies import run_study
from skyformer.studies.readings import BLACK, Cell, Options, Readings
from tests.helpers import refused

CHANGES = {
    "a": ["optim.warmup_steps=2", "loop.steps=20"],
    "b": ["model.embedding_dropout=None", "model.attention_dropout=None", "model.mlp_hidden_dropout=None"],
    "c": ["loop.group_by_length=False", "loop.pad_to_max=True"],
    "d": ["optim.cycle_beta1=True"],
}
SMALL = Options(
    tasks=("listops",),
    attentions=("softmax", "skyformer"),
    seeds=(0,),
    steps=3,
    batch_size=4,
    length=64,
    listops_limit=40,
)


@pytest.mark.parametrize("letter", CHANGES)
def test_every_letter_changes_its_settings_alone(letter: str) -> None:
    study = Readings(Options())
    plain, changed = (study.config(Cell(reading, "text", "softmax", 0)) for reading in ("", letter))
    assert changed.departures(plain) == CHANGES[letter]


def test_only_attentions_that_support_it_get_dropout_of_weights_and_only_skyformer_landmarks() -> None:
    study = Readings(Options())
    configs = {name: study.config(Cell("abcde", "text", name, 0)).model for name in Options().attentions}
    assert {name: model.attention_dropout for name, model in configs.items()} == {
        **dict.fromkeys(("softmax", "kernelized"), None),
        **dict.fromkeys(("nystromformer", "skyformer"), 0.0),
    }
    landmarks = {name: model.attention_options.get("landmarks") for name, model in configs.items()}
    assert landmarks == {"softmax": None, "nystromformer": None, "kernelized": None, "skyformer": "paper"}


def test_a_small_study(tmp_path: Path) -> None:
    options = replace(SMALL, data_dir=str(tmp_path / "data"), readings=("a", "abcde"))
    results = run_study(Readings(options), tmp_path / "record").results()
    for cell, result in results.items():
        assert min(result.normed_fresh) > 0
        # Without dropout only skyformer's landmarks, drawn anew, add to the change that the step makes.
        redrawn = min(result.off) > 10 * max(result.same)
        assert not redrawn or (cell.reading, cell.attention) == ("abcde", "skyformer")
    *_, fresh, counts = Readings.tables(results)
    readings = [["a", "4 x 64"], ["abcde", "4 x 64"], ["the paper", "-"]]
    assert [row[:3] for row in fresh.rows] == [["Skyformer", *each] for each in readings]
    assert [row[0] for row in counts.rows] == ["a"] * 3 + ["abcde"] * 3
    (figure,) = Readings.figures(results)
    assert figure.panels[0].x_names == ("a", "abcde")


def test_another_size_joins_the_record_and_other_steps_do_not(tmp_path: Path) -> None:
    options = replace(SMALL, data_dir=str(tmp_path / "data"), readings=("a",))
    run_study(Readings(options), tmp_path / "record")
    longer = replace(options, batch_size=None, length=80, readings=("ab",))
    record = run_study(Readings(longer), tmp_path / "record")
    assert {(cell.reading, cell.size) for cell in record.cells} == {("a", "4 x 64"), ("ab", "all x 80")}
    assert {name for name in record.facts if "data" in name} == {
        "listops data for length 64",
        "listops data for length 80",
    }
    first, *_ = Readings.tables(record.results())
    assert [row[1:3] for row in first.rows] == [["a", "4 x 64"], ["ab", "all x 80"], ["the paper", "-"]]
    with refused(InputError, "steps 3", "this command has 4"):
        run_study(Readings(replace(options, steps=4)), tmp_path / "record")


def test_black_pixels_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from skyformer.lra.batching import Batch
    from skyformer.studies import tasks

    tokens = torch.tensor([[BLACK, 7, BLACK, 9]])
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), torch.tensor([0]), torch.tensor([0]))
    monkeypatch.setattr(tasks, "batches_of", lambda *_: iter([batch]))
    study = Readings(Options())
    monkeypatch.setattr(study, "_data", lambda task: None)
    masks = {
        (reading, task): next(study._batches(cell, study.config(cell))).mask.tolist()
        for reading in ("ab", "abc")
        for task in ("image", "text")
        for cell in [Cell(reading, task, "softmax", 0)]
    }
    everything = [[True] * 4]
    assert masks.pop(("abc", "image")) == [[False, True, False, True]]
    assert all(mask == everything for mask in masks.values())


def test_wrong_options_are_refused() -> None:
    for wrong in ("ba", "f", ""):
        with refused(InputError, "--readings", "'abcde'", repr(wrong)):
            Readings(Options(readings=(wrong,)))
    with refused(InputError, "--attentions", "'softmax'"):
        Readings(Options(attentions=("skyformer",)))
