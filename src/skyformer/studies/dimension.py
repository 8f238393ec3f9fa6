"""Theorem 1 on real queries and keys: how large d_stat is, what the bound asks for, how often the guarantee holds, and
whether `suggest_landmarks` keeps its word. The theorem's quantities are in `theorem.py`.

Three kinds of cells:
- "dimension": d_stat, beta and the bound's d of each head, and the estimate of d_stat that needs no whole matrix.
- "draws": the errors of many draws of the landmarks, and whether the Loewner order holds.
- "suggestion": the d that `suggest_landmarks` gives for each head, and the true error of that many landmarks in draws
  of their own, on the passage it saw and on one that it did not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from skyformer.functional import kernelized_attention, skyformer_attention
from skyformer.landmarks import SAMPLERS, Candidates, statistical_dimension, suggest_landmarks
from skyformer.ops.kernels import GaussianKernel
from skyformer.report.figures import Figure, Mark, Panel, Series
from skyformer.report.tables import Table, number
from skyformer.studies import theorem
from skyformer.studies.base import check_names, option, quantile
from skyformer.studies.heads import SHORTEST, HeadOptions, HeadStudy
from skyformer.studies.record import significant
from skyformer.studies.registry import register_study

DIMENSION, DRAWS, SUGGESTION = "dimension", "draws", "suggestion"

_ROW_SAMPLERS = ["uniform", "stratified", "queries", "probe", "leverage"]
"""The theorem is about rows; segment means are points of their own."""

_ROUNDING = 1e-9
"""An eigenvalue this far below zero, relative to the largest of C-bar, is taken for rounding."""

_FRESH_DRAWS = 3
_FIRST_FRESH_SEED = 1_000_000

Numbers = tuple[float | None, ...]


@dataclass(frozen=True)
class Options(HeadOptions):
    weights: tuple[str, ...] = option(("pretrained", "initialised"), small=("initialised",), help="Whose Q and K.")
    lengths: tuple[int, ...] = option(
        (64, 128, 256, 512),
        small=(32, 64),
        least=SHORTEST,
        required=True,
        help="Tokens n per passage, at most the model's limit.",
    )
    long_lengths: tuple[int, ...] = option(
        (1024, 2048), small=(), least=SHORTEST, help="Longer passages, for initialised weights only."
    )
    epsilons: tuple[float, ...] = option(
        (0.5, 0.2, 0.1, 0.05, 0.01), small=(0.5, 0.1), above=0, below=1, help="Allowed relative errors of C."
    )
    delta: float = option(0.1, above=0, below=1, help="Probability with which the guarantee may fail.")
    heads: int = option(12, small=4, least=1, help="Heads to measure, spread over all layers; fewer beyond 512 tokens.")
    seeds: tuple[int, ...] = option(
        (0, 1, 2), small=(0,), least=0, required=True, help="Numbers of passages for d_stat."
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
        (8, 9), small=(5,), least=0, help="Numbers of passages for suggestions; each is also tried on the next passage."
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
    """A number a head, heads evenly spread over the layers; over draws, draw by draw and head by head."""

    d_stat: Numbers = ()
    d_stat_estimate: Numbers = ()
    beta: Numbers = ()
    bound: Numbers = ()
    norm_share: Numbers = ()
    """|C| / |C-bar|."""
    order_kept: int = 0
    """Draws and heads for which C-bar - C~-bar had no eigenvalue below zero, up to rounding."""
    completed_error: Numbers = ()
    """|C-bar - C~-bar| / |C|: the guarantee holds where it is at most epsilon."""
    score_error: Numbers = ()
    """|C - C~| / |C|."""
    unseen_error: Numbers = ()
    """The same on the next passage."""
    suggested: tuple[int, ...] = ()


@register_study
class Dimension(HeadStudy[Options, Cell, Result]):
    name = "dimension"
    title = "Statistical dimension and how many landmarks it takes (Theorem 1)"
    options_type, cell_type, result_type = Options, Cell, Result

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
            # Without replacement there are no more rows to draw than [Q; K] has.
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
        """The work grows with the third power of n."""
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
        """|C - C~| / |C| of each head over a passage with the landmarks suggested for it, in draws of their own."""
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

    @lru_cache(maxsize=1)  # noqa: B019  the study lives as long as the process
    def _completion(self, weights: str, length: int, heads: int, seed: int) -> theorem.Completion:
        query, key = self._points(weights, length, heads, seed)
        return theorem.Completion(query[0], key[0])

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        found = [
            *_growth_tables(results),
            _bound_table(results),
            *_guarantee_tables(results),
            _suggestion_table(results),
            _estimate_table(results),
        ]
        return [table for table in found if table.rows]

    @classmethod
    def figures(cls, results: Mapping[Cell, Result]) -> Sequence[Figure]:
        drawn = [_dimension_figure(results), _guarantee_figure(results), _suggestion_figure(results)]
        return [figure for figure in drawn if figure.panels]


def _numbers(values: Tensor) -> Numbers:
    return tuple(significant(float(value)) for value in values)


def _present(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _median(values: Sequence[float]) -> str:
    return number(quantile(values, 0.5))


def _spread(values: Sequence[float]) -> str:
    low, middle, high = (number(quantile(values, q)) for q in (0.25, 0.5, 0.75))
    return f"{middle} [{low}, {high}]"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _share(errors: Sequence[float | None], epsilon: float) -> float:
    """How many are at most epsilon; one that is missing is not."""
    return sum(error is not None and error <= epsilon for error in errors) / len(errors)


def _all_weights(results: Mapping[Cell, Result]) -> list[str]:
    return list(dict.fromkeys(cell.weights for cell in results))


def _of_kind(results: Mapping[Cell, Result], kind: str, weights: str) -> dict[Cell, Result]:
    return {cell: result for cell, result in results.items() if (cell.kind, cell.weights) == (kind, weights)}


def _epsilons(results: Mapping[Cell, Result]) -> list[float]:
    found = {cell.epsilon for cell in results if cell.kind == DIMENSION and cell.epsilon is not None}
    return sorted(found, reverse=True)


def _d_stat_by(results: Mapping[Cell, Result], weights: str) -> dict[float, dict[int, list[float]]]:
    """epsilon to n to d_stat over heads and passages."""
    found: dict[float, dict[int, list[float]]] = {}
    for cell, result in _of_kind(results, DIMENSION, weights).items():
        assert cell.epsilon is not None
        found.setdefault(cell.epsilon, {}).setdefault(cell.length, []).extend(_present(result.d_stat))
    return found


def _growth_tables(results: Mapping[Cell, Result]) -> list[Table]:
    tables = []
    for weights in _all_weights(results):
        by_epsilon = _d_stat_by(results, weights)
        lengths = sorted({n for by_length in by_epsilon.values() for n in by_length})
        rows = [
            [number(epsilon), *(_spread(by_length[n]) if n in by_length else "-" for n in lengths), _power(by_length)]
            for epsilon, by_length in by_epsilon.items()
        ]
        header = ["epsilon", *(f"n = {n:,}" for n in lengths), "grows as n to the"]
        note = (
            "Median [quartiles] over heads and passages; C-bar has 2n rows, so d_stat is below 2n. Last column: from "
            "the last length but one to the last."
        )
        tables.append(Table(f"d_stat, {weights} weights", header, rows, note))
    return tables


def _power(by_length: Mapping[int, Sequence[float]]) -> str:
    """The slope of log d_stat over log n between the two longest lengths, of the medians."""
    if len(by_length) < 2:
        return "-"
    short, long = sorted(by_length)[-2:]
    ratio = quantile(by_length[long], 0.5) / quantile(by_length[short], 0.5)
    return f"{math.log(ratio) / math.log(long / short):.2f}"


def _bound_table(results: Mapping[Cell, Result]) -> Table:
    rows = []
    for weights in _all_weights(results):
        of_kind = _of_kind(results, DIMENSION, weights)
        for n, epsilon in dict.fromkeys((cell.length, cell.epsilon) for cell in of_kind):
            here = [result for cell, result in of_kind.items() if (cell.length, cell.epsilon) == (n, epsilon)]
            bounds = _present([bound for result in here for bound in result.bound])
            if not bounds:
                continue
            medians = [_median(_present([x for result in here for x in of(result)])) for of in _BOUND_COLUMNS]
            rows.append([weights, f"{n:,}", number(epsilon), *medians, number(min(bounds)), _median(bounds)])
    header = ["weights", "n", "epsilon", "|C| / |C-bar|", "d_stat", "beta", "least bound on d", "bound on d"]
    note = "Medians over heads and passages, and the least bound of all. [Q; K] has 2n rows."
    return Table("The bound of Theorem 1", header, rows, note)


_BOUND_COLUMNS: tuple[Callable[[Result], Numbers], ...] = (
    lambda result: result.norm_share,
    lambda result: result.d_stat,
    lambda result: result.beta,
)


def _guarantee_tables(results: Mapping[Cell, Result]) -> list[Table]:
    epsilons = _epsilons(results)
    names = [f"{epsilon:g}" for epsilon in epsilons]
    groups = [("", 2), ("", 1), *((f"{name}, epsilon", len(names)) for name in _GUARANTEES)]
    note = "Shares of draws and heads. The theorem promises all three for uniform landmarks at its bound on d."
    tables = []
    for weights in _all_weights(results):
        of_kind = _of_kind(results, DRAWS, weights)
        rows = [
            [
                cell.sampler,
                f"{cell.count:,}",
                _percent(result.order_kept / len(result.completed_error)),
                *(_percent(_share(errors(result), e)) for errors in _GUARANTEES.values() for e in epsilons),
            ]
            for cell, result in of_kind.items()
        ]
        n = max((cell.length for cell in of_kind), default=0)
        title = f"How often the guarantee holds, {weights} weights, n = {n}"
        tables.append(Table(title, ["landmarks", "d", "C~ <= C-bar", *names, *names], rows, note, groups))
    return tables


_GUARANTEES: dict[str, Callable[[Result], Numbers]] = {
    "C-bar <= C~ + lambda I": lambda result: result.completed_error,
    "|C - C~| <= epsilon |C|": lambda result: result.score_error,
}


def _suggested(results: Mapping[Cell, Result]) -> dict[tuple[str, float, str, int], list[Result]]:
    """(weights, epsilon, sampler, n) to the results of all passages."""
    found: dict[tuple[str, float, str, int], list[Result]] = {}
    for cell, result in results.items():
        if cell.kind == SUGGESTION:
            assert cell.epsilon is not None
            found.setdefault((cell.weights, cell.epsilon, cell.sampler, cell.length), []).append(result)
    return found


def _suggestion_table(results: Mapping[Cell, Result]) -> Table:
    rows = []
    for (weights, epsilon, sampler, n), passages in _suggested(results).items():
        d = [float(each) for result in passages for each in result.suggested]
        seen = [error for result in passages for error in result.score_error]
        unseen = [error for result in passages for error in result.unseen_error]
        rows.append(
            [
                weights,
                number(epsilon),
                sampler,
                _median([value for result in passages for value in _present(result.d_stat_estimate)]),
                _spread(d),
                _percent(sum(each >= 2 * n for each in d) / len(d)),
                _median(_present(seen)),
                _percent(_share(seen, epsilon)),
                _percent(_share(unseen, epsilon)),
            ]
        )
    header = [
        "weights",
        "epsilon",
        "landmarks",
        "d_stat",
        "suggested d",
        "asked for all rows",
        "true error",
        "within epsilon",
        "within epsilon on the next passage",
    ]
    note = (
        "suggest_landmarks head by head, and the true error of landmarks drawn afresh. Medians over heads and "
        "passages, d with quartiles; the last two columns are shares of heads and draws."
    )
    return Table("Suggested numbers of landmarks", header, rows, note)


def _estimate_table(results: Mapping[Cell, Result]) -> Table:
    rows = []
    for weights in _all_weights(results):
        by_length: dict[int, list[float]] = {}
        for cell, result in _of_kind(results, DIMENSION, weights).items():
            pairs = zip(result.d_stat_estimate, result.d_stat, strict=True)
            by_length.setdefault(cell.length, []).extend(e / d for e, d in pairs if e is not None and d)
        for n, ratios in sorted(by_length.items()):
            rows.append([weights, f"{n:,}", *(number(quantile(ratios, q)) for q in (0.0, 0.05, 0.5, 0.95, 1.0))])
    header = ["weights", "n", "least", "5 %", "median", "95 %", "most"]
    note = "Over heads, passages and epsilons. The estimate looks at 512 of the 2n rows at most."
    return Table("Estimated d_stat over true d_stat", header, rows, note)


def _dimension_figure(results: Mapping[Cell, Result]) -> Figure:
    panels = []
    for weights in _all_weights(results):
        by_epsilon = _d_stat_by(results, weights)
        series = [_quartiles(f"epsilon = {epsilon:g}", by_length) for epsilon, by_length in by_epsilon.items()]
        lengths = sorted({n for by_length in by_epsilon.values() for n in by_length})
        if lengths:
            series.append(Series("2n, all rows", lengths, [2.0 * n for n in lengths], mark=Mark.DASHED))
            panels.append(Panel(f"{weights} weights", "tokens n", "d_stat", series, x_log=True, y_log=True))
    return Figure("figure", "Statistical dimension of [Q; K]: median and quartiles over heads", panels)


def _quartiles(label: str, by_x: Mapping[int, Sequence[float]]) -> Series:
    x = sorted(by_x)
    low, middle, high = ([quantile(by_x[each], q) for each in x] for q in (0.25, 0.5, 0.75))
    return Series(label, x, middle, low, high)


def _guarantee_figure(results: Mapping[Cell, Result]) -> Figure:
    panels = []
    for weights in _all_weights(results):
        of_kind = _of_kind(results, DRAWS, weights)
        for name, errors in _GUARANTEES.items():
            series = []
            for sampler in dict.fromkeys(cell.sampler for cell in of_kind):
                points = {c.count or 0: errors(r) for c, r in of_kind.items() if c.sampler == sampler}
                for epsilon, mark in zip(_epsilons(results)[::2], (Mark.LINE, Mark.DASHED), strict=False):
                    shares = [_share(points[d], epsilon) for d in sorted(points)]
                    series.append(Series(f"{sampler}, epsilon = {epsilon:g}", sorted(points), shares, mark=mark))
            if series:
                panels.append(Panel(f"{name}, {weights}", "landmarks d", "share of draws", series, x_log=True))
    return Figure("guarantee", "How often the guarantee of Theorem 1 holds", panels, columns=2)


def _suggestion_figure(results: Mapping[Cell, Result]) -> Figure:
    panels: dict[tuple[str, float], list[Series]] = {}
    for (weights, epsilon, sampler, _), passages in _suggested(results).items():
        d = [float(each) for result in passages for each in result.suggested]
        estimate = [value or 0.0 for result in passages for value in result.d_stat_estimate]
        panels.setdefault((weights, epsilon), []).append(Series(sampler, estimate, d, mark=Mark.POINTS))
    drawn = [
        Panel(f"{weights} weights, epsilon = {epsilon:g}", "estimated d_stat", "suggested d", series, y_log=True)
        for (weights, epsilon), series in panels.items()
    ]
    title = "Suggested landmarks against the statistical dimension, a point a head"
    return Figure("suggestion", title, drawn, columns=2)
