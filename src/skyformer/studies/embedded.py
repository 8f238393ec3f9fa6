"""Figure 1 as the paper draws it: absolute spectral norms of errors on embedded text.

The inputs X are embeddings of tokens, not the states of deeper layers: a passage is cut into consecutive windows of at
most as many tokens as the model has positions, each window is embedded on its own with positions from zero, and the
embeddings of all windows stand one below the other. So n may be longer than the model's limit, also for pretrained
weights. Q, K and V are X times the projections of the first layer, and the result is |approximation - softmax
attention|, the spectral norm of each head's error, not divided by anything.

- weights "pretrained": those of `--model`. The paper has bert-base-cased.
- weights "initialised": a bert-base of random weights (12 heads of 64), which needs its config only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from skyformer.errors import SolveError
from skyformer.functional import GAMMA
from skyformer.report.figures import Figure, Mark, Panel, Series, finite_or_none
from skyformer.report.paper import ERROR_FEATURES, ERRORS
from skyformer.report.tables import Table, from_frame
from skyformer.studies import approximation
from skyformer.studies.approximation import AS_PRINTED, SKYFORMER, TILTED, Truth, approximate
from skyformer.studies.base import Fact, option
from skyformer.studies.frames import median_and_quartiles, quantile, to_frame
from skyformer.studies.heads import SHORTEST, HeadOptions, HeadStudy
from skyformer.studies.record import significant
from skyformer.studies.registry import register_study
from skyformer.studies.theorem import spectral_norm

if TYPE_CHECKING:
    from pandas import DataFrame

METHODS = (AS_PRINTED, SKYFORMER, "nystromformer", "performer", "informer", TILTED)
"""The methods of the paper's Figure 1, Skyformer also as this package computes it, and tilted attention."""

LABELS = {AS_PRINTED: "Skyformer", SKYFORMER: "Skyformer (this package)"}
PAPER_METHODS = {"skyformer": AS_PRINTED} | {name: name for name in ("nystromformer", "performer", "informer")}
"""The methods of the paper's Figure 1, and what they are called here."""


@dataclass(frozen=True)
class Options(HeadOptions):
    lengths: tuple[int, ...] = option(
        (512, 1024, 2048, 4096), small=(128,), least=SHORTEST, required=True, help="Tokens n, in windows."
    )
    features: tuple[int, ...] = option(
        (16, 32, 64, 128, 256), small=(16, 64), least=1, required=True, help="Numbers d of landmarks or features."
    )
    seeds: tuple[int, ...] = option(
        (0, 1), small=(0,), least=0, required=True, help="Passages, by number, which is also the random seed."
    )


@dataclass(frozen=True)
class Cell:
    weights: str
    length: int
    method: str
    features: int


@dataclass(frozen=True)
class Result:
    """Spectral norms of the error, None where a method fails, and of exact attention, one per passage and head."""

    errors: tuple[float | None, ...]
    norms: tuple[float | None, ...]

    def quartiles(self) -> tuple[float, float, float]:
        low, middle, high = (quantile(self.errors, q) for q in (0.25, 0.5, 0.75))
        return low, middle, high

    def exact(self) -> float:
        """The median norm of exact attention."""
        return quantile(self.norms, 0.5)


@register_study
class Embedded(HeadStudy[Options, Cell, Result]):
    name = "embedded"
    title = "Approximation error on embedded text, absolute (Figure 1)"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._source.check(options.weights, SHORTEST, "--lengths")

    def cells(self) -> Sequence[Cell]:
        options = self.options
        places = [(each, n) for each in options.weights for n in options.lengths]
        return [Cell(*place, method, d) for place in places for d in options.features for method in METHODS]

    def passages(self, cell: Cell) -> Sequence[int]:
        return self.options.seeds

    def facts(self) -> Mapping[str, Fact]:
        return {**super().facts(), "seeds": ",".join(map(str, self.options.seeds))}

    @torch.no_grad()
    def measure(self, cell: Cell) -> Result:
        errors: list[float | None] = []
        norms: list[float | None] = []
        sampler, gamma = ("uniform", GAMMA) if cell.method == SKYFORMER else ("", None)
        for seed in self.options.seeds:
            truth = self._truth(cell.weights, cell.length, seed)
            method = approximation.Cell(
                "softmax", cell.weights, cell.length, cell.method, cell.features, sampler, gamma, "cholesky", str(seed)
            )
            try:
                found = spectral_norm(approximate(method, truth.heads, seed).double() - truth.output)
            except SolveError:
                found = torch.full_like(truth.norm, math.inf)
            errors += [significant(float(error), 3) for error in found.flatten()]
            norms += [significant(float(norm), 3) for norm in truth.norm.flatten()]
        return Result(tuple(errors), tuple(norms))

    @lru_cache(maxsize=2)  # noqa: B019  the study exists as long as the process
    def _truth(self, weights: str, length: int, seed: int) -> Truth:
        return Truth("softmax", self._source.embedded(weights, length, seed))

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        return [*(_table(title, rows) for _, title, rows in _settings(results)), *_ratio_table(results)]

    @classmethod
    def figures(cls, results: Mapping[Cell, Result]) -> Sequence[Figure]:
        of_paper = {cell: result for cell, result in results.items() if cell.method in PAPER_METHODS.values()}
        panels = [_panel(title, _lines(rows)) for _, title, rows in _settings(results)]
        over = [
            _panel(title, [*_lines(rows), *_paper_lines(place)])
            for place, title, rows in _settings(of_paper)
            if place in ERRORS
        ]
        columns = len({cell.length for cell in results})
        what = "approximations of softmax attention on embedded text"
        found = [
            Figure("figure", f"Figure 1: {what}", panels, columns, direct=False, same_y=True),
            Figure("paper", f"Figure 1 and ours: {what}", over, columns, PAPER_NOTE, direct=False, same_y=True),
        ]
        return [figure for figure in found if figure.panels]


PAPER_NOTE = (
    "Dashed: the paper's, with bert-base-cased, read off its plot. Solid: ours, medians over heads. The models and the "
    "scales differ, so compare how lines fall and which lie above others, not their heights."
)


def _settings(results: Mapping[Cell, Result]) -> Iterator[tuple[tuple[str, int], str, DataFrame]]:
    """Each kind of weights and length, with its title and its rows."""
    frame = to_frame(Cell, results, quartiles=Result.quartiles, exact=Result.exact)
    frame["label"] = [LABELS.get(cell.method, cell.method.capitalize()) for cell in results]
    for (weights, length), rows in frame.groupby(["weights", "length"], sort=False):
        yield (weights, length), f"{weights}, n = {length:,}", rows


def _table(title: str, rows: DataFrame) -> Table:
    texts = rows.assign(text=rows["quartiles"].map(median_and_quartiles))
    shown = texts.pivot(index="label", columns="features", values="text").reindex(list(dict.fromkeys(rows["label"])))
    note = (
        "Spectral norm of (approximation - softmax attention): median [quartiles] over heads and passages; the norm of "
        f"softmax attention itself is {rows['exact'].iloc[0]:.3g}."
    )
    return from_frame(title, shown.rename(columns="d = {}".format).rename_axis("method"), note)


def _ratio_table(results: Mapping[Cell, Result]) -> list[Table]:
    """How far the other methods are behind Skyformer as printed, here and in the paper: independent of the scale."""
    d = ERROR_FEATURES[-1]
    medians = {cell: result.quartiles()[1] for cell, result in results.items() if cell.features == d}
    places = [place for place in ERRORS if all(Cell(*place, name, d) in medians for name in PAPER_METHODS.values())]
    others = list(PAPER_METHODS)[1:]
    rows = []
    for place in places:
        skyformers = medians[Cell(*place, AS_PRINTED, d)] or math.nan
        ours = [medians[Cell(*place, name, d)] / skyformers for name in others]
        papers = [ERRORS[place][name][-1] / ERRORS[place]["skyformer"][-1] for name in others]
        shown = [f"{our:.2f}" if math.isfinite(our) else "fails" for our in ours]
        both = (f"{our} ({paper:.2f})" for our, paper in zip(shown, papers, strict=True))
        rows.append([place[0], f"{place[1]:,}", *both])
    note = "Medians over heads and passages. In brackets: the paper, read off its Figure 1."
    title = f"Error divided by that of Skyformer as printed, d = {d}"
    return [Table(title, ["weights", "n", *others], rows, note)] if rows else []


def _panel(title: str, lines: Sequence[Series]) -> Panel:
    return Panel(title, "features d", "error (spectral norm)", lines, x_log=True, y_log=True)


def _paper_lines(place: tuple[str, int]) -> list[Series]:
    """The paper's, dashed, with the labels and therefore the colours of ours."""
    return [
        Series(name.capitalize(), ERROR_FEATURES, errors, mark=Mark.DASHED) for name, errors in ERRORS[place].items()
    ]


def _lines(rows: DataFrame) -> list[Series]:
    return [
        Series(label, points["features"].tolist(), finite_or_none(x for _, x, _ in points["quartiles"]))
        for label, points in rows.groupby("label", sort=False)
    ]
