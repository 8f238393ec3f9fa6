"""Theorem 1 on real queries and keys: statistical dimension, leverage scores, the bound, and how often it holds.

With C-bar the completed kernel matrix of [Q; K] (N = 2n rows), C its block between queries and keys and
lambda = epsilon |C|:

    l_i    = [C-bar (C-bar + lambda I)^-1]_ii          leverage scores
    d_stat = sum_i l_i                                 statistical dimension
    beta   = min_i d_stat / (N l_i)                    1 when all rows matter alike
    d     >= 28/3 s / beta log(2 N / delta)            the bound, with s = d_stat (1 + lambda / |C-bar|) the stable rank

(The bound is the appendix's lemma with the theorem's matrix in it: it gives the constant that the theorem leaves open.)

Three kinds of cells: "dimension" computes these, "draws" counts how often the guarantee holds over many draws of
landmarks, and "suggestion" asks `suggest_landmarks` for d and compares with the true error on draws it has not seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from skyformer.errors import InputError
from skyformer.functional import GAMMA
from skyformer.kernels import GaussianKernel
from skyformer.landmarks import SAMPLERS, Candidates, take_rows
from skyformer.studies.base import Fact, Study, option
from skyformer.studies.heads import PACKAGED_MODEL, PYTHON_REFERENCE, HeadSource
from skyformer.studies.record import significant
from skyformer.studies.registry import register_study
from skyformer.studies.show import Figure, Mark, Panel, Series, Table, number, quantile
from skyformer.suggestion import landmarks_by_head, statistical_dimension

DIMENSION, DRAWS, SUGGESTION = "dimension", "draws", "suggestion"

_JITTER = 1e-10
"""Stands in for the pseudo-inverse of the paper: with any ridge the approximation only gets smaller, so the order
C~ <= C-bar is kept."""

_ROUNDING = 1e-9
"""An eigenvalue this far below zero, relative to the largest of C-bar, is taken for rounding."""

_FRESH_DRAWS = 5
_FIRST_FRESH_SEED = 1_000_000


@dataclass(frozen=True)
class Options:
    model: str = option(
        PACKAGED_MODEL, help="A BERT-shaped model: a folder, a name on the hub, or the package of that name."
    )
    text: str = option(
        PYTHON_REFERENCE, help="A text file, WikiText-2 for the paper's; or the reference that Python brings."
    )
    weights: tuple[str, ...] = option(("pretrained", "initialised"), help="Whose Q, K, V.")
    lengths: tuple[int, ...] = option(
        (64, 128, 256, 512), small=(32, 64, 128), help="Tokens n, up to the model's limit."
    )
    long_lengths: tuple[int, ...] = option((1024, 2048), small=(), help="Tokens, for initialised weights only.")
    epsilons: tuple[float, ...] = option((0.5, 0.2, 0.1, 0.05, 0.01), small=(0.5, 0.1), help="Errors of C allowed.")
    delta: float = option(0.1, help="The probability with which the guarantee may fail.")
    heads: int = option(24, small=6, help="Heads measured, spread over all layers; fewer beyond 512 tokens.")
    seeds: tuple[int, ...] = option((0, 1, 2), small=(0,), help="Passages for d_stat.")
    draw_length: int = option(128, small=64, help="Tokens where landmarks are drawn many times.")
    draws: int = option(100, small=20, help="Draws of the landmarks.")
    counts: tuple[int, ...] = option((16, 32, 64, 128, 256, 512, 1024), small=(16, 64, 256), help="Landmarks drawn.")
    samplers: tuple[str, ...] = option(("uniform", "stratified", "probe"), help="Landmark samplers.")
    targets: tuple[float, ...] = option(
        (0.3, 0.1), small=(0.3,), help="Errors that a number of landmarks is asked for."
    )
    held_out: tuple[int, ...] = option((5, 6, 7), small=(5,), help="Passages for suggested numbers of landmarks.")


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

    d_stat: tuple[float | None, ...] = ()
    d_stat_estimate: tuple[float | None, ...] = ()
    beta: tuple[float | None, ...] = ()
    largest_leverage: tuple[float | None, ...] = ()
    bound: tuple[float | None, ...] = ()
    norm_share: tuple[float | None, ...] = ()
    """|C| / |C-bar|."""
    order_kept: int = 0
    """Draws and heads for which C-bar - C~ had no eigenvalue below zero, up to rounding."""
    completed_error: tuple[float | None, ...] = ()
    """|C-bar - C~-bar| / |C|: the guarantee holds where it is at most epsilon."""
    score_error: tuple[float | None, ...] = ()
    """|C - C~| / |C|."""
    suggested: tuple[int, ...] = ()


@register_study
class Dimension(Study[Options, Cell, Result]):
    name = "dimension"
    title = "Statistical dimension and how many landmarks it takes (Theorem 1)"
    options_type, cell_type, result_type = Options, Cell, Result

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        tokens = [*options.lengths, options.draw_length]
        if "pretrained" in options.weights and max(tokens) > self._source.longest:
            raise InputError(
                f"--lengths and --draw-length must be at most {self._source.longest}, the limit of "
                f"{self._source.model_name}; got {max(tokens)}. Longer ones go into --long-lengths"
            )

    @cached_property
    def _source(self) -> HeadSource:
        return HeadSource(self.options.model, self.options.text)

    def facts(self) -> Mapping[str, Fact]:
        return self._source.facts()

    def cells(self) -> Sequence[Cell]:
        return [*self._dimensions(), *self._draws(), *self._suggestions()]

    def _dimensions(self) -> list[Cell]:
        places = [(weights, n) for weights in self.options.weights for n in self.options.lengths]
        if "initialised" in self.options.weights:
            places += [("initialised", n) for n in self.options.long_lengths]
        return [
            Cell(DIMENSION, weights, n, self._heads_at(n), seed, epsilon, self.options.delta)
            for weights, n in places
            for seed in (self.options.seeds if n <= 512 else self.options.seeds[:1])
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
            for weights in self.options.weights
            for epsilon in self.options.targets
            for sampler in self.options.samplers
            for seed in self.options.held_out
        ]

    def _heads_at(self, n: int) -> int:
        """The work grows with the third power of n."""
        return self.options.heads if n <= 512 else max(1, self.options.heads // (2 if n <= 1024 else 8))

    @torch.no_grad()
    def measure(self, cell: Cell) -> Result:
        how = {DIMENSION: self._measure_dimension, DRAWS: self._measure_draws, SUGGESTION: self._measure_suggestion}
        return how[cell.kind](cell)

    def _measure_dimension(self, cell: Cell) -> Result:
        assert cell.epsilon is not None
        assert cell.delta is not None
        completed = self._completed(cell)
        ridge = cell.epsilon * completed.score_norm
        scores = completed.leverage(ridge)
        d_stat = scores.sum(-1)
        rows = scores.shape[-1]
        beta = d_stat / (rows * scores.amax(-1))
        stable_rank = d_stat * (1 + ridge / completed.norm)
        bound = 28 / 3 * stable_rank / beta * math.log(2 * rows / cell.delta)
        query, key = self._points(cell)
        generator = torch.Generator().manual_seed(cell.seed)
        estimate = statistical_dimension(query, key, cell.epsilon, generator=generator)[0]
        return Result(
            d_stat=_numbers(d_stat),
            d_stat_estimate=_numbers(estimate),
            beta=_numbers(beta),
            largest_leverage=_numbers(scores.amax(-1)),
            bound=_numbers(bound),
            norm_share=_numbers(completed.score_norm / completed.norm),
        )

    def _measure_draws(self, cell: Cell) -> Result:
        assert cell.count is not None
        assert cell.draws is not None
        completed, candidates = self._completed(cell), self._candidates(cell)
        order_kept = 0
        completed_errors: list[float | None] = []
        score_errors: list[float | None] = []
        for draw in range(cell.draws):
            rows = SAMPLERS[cell.sampler](candidates, cell.count, torch.Generator().manual_seed(draw))
            assert isinstance(rows, Tensor)
            rest = completed.gram - nystrom(completed.gram, rows)
            eigenvalues = torch.linalg.eigvalsh(rest)
            order_kept += int((eigenvalues[:, 0] >= -_ROUNDING * completed.norm).sum())
            completed_errors += _numbers(eigenvalues[:, -1].clamp(min=0) / completed.score_norm)
            between = rest[:, : cell.length, cell.length :]
            score_errors += _numbers(_spectral_norm(between) / completed.score_norm)
        return Result(order_kept=order_kept, completed_error=tuple(completed_errors), score_error=tuple(score_errors))

    def _measure_suggestion(self, cell: Cell) -> Result:
        assert cell.epsilon is not None
        query, key = self._points(cell)
        generator = torch.Generator().manual_seed(cell.seed)
        suggested = landmarks_by_head(query, key, cell.epsilon, landmarks=cell.sampler, generator=generator)[0]
        estimate = statistical_dimension(query, key, cell.epsilon, generator=generator)[0]
        return Result(
            d_stat_estimate=_numbers(estimate),
            suggested=tuple(int(d) for d in suggested),
            score_error=tuple(error for draw in range(_FRESH_DRAWS) for error in self._fresh(cell, suggested, draw)),
        )

    def _fresh(self, cell: Cell, suggested: Tensor, draw: int) -> tuple[float | None, ...]:
        """The true error of each head with as many landmarks as were suggested for it, in a draw of its own."""
        query, key = (x[0] for x in self._points(cell))
        scale = query.shape[-1] ** -0.5
        errors = torch.zeros(len(suggested), dtype=torch.float64)
        for d in suggested.unique().tolist():
            of_d = (suggested == d).nonzero()[:, 0]
            # With every row a landmark Skyformer is exact.
            if d < 2 * cell.length:
                seed = torch.Generator().manual_seed(_FIRST_FRESH_SEED + draw)
                some = Candidates(query[of_d][None], key[of_d][None], None, None, GaussianKernel(), scale)
                errors[of_d] = _true_errors(some, cell.sampler, d, seed)
        return _numbers(errors)

    def _points(self, cell: Cell) -> tuple[Tensor, Tensor]:
        """Q and K (1, heads, n, P) in float64."""
        heads = self._source.at(cell.weights, cell.length, cell.seed).flat()
        total = heads.query.shape[1]
        chosen = torch.linspace(0, total - 1, min(cell.heads, total)).round().long()
        return heads.query[:, chosen].double(), heads.key[:, chosen].double()

    def _candidates(self, cell: Cell) -> Candidates:
        query, key = self._points(cell)
        return Candidates(query, key, None, None, GaussianKernel(), query.shape[-1] ** -0.5)

    def _completed(self, cell: Cell) -> Completed:
        return self._completed_at(cell.weights, cell.length, cell.heads, cell.seed)

    @lru_cache(maxsize=1)  # noqa: B019  the study lives as long as the process
    def _completed_at(self, weights: str, length: int, heads: int, seed: int) -> Completed:
        query, key = (x[0] for x in self._points(Cell(DIMENSION, weights, length, heads, seed)))
        points = torch.cat([query, key], 1)
        gram = GaussianKernel().matrix(points, points, query.shape[-1] ** -0.5)
        return Completed(gram, _spectral_norm(gram[:, :length, length:]))

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        found = [
            *_growth_tables(results),
            *_bound_tables(results),
            *_guarantee_tables(results),
            *_suggestion_tables(results),
            *_estimate_tables(results),
        ]
        return [table for table in found if table.rows]

    @classmethod
    def figures(cls, results: Mapping[Cell, Result]) -> Sequence[Figure]:
        drawn = [_dimension_figure(results), _guarantee_figure(results), _suggestion_figure(results)]
        return [figure for figure in drawn if figure.panels]


class Completed:
    """C-bar of each head (H, N, N), with its spectrum and |C| (H,)."""

    def __init__(self, gram: Tensor, score_norm: Tensor) -> None:
        self.gram, self.score_norm = gram, score_norm

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (H, N), and the squared entries of the eigenvectors (H, N, N)."""
        pairs = [torch.linalg.eigh(gram) for gram in self.gram]
        values = torch.stack([values for values, _ in pairs]).clamp(min=0)
        return values, torch.stack([vectors.square() for _, vectors in pairs])

    @property
    def norm(self) -> Tensor:
        return self._spectrum[0][:, -1]

    def leverage(self, ridge: Tensor) -> Tensor:
        """diag(C-bar (C-bar + lambda I)^-1) for lambda (H,): (H, N)."""
        values, squares = self._spectrum
        return (squares @ (values / (values + ridge[:, None])).unsqueeze(-1)).squeeze(-1)


def nystrom(gram: Tensor, rows: Tensor) -> Tensor:
    """C~-bar = C-bar S (S^T C-bar S)^-1 S^T C-bar for gram (H, N, N) and rows (1, d) or (1, H, d)."""
    # Rows that all heads share may repeat, which adds nothing but a singular matrix.
    rows = rows[0].unique()[None] if rows.dim() == 2 else rows[0]
    rows = rows.expand(gram.shape[0], -1)
    columns = gram.gather(2, rows[:, None].expand(-1, gram.shape[1], -1))
    middle = columns.gather(1, rows[:, :, None].expand(-1, -1, rows.shape[1]))
    middle = middle + _JITTER * torch.eye(rows.shape[1], dtype=gram.dtype)
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(middle), columns.mT, upper=False)
    return half.mT @ half


def _true_errors(candidates: Candidates, sampler: str, d: int, generator: torch.Generator) -> Tensor:
    """|C - C~| / |C| of each head, with the whole matrices and Skyformer's own regularisation."""
    query, key, kernel, scale = candidates.query, candidates.key, candidates.kernel, candidates.scale
    rows = SAMPLERS[sampler](candidates, d, generator)
    assert isinstance(rows, Tensor)
    rows = rows if rows.dim() == 3 else rows.unsqueeze(1)
    landmarks = take_rows(torch.cat([query, key], 2), rows)
    middle = kernel.matrix(landmarks, landmarks, scale) + GAMMA * torch.eye(d, dtype=query.dtype)
    exact = kernel.matrix(query, key, scale)
    solved = torch.linalg.solve(middle, kernel.matrix(landmarks, key, scale))
    rest = exact - kernel.matrix(query, landmarks, scale) @ solved
    return (_spectral_norm(rest) / _spectral_norm(exact))[0]


def _spectral_norm(matrix: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(matrix @ matrix.mT)[..., -1].clamp(min=0).sqrt()


def _numbers(values: Tensor) -> tuple[float | None, ...]:
    return tuple(significant(float(value)) for value in values)


def _present(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _spread(values: Sequence[float]) -> str:
    low, middle, high = (number(quantile(values, q)) for q in (0.25, 0.5, 0.75))
    return f"{middle} [{low}, {high}]"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _share(errors: Sequence[float | None], epsilon: float) -> float:
    """How many are at most epsilon; one that is missing is not."""
    return sum(error is not None and error <= epsilon for error in errors) / len(errors)


def _of_kind(results: Mapping[Cell, Result], kind: str, weights: str) -> dict[Cell, Result]:
    return {cell: result for cell, result in results.items() if (cell.kind, cell.weights) == (kind, weights)}


def _all_weights(results: Mapping[Cell, Result]) -> list[str]:
    return list(dict.fromkeys(cell.weights for cell in results))


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
        title = f"d_stat, {weights} weights"
        note = "Median [quartiles] over heads and passages; C-bar has 2n rows, so d_stat is below 2n."
        tables.append(Table(title, header, rows, note))
    return tables


def _power(by_length: Mapping[int, Sequence[float]]) -> str:
    """The slope of log d_stat over log n between the two longest lengths, of the medians."""
    if len(by_length) < 2:
        return "-"
    short, long = sorted(by_length)[-2:]
    ratio = quantile(by_length[long], 0.5) / quantile(by_length[short], 0.5)
    return f"{math.log(ratio) / math.log(long / short):.2f}"


def _bound_tables(results: Mapping[Cell, Result]) -> list[Table]:
    rows = []
    for weights in _all_weights(results):
        of_kind = _of_kind(results, DIMENSION, weights)
        if not of_kind:
            continue
        n = max(cell.length for cell in of_kind)
        for epsilon in dict.fromkeys(cell.epsilon for cell in of_kind):
            here = [result for cell, result in of_kind.items() if (cell.length, cell.epsilon) == (n, epsilon)]
            columns = [_present([value for result in here for value in values(result)]) for values in _BOUND_COLUMNS]
            useful = sum(bound < 2 * n for bound in columns[-1]) / len(columns[-1])
            rows.append(
                [weights, f"{n:,}", number(epsilon), *(number(quantile(c, 0.5)) for c in columns), _percent(useful)]
            )
    header = ["weights", "n", "epsilon", "|C| / |C-bar|", "d_stat", "largest l", "beta", "bound on d", "heads below 2n"]
    note = "Medians over heads and passages. Last column: heads whose bound asks for fewer rows than there are."
    return [Table("The bound of Theorem 1", header, rows, note)]


_BOUND_COLUMNS = (
    lambda result: result.norm_share,
    lambda result: result.d_stat,
    lambda result: result.largest_leverage,
    lambda result: result.beta,
    lambda result: result.bound,
)


def _epsilons(results: Mapping[Cell, Result]) -> list[float]:
    found = {cell.epsilon for cell in results if cell.kind == DIMENSION and cell.epsilon is not None}
    return sorted(found, reverse=True)


def _guarantee_tables(results: Mapping[Cell, Result]) -> list[Table]:
    epsilons = _epsilons(results)
    tables = []
    for weights in _all_weights(results):
        of_kind = _of_kind(results, DRAWS, weights)
        rows = [
            [
                cell.sampler,
                str(cell.count),
                _percent(result.order_kept / len(result.completed_error)),
                *(_percent(_share(result.completed_error, epsilon)) for epsilon in epsilons),
                *(_percent(_share(result.score_error, epsilon)) for epsilon in epsilons),
            ]
            for cell, result in of_kind.items()
        ]
        n = max((cell.length for cell in of_kind), default=0)
        names = [f"{epsilon:g}" for epsilon in epsilons]
        tables.append(
            Table(
                f"How often the guarantee holds, {weights} weights, n = {n}",
                ["landmarks", "d", "C~ <= C-bar", *names, *names],
                rows,
                "Shares of draws and heads. The theorem promises both for uniform landmarks at its bound on d.",
                [
                    ("", 2),
                    ("", 1),
                    ("C-bar <= C~ + lambda I, epsilon", len(names)),
                    ("|C - C~| <= epsilon |C|, epsilon", len(names)),
                ],
            )
        )
    return tables


def _suggested(results: Mapping[Cell, Result]) -> dict[tuple[str, float, str, int], list[Result]]:
    """(weights, epsilon, sampler, n) to the results of all passages."""
    found: dict[tuple[str, float, str, int], list[Result]] = {}
    for cell, result in results.items():
        if cell.kind == SUGGESTION:
            assert cell.epsilon is not None
            found.setdefault((cell.weights, cell.epsilon, cell.sampler, cell.length), []).append(result)
    return found


def _suggestion_tables(results: Mapping[Cell, Result]) -> list[Table]:
    rows = []
    for (weights, epsilon, sampler, n), passages in _suggested(results).items():
        d = [float(each) for result in passages for each in result.suggested]
        estimate = [value for result in passages for value in _present(result.d_stat_estimate)]
        errors = [error for result in passages for error in result.score_error]
        exact = sum(each >= 2 * n for each in d) / len(d)
        rows.append(
            [
                weights,
                number(epsilon),
                sampler,
                _spread(d),
                _percent(exact),
                number(quantile(estimate, 0.5)),
                number(quantile(_present(errors), 0.5)),
                _percent(_share(errors, epsilon)),
            ]
        )
    header = [
        "weights",
        "epsilon",
        "landmarks",
        "suggested d",
        "asked for all rows",
        "d_stat",
        "true error",
        "true error within epsilon",
    ]
    note = (
        "suggest_landmarks head by head on passages held out, against the true error of landmarks drawn "
        "afresh; medians over heads and passages, d with quartiles. Last column: share of heads and draws."
    )
    return [Table("Suggested numbers of landmarks", header, rows, note)]


def _estimate_tables(results: Mapping[Cell, Result]) -> list[Table]:
    rows = []
    for weights in _all_weights(results):
        by_length: dict[int, list[float]] = {}
        for cell, result in _of_kind(results, DIMENSION, weights).items():
            pairs = zip(result.d_stat_estimate, result.d_stat, strict=True)
            by_length.setdefault(cell.length, []).extend(e / d for e, d in pairs if e is not None and d)
        for n, ratios in sorted(by_length.items()):
            shown = (number(quantile(ratios, q)) for q in (0.0, 0.05, 0.5, 0.95, 1.0))
            rows.append([weights, f"{n:,}", *shown])
    header = ["weights", "n", "least", "5 %", "median", "95 %", "most"]
    note = "Over heads, passages and epsilons. The estimate looks at 512 of the 2n rows."
    return [Table("Estimated d_stat over true d_stat", header, rows, note)]


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


_GUARANTEES = {
    "C-bar <= C~ + lambda I": lambda result: result.completed_error,
    "|C - C~| <= epsilon |C|": lambda result: result.score_error,
}


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
    return Figure(
        "suggestion", "Suggested landmarks against the statistical dimension, a point a head", drawn, columns=2
    )
