"""Theorem 1 on real queries and keys: how large d_stat is, how many landmarks the bound requires, how often the
guarantee holds, and how often the number of landmarks from `suggest_landmarks` reaches the requested error. The
quantities of the theorem are in `theorem.py`.

Three kinds of cells:
- "dimension": d_stat, beta and the bound on d for each head, and the estimate of d_stat that needs no n x n matrix.
- "draws": the errors of many draws of the landmarks, and whether the Loewner order holds.
- "suggestion": the d that `suggest_landmarks` returns for each head, and the true error with that many newly drawn
  landmarks, on the same passage and on the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from skyformer.functional import kernelized_attention, skyformer_attention
from skyformer.landmarks import SAMPLERS, Candidates, statistical_dimension, suggest_landmarks
from skyformer.ops.kernels import GaussianKernel
from skyformer.report.figures import Figure, Mark, Panel, Series
from skyformer.report.tables import NOTHING, Table, from_frame, number
from skyformer.studies import theorem
from skyformer.studies.base import check_names, option
from skyformer.studies.frames import median_and_quartiles, to_frame
from skyformer.studies.heads import LENGTHS_HELP, LONG_LENGTHS_HELP, SHORTEST, HeadOptions, HeadStudy
from skyformer.studies.record import significant
from skyformer.studies.registry import register_study

if TYPE_CHECKING:
    from pandas import DataFrame
    from pandas import Series as Column
    from pandas.api.typing import DataFrameGroupBy

DIMENSION, DRAWS, SUGGESTION = "dimension", "draws", "suggestion"

_ROW_SAMPLERS = ["uniform", "stratified", "queries", "probe", "leverage"]
"""The theorem is about rows of [Q; K]; segment means are not rows."""

_ROUNDING = 1e-9
"""A negative eigenvalue up to this size, relative to the largest one of C-bar, counts as rounding."""

_FRESH_DRAWS = 3
_FIRST_FRESH_SEED = 1_000_000

Numbers = tuple[float | None, ...]


@dataclass(frozen=True)
class Options(HeadOptions):
    lengths: tuple[int, ...] = option(
        (64, 128, 256, 512), small=(32, 64), least=SHORTEST, required=True, help=LENGTHS_HELP
    )
    long_lengths: tuple[int, ...] = option((1024, 2048), small=(), least=SHORTEST, help=LONG_LENGTHS_HELP)
    epsilons: tuple[float, ...] = option(
        (0.5, 0.2, 0.1, 0.05, 0.01), small=(0.5, 0.1), above=0, below=1, help="Allowed relative errors of C."
    )
    delta: float = option(0.1, above=0, below=1, help="Probability with which the guarantee may fail.")
    heads: int = option(12, small=4, least=1, help="Heads to measure, spread over all layers; fewer beyond 512 tokens.")
    seeds: tuple[int, ...] = option(
        (0, 1, 2), small=(0,), least=0, required=True, help="Passages for d_stat, by number."
    )
    draw_length: int = option(
        128, small=64, least=SHORTEST, help="Tokens of the passage for repeated draws of landmarks."
    )
    draws: int = option(100, small=10, least=1, help="Draws of the landmarks.")
    counts: tuple[int, ...] = option(
        (16, 32, 64, 128, 256, 512, 1024), small=(8, 64), least=1, help="Numbers of landmarks to draw."
    )
    samplers: tuple[str, ...] = option(
        ("uniform", "stratified", "probe"), small=("uniform", "probe"), help="Landmark samplers."
    )
    targets: tuple[float, ...] = option(
        (0.3, 0.1), small=(0.3,), above=0, below=1, help="Errors to suggest a number of landmarks for."
    )
    held_out: tuple[int, ...] = option(
        (8, 9), small=(5,), least=0, help="Passages for suggestions, by number; each is also tried on the next one."
    )


@dataclass(frozen=True)
class Cell:
    kind: str
    weights: str
    length: int
    heads: int
    seed: int
    epsilon: float | None = None
    delta: float | None = None
    sampler: str = ""
    count: int | None = None
    draws: int | None = None


@dataclass(frozen=True)
class Result:
    """One number per head, with heads spread evenly over the layers; with several draws, one per draw and head."""

    d_stat: Numbers = ()
    d_stat_estimate: Numbers = ()
    beta: Numbers = ()
    bound: Numbers = ()
    norm_share: Numbers = ()
    """|C| / |C-bar|."""
    order_kept: int = 0
    """Number of draws and heads for which C-bar - C~-bar has no negative eigenvalue, up to rounding."""
    completed_error: Numbers = ()
    """|C-bar - C~-bar| / |C|; the guarantee holds if it is at most epsilon."""
    score_error: Numbers = ()
    """|C - C~| / |C|."""
    unseen_error: Numbers = ()
    """The same as score_error, on the next passage."""
    suggested: tuple[int, ...] = ()


@register_study
class Dimension(HeadStudy[Options, Cell, Result]):
    name = "dimension"
    title = "Statistical dimension and number of landmarks (Theorem 1)"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        check_names("sampler of rows", options.samplers, _ROW_SAMPLERS)
        longest = max(*options.lengths, options.draw_length)
        self._source.check(options.weights, longest, "--lengths and --draw-length")

    def cells(self) -> Sequence[Cell]:
        short = self._dimensions(self.options.weights, self.options.lengths, self.options.seeds)
        initialised = [weights for weights in self.options.weights if weights == "initialised"]
        long = self._dimensions(initialised, self.options.long_lengths, self.options.seeds[:1])
        return [*short, *self._draws(), *self._suggestions(), *long]

    def passages(self, cell: Cell) -> Sequence[int]:
        return (cell.seed, cell.seed + 1) if cell.kind == SUGGESTION else (cell.seed,)

    def _dimensions(self, weights: Sequence[str], lengths: Sequence[int], seeds: Sequence[int]) -> list[Cell]:
        return [
            Cell(DIMENSION, each, n, self._heads_at(n), seed, epsilon, self.options.delta)
            for each in weights
            for n in lengths
            for seed in seeds
            for epsilon in self.options.epsilons
        ]

    def _draws(self) -> list[Cell]:
        n, heads = self.options.draw_length, max(1, self.options.heads // 2)
        return [
            Cell(DRAWS, weights, n, heads, self.options.seeds[0], sampler=sampler, count=d, draws=self.options.draws)
            for weights in self.options.weights
            for sampler in self.options.samplers
            for d in self.options.counts
            # Only uniform landmarks are drawn with replacement; [Q; K] has 2n rows.
            if sampler == "uniform" or d <= 2 * n
        ]

    def _suggestions(self) -> list[Cell]:
        n = max(self.options.lengths)
        return [
            Cell(SUGGESTION, weights, n, self._heads_at(n), seed, epsilon, sampler=sampler, draws=_FRESH_DRAWS)
            for seed in self.options.held_out
            for weights in self.options.weights
            for epsilon in self.options.targets
            for sampler in self.options.samplers
        ]

    def _heads_at(self, n: int) -> int:
        """Fewer heads for long passages, because the cost grows with the third power of n."""
        return self.options.heads if n <= 512 else max(1, self.options.heads // (2 if n <= 1024 else 6))

    @torch.no_grad()
    def measure(self, cell: Cell) -> Result:
        how = {DIMENSION: self._measure_dimension, DRAWS: self._measure_draws, SUGGESTION: self._measure_suggestion}
        return how[cell.kind](cell)

    def _measure_dimension(self, cell: Cell) -> Result:
        assert cell.epsilon is not None
        assert cell.delta is not None
        completion = self._completion(cell.weights, cell.length, cell.heads, cell.seed)
        scores = completion.leverage_scores(cell.epsilon)
        generator = torch.Generator().manual_seed(cell.seed)
        query, key = completion.query[None], completion.key[None]
        estimate = statistical_dimension(query, key, cell.epsilon, generator=generator)
        return Result(
            d_stat=_numbers(theorem.statistical_dimension(scores)),
            d_stat_estimate=_numbers(estimate[0]),
            beta=_numbers(theorem.beta(scores)),
            bound=_numbers(completion.landmarks_of_theorem_1(cell.epsilon, cell.delta)),
            norm_share=_numbers(completion.score_norm / completion.norm),
        )

    def _measure_draws(self, cell: Cell) -> Result:
        assert cell.draws is not None
        completion = self._completion(cell.weights, cell.length, cell.heads, cell.seed)
        order_kept = 0
        completed_error: Numbers = ()
        score_error: Numbers = ()
        for draw in range(cell.draws):
            approximation = theorem.nystrom(completion.matrix, self._rows(cell, draw))
            least, largest = theorem.loewner_gaps(completion.matrix, approximation)
            order_kept += int((least >= -_ROUNDING * completion.norm).sum())
            completed_error += _numbers(largest.clamp(min=0) / completion.score_norm)
            rest = completion.scores(completion.matrix - approximation)
            score_error += _numbers(theorem.spectral_norm(rest) / completion.score_norm)
        return Result(order_kept=order_kept, completed_error=completed_error, score_error=score_error)

    def _rows(self, cell: Cell, draw: int) -> Tensor:
        assert cell.count is not None
        query, key = self._points(cell.weights, cell.length, cell.heads, cell.seed)
        candidates = Candidates(query, key, None, None, GaussianKernel(), query.shape[-1] ** -0.5)
        rows = SAMPLERS.get(cell.sampler)(candidates, cell.count, torch.Generator().manual_seed(draw))
        assert isinstance(rows, Tensor)
        return rows

    def _measure_suggestion(self, cell: Cell) -> Result:
        assert cell.epsilon is not None
        query, key = self._points(cell.weights, cell.length, cell.heads, cell.seed)
        suggested = [
            suggest_landmarks(
                query[:, [head]],
                key[:, [head]],
                cell.epsilon,
                landmarks=cell.sampler,
                generator=torch.Generator().manual_seed(cell.seed),
            )
            for head in range(query.shape[1])
        ]
        generator = torch.Generator().manual_seed(cell.seed)
        estimate = statistical_dimension(query, key, cell.epsilon, generator=generator)
        return Result(
            d_stat_estimate=_numbers(estimate[0]),
            suggested=tuple(suggested),
            score_error=self._true_errors(cell, suggested, cell.seed),
            unseen_error=self._true_errors(cell, suggested, cell.seed + 1),
        )

    def _true_errors(self, cell: Cell, suggested: Sequence[int], passage: int) -> Numbers:
        """|C - C~| / |C| of each head over a passage, with newly drawn landmarks in the suggested number."""
        query, key = self._points(cell.weights, cell.length, cell.heads, passage)
        identity = torch.eye(cell.length, dtype=torch.float64)[None, None]
        errors = torch.zeros(_FRESH_DRAWS, len(suggested), dtype=torch.float64)
        for head, d in enumerate(suggested):
            one = query[:, [head]], key[:, [head]], identity
            exact = kernelized_attention(*one)
            norm = theorem.spectral_norm(exact)
            for draw in range(_FRESH_DRAWS):
                generator = torch.Generator().manual_seed(_FIRST_FRESH_SEED + draw)
                found = skyformer_attention(*one, num_landmarks=d, landmarks=cell.sampler, generator=generator)
                errors[draw, head] = (theorem.spectral_norm(exact - found) / norm).squeeze()
        return _numbers(errors.flatten())

    def _points(self, weights: str, length: int, heads: int, seed: int) -> tuple[Tensor, Tensor]:
        """Q and K (1, heads, n, P) in float64."""
        found = self._source.at(weights, length, seed).flat()
        total = found.query.shape[1]
        chosen = torch.linspace(0, total - 1, min(heads, total)).round().long()
        return found.query[:, chosen].double(), found.key[:, chosen].double()

    @lru_cache(maxsize=1)  # noqa: B019  the study exists as long as the process
    def _completion(self, weights: str, length: int, heads: int, seed: int) -> theorem.Completion:
        query, key = self._points(weights, length, heads, seed)
        return theorem.Completion(query[0], key[0])

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        by_weights = _heads_by_weights(results)
        found = [
            *(_growth_table(weights, heads) for weights, heads in by_weights.items()),
            _bound_table(by_weights),
            *(_guarantee_table(results, weights) for weights in by_weights),
            _suggestion_table(results),
            _estimate_table(by_weights),
        ]
        return [table for table in found if table.rows]

    @classmethod
    def figures(cls, results: Mapping[Cell, Result]) -> Sequence[Figure]:
        drawn = [_dimension_figure(results), _guarantee_figure(results), _suggestion_figure(results)]
        return [figure for figure in drawn if figure.panels]


def _numbers(values: Tensor) -> Numbers:
    return tuple(significant(float(value)) for value in values)


def _heads_by_weights(results: Mapping[Cell, Result]) -> dict[str, DataFrame]:
    """For each kind of weights, a data frame of the dimension cells with one row per head."""
    cells = {cell: result for cell, result in results.items() if cell.kind == DIMENSION}
    names = ["d_stat", "d_stat_estimate", "beta", "bound", "norm_share"]
    frame = to_frame(Cell, cells, **{name: attrgetter(name) for name in names})
    heads = frame.explode(names).astype(dict.fromkeys(names, float))
    return {weights: heads[heads["weights"] == weights] for weights in dict.fromkeys(c.weights for c in results)}


def _d_stat_quartiles(heads: DataFrame) -> DataFrame:
    """By epsilon and length: the quartiles of d_stat over heads and passages."""
    by_length = heads.groupby(["epsilon", "length"], sort=False)["d_stat"]
    return by_length.quantile([0.25, 0.5, 0.75]).unstack()


def _growth_table(weights: str, heads: DataFrame) -> Table:
    quartiles = _d_stat_quartiles(heads)
    texts = quartiles.apply(median_and_quartiles, axis=1)
    shown = texts.unstack("length").reindex(heads["epsilon"].unique())
    shown.columns = [f"n = {n:,}" for n in shown.columns]
    shown["grows as n to the power"] = [_power(quartiles.loc[epsilon, 0.5]) for epsilon in shown.index]
    note = (
        "Median [quartiles] over heads and passages. C-bar has 2n rows, so d_stat is below 2n. Last column: between "
        "the two longest lengths."
    )
    return from_frame(f"d_stat, {weights} weights", shown.rename(index=number), note)


def _power(medians: Column) -> str:
    """The slope of log d_stat over log n between the two longest lengths."""
    if len(medians) < 2:
        return NOTHING
    (short, before), (long, after) = list(medians.sort_index().items())[-2:]
    return f"{math.log(after / before) / math.log(long / short):.2f}"


def _bound_table(by_weights: Mapping[str, DataFrame]) -> Table:
    rows = []
    for weights, heads in by_weights.items():
        for (n, epsilon), here in heads.groupby(["length", "epsilon"], sort=False):
            if here["bound"].notna().any():
                medians = [here[name].median() for name in ("norm_share", "d_stat", "beta")]
                bounds = [here["bound"].min(), here["bound"].median()]
                rows.append([weights, f"{n:,}", *map(number, (epsilon, *medians, *bounds))])
    header = ["weights", "n", "epsilon", "|C| / |C-bar|", "d_stat", "beta", "smallest bound on d", "bound on d"]
    note = "Medians over heads and passages, and the smallest bound of all. [Q; K] has 2n rows."
    return Table("The bound of Theorem 1", header, rows, note)


GUARANTEES: dict[str, Callable[[Result], Numbers]] = {
    "C-bar <= C~ + lambda I": attrgetter("completed_error"),
    "|C - C~| <= epsilon |C|": attrgetter("score_error"),
}


def _epsilons(results: Mapping[Cell, Result]) -> list[float]:
    found = {cell.epsilon for cell in results if cell.kind == DIMENSION and cell.epsilon is not None}
    return sorted(found, reverse=True)


def _draws(results: Mapping[Cell, Result], weights: str) -> dict[Cell, Result]:
    return {cell: result for cell, result in results.items() if (cell.kind, cell.weights) == (DRAWS, weights)}


def _share_within(errors: Sequence[float | None], epsilon: float) -> float:
    """The share of errors that are at most epsilon; a missing one is not."""
    return sum(error is not None and error <= epsilon for error in errors) / len(errors)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _guarantee_table(results: Mapping[Cell, Result], weights: str) -> Table:
    epsilons, draws = _epsilons(results), _draws(results, weights)
    rows = [
        [
            cell.sampler,
            f"{cell.count:,}",
            _percent(result.order_kept / len(result.completed_error)),
            *(_percent(_share_within(errors(result), e)) for errors in GUARANTEES.values() for e in epsilons),
        ]
        for cell, result in draws.items()
    ]
    n = max((cell.length for cell in draws), default=0)
    header = ["landmarks", "d", "C~ <= C-bar", *[f"{epsilon:g}" for epsilon in epsilons] * 2]
    groups = [("", 3), *((f"{name}, epsilon", len(epsilons)) for name in GUARANTEES)]
    note = "Shares of draws and heads. The theorem guarantees all three for uniform landmarks at its bound on d."
    return Table(f"How often the guarantee holds, {weights} weights, n = {n}", header, rows, note, groups)


def _suggested(results: Mapping[Cell, Result]) -> DataFrameGroupBy:
    """The suggestions of all passages, one row per passage, grouped by weights, epsilon, sampler and length."""
    cells = {cell: result for cell, result in results.items() if cell.kind == SUGGESTION}
    names = ("d_stat_estimate", "suggested", "score_error", "unseen_error")
    frame = to_frame(Cell, cells, **{name: attrgetter(name) for name in names})
    return frame.groupby(["weights", "epsilon", "sampler", "length"], sort=False)


def _suggestion_table(results: Mapping[Cell, Result]) -> Table:
    rows = []
    for (weights, epsilon, sampler, n), passages in _suggested(results):
        estimate, d, seen = (
            passages[name].explode().astype(float) for name in ("d_stat_estimate", "suggested", "score_error")
        )
        unseen = passages["unseen_error"].explode().astype(float)
        rows.append(
            [
                weights,
                number(epsilon),
                sampler,
                number(estimate.median()),
                median_and_quartiles(d.quantile([0.25, 0.5, 0.75])),
                _percent((d >= 2 * n).mean()),
                number(seen.median()),
                _percent((seen <= epsilon).mean()),
                _percent((unseen <= epsilon).mean()),
            ]
        )
    errors = ["true error", "within epsilon", "within epsilon on the next passage"]
    header = ["weights", "epsilon", "landmarks", "d_stat", "suggested d", "all rows suggested", *errors]
    note = (
        "suggest_landmarks for each head, and the true error with newly drawn landmarks. Medians over heads and "
        "passages, d with quartiles; the last two columns are shares of heads and draws."
    )
    return Table("Suggested numbers of landmarks", header, rows, note)


def _estimate_table(by_weights: Mapping[str, DataFrame]) -> Table:
    rows = []
    for weights, heads in by_weights.items():
        ratios = heads.assign(ratio=heads["d_stat_estimate"] / heads["d_stat"].where(heads["d_stat"] > 0))
        for n, ratio in ratios.groupby("length")["ratio"]:
            rows.append([weights, f"{n:,}", *map(number, ratio.quantile([0.0, 0.05, 0.5, 0.95, 1.0]))])
    header = ["weights", "n", "smallest", "5 %", "median", "95 %", "largest"]
    note = "Over heads, passages and epsilons. The estimate uses at most 512 of the 2n rows."
    return Table("Estimated d_stat divided by true d_stat", header, rows, note)


def _dimension_figure(results: Mapping[Cell, Result]) -> Figure:
    panels = []
    for weights, heads in _heads_by_weights(results).items():
        quartiles = _d_stat_quartiles(heads)
        lines = []
        for epsilon in heads["epsilon"].unique():
            by_length = quartiles.loc[epsilon].sort_index()
            lines.append(Series(f"ε = {epsilon:g}", by_length.index.tolist(), by_length[0.5].tolist()))
        if lines:
            lengths = sorted(heads["length"].unique().tolist())
            lines.append(Series("all 2n rows", lengths, [2.0 * n for n in lengths], mark=Mark.DASHED))
            panels.append(Panel(f"{weights} weights", "tokens n", "d_stat", lines, x_log=True, y_log=True))
    return Figure("figure", "Statistical dimension of [Q; K], median over heads", panels, columns=2)


def _guarantee_figure(results: Mapping[Cell, Result]) -> Figure:
    panels = []
    marks = dict(zip(_epsilons(results)[::2], (Mark.LINE, Mark.DASHED), strict=False))
    for weights in dict.fromkeys(cell.weights for cell in results):
        draws = _draws(results, weights)
        for name, errors in GUARANTEES.items():
            lines = [
                _guarantee_line(draws, sampler, errors, epsilon, mark)
                for sampler in dict.fromkeys(cell.sampler for cell in draws)
                for epsilon, mark in marks.items()
            ]
            if lines:
                title = f"{_GUARANTEE_TITLES[name]}, {weights} weights"
                panels.append(Panel(title, "landmarks d", "share of draws", lines, x_log=True))
    patterns = {Mark.LINE: "Solid", Mark.DASHED: "Dashed"}
    note = " ".join(f"{patterns[mark]}: ε = {epsilon:g}." for epsilon, mark in marks.items())
    return Figure("guarantee", "How often the guarantee of Theorem 1 holds", panels, 2, note, direct=False, same_y=True)


_GUARANTEE_TITLES = dict(zip(GUARANTEES, ("C̄ ≼ C̃ + λI", "|C - C̃| ≤ ε |C|"), strict=True))


def _guarantee_line(
    draws: Mapping[Cell, Result], sampler: str, errors: Callable[[Result], Numbers], epsilon: float, mark: Mark
) -> Series:
    points = {c.count or 0: _share_within(errors(r), epsilon) for c, r in draws.items() if c.sampler == sampler}
    counts = sorted(points)
    return Series(sampler, counts, [points[d] for d in counts], mark=mark)


def _suggestion_figure(results: Mapping[Cell, Result]) -> Figure:
    """One row of panels per epsilon and one column per sampler; full points have pretrained weights."""
    panels: dict[tuple[float, str], list[Series]] = {}
    for (weights, epsilon, sampler, _), passages in _suggested(results):
        x, y = (passages[name].explode().astype(float).fillna(0) for name in ("d_stat_estimate", "suggested"))
        mark = Mark.POINTS if weights == "pretrained" else Mark.HOLLOW
        panels.setdefault((epsilon, sampler), []).append(Series(sampler, x.tolist(), y.tolist(), mark=mark))
    drawn = [
        Panel(
            f"{sampler}, ε = {epsilon:g}",
            "estimated d_stat",
            "suggested d",
            points,
            x_log=True,
            y_log=True,
            legend=False,
        )
        for (epsilon, sampler), points in sorted(panels.items(), key=lambda each: -each[0][0])
    ]
    samplers = len({sampler for _, sampler in panels})
    title = "Suggested landmarks against the statistical dimension, one point per head"
    note = "Full points: pretrained weights. Circles: initialised weights."
    return Figure("suggestion", title, drawn, max(1, samplers), note, same_x=True, same_y=True)
