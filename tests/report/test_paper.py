"""The constants are the paper's: its own averages, and where the paper is available, its own table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyformer import list_attentions
from skyformer.lra.tasks import TASKS
from skyformer.report.paper import (
    ACCURACY,
    CURVE_STEPS,
    CURVES,
    ERROR_FEATURES,
    ERRORS,
    SPECTRA,
    SPECTRUM_INDEX,
    TASK_TITLES,
)

PRINTED_AVERAGES = {
    "softmax": 57.37,
    "kernelized": 58.56,
    "nystromformer": 58.93,
    "linformer": 54.69,
    "informer": 53.73,
    "performer": 58.00,
    "reformer": 58.99,
    "bigbird": 59.05,
    "skyformer": 59.39,
}


def test_every_attention_and_task_is_there() -> None:
    assert set(ACCURACY) == set(list_attentions()) - {"tilted"}
    assert set(TASK_TITLES) == set(TASKS)


@pytest.mark.parametrize("attention", ACCURACY)
def test_averages_are_those_the_paper_prints(attention: str) -> None:
    assert ACCURACY[attention].average() == pytest.approx(PRINTED_AVERAGES[attention], abs=0.00501)


def test_rows_are_those_of_the_paper(references: Path) -> None:
    table = (references / "paper" / "skyformer.tex").read_text().split("table:lra_acc}")[1].split("\\bottomrule")[0]
    for row in ACCURACY.values():
        (line,) = [line for line in table.splitlines() if re.match(rf"(\\textbf{{)?{row.title}\b", line)]
        printed = [float(number) for number in re.findall(r"\d+\.\d+", line)]
        assert [row.on(task) for task in TASK_TITLES] == printed[:5]


def test_values_read_off_the_figures_are_complete_and_plausible() -> None:
    assert {len(values) for methods in ERRORS.values() for values in methods.values()} == {len(ERROR_FEATURES)}
    assert {len(values) for curves in CURVES.values() for values in curves.values()} == {len(CURVE_STEPS)}
    for values in SPECTRA.values():
        assert len(values) == len(SPECTRUM_INDEX)
        assert list(values) == sorted(values, reverse=True)
    for methods in ERRORS.values():
        skyformer = methods["skyformer"]
        assert list(skyformer) == sorted(skyformer, reverse=True), "the paper's claim: it falls steadily"
        assert skyformer[-1] == min(values[-1] for values in methods.values())
