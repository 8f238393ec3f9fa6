"""How well attention is approximated on real queries, keys and values (section 4.5, Figure 1).

Each cell is one method at one setting, on every layer and head of a BERT-shaped model over several passages of text;
its figures are relative spectral errors of the output, |approximation - exact| / |exact|, a number a head.

- target "softmax": the paper's comparison, all methods against exact softmax attention.
- target "gaussian": Skyformer against exact Kernelized Attention.
- method "svd": the best rank-d approximation of the score matrix, times V. No method of rank d has a smaller error of
  the score matrix, so this is the floor.
- method "as printed": Skyformer's algorithm on the softmax kernel with nothing added, that is with the keys where they
  are and the row sums taken as they come.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from skyformer.attention import build_attention
from skyformer.errors import JitterWarning, SolveError
from skyformer.functional import GAMMA, kernelized_attention, skyformer_attention, softmax_attention
from skyformer.landmarks import SAMPLERS, Candidates, CustomSampler, Landmarks
from skyformer.ops.kernels import GaussianKernel, half_norms
from skyformer.report.figures import Figure, Mark, Panel, Series
from skyformer.report.tables import Table, number, yes_or_no
from skyformer.studies.base import option, quantile
from skyformer.studies.heads import SHORTEST, HeadOptions, Heads, HeadStudy
from skyformer.studies.record import significant
from skyformer.studies.registry import register_study

RIVALS: dict[str, Callable[[int], dict[str, int]]] = {
    "nystromformer": lambda d: {"num_landmarks": d},
    "linformer": lambda d: {"num_features": d},
    "performer": lambda d: {"num_features": d},
    "informer": lambda d: {"num_features": d},
    # Two rounds of a chunk and the one before it: 4 chunk_size keys a query.
    "reformer": lambda d: {"chunk_size": max(1, d // 4), "num_hashes": 2},
    # Two global blocks, a window of three and three random ones: 8 block_size keys a query.
    "bigbird": lambda d: {"block_size": max(1, d // 8)},
}
"""What d features mean to each method: d numbers kept of every row of the score matrix, or d keys a query looks at."""

_SAMPLERS = ("uniform", "stratified", "queries", "probe", "leverage", "segment_means")

COMPARED_SAMPLERS = ("uniform", "queries", "probe")
"""The paper's, the one to take for the softmax kernel, and importance sampling."""

AS_PRINTED = "as printed"
SVD = "svd"
SKYFORMER = "skyformer"


@dataclass(frozen=True)
class Options(HeadOptions):
    weights: tuple[str, ...] = option(("pretrained", "initialised"), small=("initialised",), help="Whose Q, K, V.")
    lengths: tuple[int, ...] = option(
        (128, 256, 512),
        small=(128,),
        least=SHORTEST,
        required=True,
        help="Tokens per passage, at most the model's limit.",
    )
    long_lengths: tuple[int, ...] = option(
        (1024, 2048, 4096), small=(), least=SHORTEST, help="Longer passages, for initialised weights only."
    )
    features: tuple[int, ...] = option(
        (16, 32, 64, 128, 256), small=(16, 64), least=1, required=True, help="Numbers d of landmarks or features."
    )
    gammas: tuple[float, ...] = option(
        (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0), small=(1e-4, 1e-2, 1.0), above=0, help="Regularisations of Skyformer."
    )
    seeds: tuple[int, ...] = option(
        (0, 1, 2), small=(0,), least=0, required=True, help="Numbers of passages; each is also the random seed."
    )
    long_seeds: tuple[int, ...] = option((0,), least=0, required=True, help="The same for --long-lengths.")


@dataclass(frozen=True)
class Cell:
    target: str
    weights: str
    length: int
    method: str
    features: int
    sampler: str
    gamma: float | None
    solver: str
    seeds: str


@dataclass(frozen=True)
class Result:
    """Errors seed by seed, layer by layer, head by head; None where a method failed. `jittered`: how many passages
    needed a raised diagonal."""

    errors: tuple[float | None, ...]
    jittered: int = 0

    def quartiles(self) -> tuple[float, float, float]:
        """25, 50 and 75 %, with a failure counted as an error without bound."""
        values = [float("inf") if error is None else error for error in self.errors]
        low, middle, high = (quantile(values, q) for q in (0.25, 0.5, 0.75))
        return low, middle, high


@register_study
class Approximation(HeadStudy[Options, Cell, Result]):
    name = "approximation"
    title = "Approximation error on real heads (section 4.5, Figure 1)"
    options_type, cell_type, result_type = Options, Cell, Result

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._source.check(options.weights, max(options.lengths), "--lengths")

    def cells(self) -> Sequence[Cell]:
        """The paper's comparison first, then what goes beyond it."""
        lengths, weights = self.options.lengths, self.options.weights
        places = [(each, n) for each in weights for n in lengths]
        long = [("initialised", n) for n in self.options.long_lengths if "initialised" in weights]
        # Exact leverage scores take most of the time, and initialised heads hardly differ from length to length.
        ends = [(each, n) for each, n in places if each == "pretrained" or n in (min(lengths), max(lengths))]
        return [
            *(cell for place in (*places, *long) for cell in self._comparison(*place)),
            *(cell for place in ends for cell in self._samplers(*place)),
            *(cell for each in weights for cell in self._regularisation(each)),
        ]

    def _comparison(self, weights: str, length: int) -> list[Cell]:
        """Figure 1."""
        cells = []
        for d in self.options.features:
            cells += [self._skyformer("softmax", weights, length, d, sampler) for sampler in COMPARED_SAMPLERS]
            cells += [self._other("softmax", weights, length, d, method) for method in (AS_PRINTED, *RIVALS)]
        return cells

    def _samplers(self, weights: str, length: int) -> list[Cell]:
        cells = []
        for target in ("gaussian", "softmax"):
            for d in self.options.features:
                cells += [self._skyformer(target, weights, length, d, sampler) for sampler in _SAMPLERS]
                cells.append(self._other(target, weights, length, d, SVD))
        return cells

    def _regularisation(self, weights: str) -> list[Cell]:
        length, d = max(self.options.lengths), _middle(self.options.features)
        return [
            self._skyformer(target, weights, length, d, sampler, gamma, solver)
            for target in ("gaussian", "softmax")
            for sampler in _SAMPLERS
            for solver in ("cholesky", "schulz")
            for gamma in self.options.gammas
        ]

    def _skyformer(
        self,
        target: str,
        weights: str,
        length: int,
        d: int,
        sampler: str,
        gamma: float = GAMMA,
        solver: str = "cholesky",
    ) -> Cell:
        return Cell(target, weights, length, SKYFORMER, d, sampler, gamma, solver, self._seeds(length))

    def _other(self, target: str, weights: str, length: int, d: int, method: str) -> Cell:
        return Cell(target, weights, length, method, d, "", None, "", self._seeds(length))

    def passages(self, cell: Cell) -> Sequence[int]:
        return [int(seed) for seed in cell.seeds.split(",")]

    def _seeds(self, length: int) -> str:
        seeds = self.options.long_seeds if length in self.options.long_lengths else self.options.seeds
        return ",".join(str(seed) for seed in seeds)

    def measure(self, cell: Cell) -> Result:
        errors: list[float | None] = []
        jittered = 0
        for seed in self.passages(cell):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", JitterWarning)
                errors += self._errors(cell, seed)
            jittered += any(issubclass(warning.category, JitterWarning) for warning in caught)
        return Result(tuple(errors), jittered)

    @torch.no_grad()
    def _errors(self, cell: Cell, seed: int) -> list[float | None]:
        truth = self._truth(cell.target, cell.weights, cell.length, seed)
        if cell.method == SVD:
            found = spectral_norm(truth.rotated[:, cell.features :]) / truth.norm
        else:
            try:
                out = approximate(cell, truth.heads, seed, self._landmarks(cell, seed))
                found = spectral_norm(out.double() - truth.output) / truth.norm
            except SolveError:
                return [None] * truth.norm.numel()
        return [significant(float(error), 3) for error in found.flatten()]

    def _landmarks(self, cell: Cell, seed: int) -> str | CustomSampler:
        """Drawn once for all regularisations and solvers; where every row is a landmark Skyformer must see the name, to
        take its exact way."""
        if cell.method != SKYFORMER or cell.features >= 2 * cell.length:
            return cell.sampler
        return self._drawn_once(cell.target, cell.weights, cell.length, cell.sampler, cell.features, seed)

    @lru_cache(maxsize=6)  # noqa: B019  the study lives as long as the process
    def _drawn_once(self, target: str, weights: str, length: int, sampler: str, d: int, seed: int) -> CustomSampler:
        return draw_once(SAMPLERS.get(sampler))

    @lru_cache(maxsize=6)  # noqa: B019  the study lives as long as the process
    def _truth(self, target: str, weights: str, length: int, seed: int) -> Truth:
        return Truth(target, self._source.at(weights, length, seed).flat())

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        return [
            *_claims(results),
            *_comparison_tables(results),
            *_sampler_tables(results),
            *_regularisation_tables(results),
        ]

    @classmethod
    def figures(cls, results: Mapping[Cell, Result]) -> Sequence[Figure]:
        drawn = [_comparison_figure(results), _sampler_figure(results), _gamma_figure(results)]
        return [figure for figure in drawn if figure.panels]


class Truth:
    """Exact attention of all heads side by side, and what errors are measured against."""

    def __init__(self, target: str, heads: Heads) -> None:
        self.target, self.heads = target, heads
        exact = softmax_attention if target == "softmax" else kernelized_attention
        self.output = exact(*(x.double() for x in (heads.query, heads.key, heads.value)))
        self.norm = spectral_norm(self.output)

    @cached_property
    def rotated(self) -> Tensor:
        """U^T C V (H, n, Pv) with the left singular vectors U of the score matrix C, largest first. Cutting C to rank d
        leaves the rows from d on, for U is orthogonal."""
        return torch.stack([self._rotate(head) for head in range(self.norm.shape[1])])

    def _rotate(self, head: int) -> Tensor:
        query, key = (x[0, head].double() for x in (self.heads.query, self.heads.key))
        scale = query.shape[-1] ** -0.5
        if self.target == "softmax":
            scores = torch.softmax(scale * query @ key.mT, -1)
        else:
            scores = GaussianKernel().matrix(query, key, scale)
        vectors = torch.linalg.eigh(scores @ scores.mT).eigenvectors.flip(-1)
        return vectors.mT @ self.output[0, head]


def draw_once(sampler: CustomSampler) -> CustomSampler:
    """The sampler's first draw, again and again."""
    drawn: list[Tensor | Landmarks] = []

    def draw(candidates: Candidates, num_landmarks: int, generator: torch.Generator | None) -> Tensor | Landmarks:
        if not drawn:
            drawn.append(sampler(candidates, num_landmarks, generator))
        return drawn[0]

    return draw


def approximate(cell: Cell, heads: Heads, seed: int, landmarks: str | CustomSampler | None = None) -> Tensor:
    """What the cell's method makes of the heads (1, H, n, P), with its own landmarks or those given."""
    generator = torch.Generator().manual_seed(seed)
    if cell.method == SKYFORMER:
        assert cell.gamma is not None
        return skyformer_attention(
            heads.query,
            heads.key,
            heads.value,
            num_landmarks=cell.features,
            landmarks=landmarks or cell.sampler,
            gamma=cell.gamma,
            solver=cell.solver,
            kernel=cell.target,
            generator=generator,
        )
    if cell.method == AS_PRINTED:
        return _as_printed(heads, cell.features, generator)
    _, count, length, width = heads.query.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        options: dict[str, Any] = RIVALS[cell.method](cell.features)
        module = build_attention(cell.method, count, width, max_length=length, seed=seed, **options)
    out: Tensor = module.eval()(heads.query, heads.key, heads.value)
    return out


def _as_printed(heads: Heads, d: int, generator: torch.Generator) -> Tensor:
    """D^-1 A V with A = D_Q^(1/2) C D_K^(1/2), C from uniform landmarks, and D = diag(A 1)."""
    half = half_norms(heads.key, heads.key.shape[-1] ** -0.5)
    weight = (half - half.amax(2, keepdim=True)).exp()
    values = torch.cat([heads.value * weight, weight], -1)
    both = skyformer_attention(
        heads.query, heads.key, values, num_landmarks=d, landmarks="uniform", generator=generator
    )
    return both[..., :-1] / both[..., -1:]


def spectral_norm(x: Tensor) -> Tensor:
    """The largest singular value of each matrix (..., n, p) with p small; NaN if an entry is not finite."""
    gram = x.double().mT @ x.double()
    broken = ~gram.isfinite().all(-1).all(-1)
    values = torch.linalg.eigvalsh(gram.masked_fill(broken[..., None, None], 0))[..., -1]
    return values.clamp(min=0).sqrt().masked_fill(broken, torch.nan)


def _middle(features: Sequence[int]) -> int:
    """The d of the paper, 128, or the largest there is."""
    return 128 if 128 in features else max(features)


def _label(cell: Cell) -> str:
    if cell.method == SKYFORMER:
        return f"skyformer, {cell.sampler}"
    return {AS_PRINTED: "skyformer, as printed", SVD: "best of rank d"}.get(cell.method, cell.method)


def _settings(results: Mapping[Cell, Result], target: str) -> list[tuple[str, int]]:
    """The weights and lengths of a target, in order."""
    found = {(cell.weights, cell.length) for cell in results if cell.target == target}
    return sorted(found, key=lambda each: (each[0] != "pretrained", each[1]))


def _by_features(
    results: Mapping[Cell, Result], target: str, weights: str, length: int, wanted: Callable[[Cell], bool]
) -> dict[str, dict[int, Result]]:
    """Label to d to result, at the default regularisation."""
    chosen: dict[str, dict[int, Result]] = {}
    for cell, result in results.items():
        here = (cell.target, cell.weights, cell.length) == (target, weights, length)
        if here and cell.gamma in (None, GAMMA) and cell.solver in ("", "cholesky") and wanted(cell):
            chosen.setdefault(_label(cell), {})[cell.features] = result
    return chosen


def _in_figure_1(cell: Cell) -> bool:
    return cell.method != SVD and cell.sampler in ("", *COMPARED_SAMPLERS)


def _of_samplers(cell: Cell) -> bool:
    return cell.method in (SKYFORMER, SVD)


def _spread(result: Result) -> str:
    low, middle, high = (number(x) if x < float("inf") else "fails" for x in result.quartiles())
    return f"{middle} [{low}, {high}]"


def _table_by_features(title: str, chosen: Mapping[str, Mapping[int, Result]], note: str = "") -> Table:
    features = sorted({d for of_label in chosen.values() for d in of_label})
    rows = [
        [label, *(_spread(of_label[d]) if d in of_label else "-" for d in features)]
        for label, of_label in chosen.items()
    ]
    return Table(title, ["method", *(f"d = {d}" for d in features)], rows, note)


def _comparison_tables(results: Mapping[Cell, Result]) -> list[Table]:
    note = (
        "Relative spectral error of the output against softmax attention: median [quartiles] over heads and passages."
    )
    return [
        _table_by_features(
            f"All methods, {weights} weights, n = {length}",
            _by_features(results, "softmax", weights, length, _in_figure_1),
            note,
        )
        for weights, length in _settings(results, "softmax")
    ]


def _sampler_tables(results: Mapping[Cell, Result]) -> list[Table]:
    names = {"gaussian": "Kernelized Attention", "softmax": "softmax attention"}
    tables = []
    for target, name in names.items():
        for weights, length in _settings(results, target):
            chosen = _by_features(results, target, weights, length, _of_samplers)
            if "best of rank d" in chosen:
                title = f"Landmarks: Skyformer against {name}, {weights} weights, n = {length}"
                tables.append(_table_by_features(title, chosen))
    return tables


def _regularised(
    results: Mapping[Cell, Result], target: str, weights: str
) -> dict[tuple[str, str], dict[float, Result]]:
    """(sampler, solver) to gamma to result, where gamma was varied."""
    found: dict[tuple[str, str], dict[float, Result]] = {}
    places = {(c.length, c.features) for c in results if c.gamma not in (None, GAMMA)}
    for cell, result in results.items():
        here = (cell.target, cell.weights) == (target, weights) and (cell.length, cell.features) in places
        if here and cell.gamma is not None:
            found.setdefault((cell.sampler, cell.solver), {})[cell.gamma] = result
    return {key: by_gamma for key, by_gamma in found.items() if len(by_gamma) > 1}


def _regularisation_tables(results: Mapping[Cell, Result]) -> list[Table]:
    tables = []
    for target in ("gaussian", "softmax"):
        for weights in dict.fromkeys(cell.weights for cell in results):
            chosen = _regularised(results, target, weights)
            gammas = sorted({gamma for by_gamma in chosen.values() for gamma in by_gamma})
            rows = [
                [sampler, solver, *(_median_and_jitter(by_gamma.get(gamma)) for gamma in gammas)]
                for (sampler, solver), by_gamma in chosen.items()
            ]
            if rows:
                title = f"Regularisation, {target} kernel, {weights} weights: median error by gamma"
                note = "A star: the factorisation needed a raised diagonal on some passage."
                tables.append(Table(title, ["landmarks", "solver", *(f"{gamma:g}" for gamma in gammas)], rows, note))
    return tables


def _median_and_jitter(result: Result | None) -> str:
    if result is None:
        return "-"
    middle = result.quartiles()[1]
    return ("fails" if middle == float("inf") else number(middle)) + ("*" if result.jittered else "")


def _claims(results: Mapping[Cell, Result]) -> list[Table]:
    """probe against uniform: a third of the error at the same d, and better with a quarter of the landmarks."""
    rows = []
    for target in ("gaussian", "softmax"):
        for weights, length in _settings(results, target):
            chosen = _by_features(results, target, weights, length, _of_samplers)
            uniform, probe = chosen.get("skyformer, uniform", {}), chosen.get("skyformer, probe", {})
            if 128 in uniform and {32, 128} <= probe.keys():
                medians = [r.quartiles()[1] for r in (uniform[128], probe[128], probe[32])]
                rows.append([target, weights, f"{length:,}", *(number(m) for m in medians), *_verdicts(*medians)])
    header = [
        "kernel",
        "weights",
        "n",
        "uniform, d = 128",
        "probe, d = 128",
        "probe, d = 32",
        "ratio at 128",
        "at most a third",
        "32 beats 128",
    ]
    return [Table("The claim: probe landmarks against uniform ones, median errors", header, rows)] if rows else []


def _verdicts(uniform: float, probe: float, few: float) -> list[str]:
    ratio = probe / uniform if uniform > 0 else 1.0
    return [number(ratio), yes_or_no(ratio <= 1 / 3), yes_or_no(few < uniform)]


def _lines(chosen: Mapping[str, Mapping[int, Result]]) -> list[Series]:
    return [_line(label, of_label) for label, of_label in chosen.items()]


def _line(label: str, points: Mapping[Any, Result]) -> Series:
    x = sorted(points)
    low, middle, high = zip(*(map(_visible, points[each].quartiles()) for each in x), strict=True)
    mark = Mark.DASHED if label == "best of rank d" else Mark.LINE
    return Series(label, x, middle, low, high, mark)


def _visible(error: float) -> float | None:
    """None where a logarithmic axis has no place for it: exact, or failed."""
    return error if 1e-12 < error < 1e4 else None


def _comparison_figure(results: Mapping[Cell, Result]) -> Figure:
    panels = [
        Panel(
            f"{weights} weights, n = {length:,}",
            "number of features d",
            "relative spectral error",
            _lines(_by_features(results, "softmax", weights, length, _in_figure_1)),
            x_log=True,
            y_log=True,
        )
        for weights, length in _settings(results, "softmax")
    ]
    return Figure("figure", "Approximating softmax attention: median and quartiles over heads", panels)


def _sampler_figure(results: Mapping[Cell, Result]) -> Figure:
    panels = []
    for target in ("gaussian", "softmax"):
        for weights, length in _settings(results, target):
            chosen = _by_features(results, target, weights, length, _of_samplers)
            if "best of rank d" in chosen:
                title = f"{target} kernel, {weights} weights, n = {length:,}"
                panels.append(
                    Panel(title, "landmarks d", "relative spectral error", _lines(chosen), x_log=True, y_log=True)
                )
    return Figure("landmarks", "Skyformer by landmark sampler, and the best of rank d", panels)


def _gamma_figure(results: Mapping[Cell, Result]) -> Figure:
    panels = []
    for target in ("gaussian", "softmax"):
        for weights in dict.fromkeys(cell.weights for cell in results):
            chosen = _regularised(results, target, weights)
            series = [
                _by_gamma(f"{sampler}, {solver}", by, Mark.LINE if solver == "cholesky" else Mark.DASHED)
                for (sampler, solver), by in chosen.items()
            ]
            panels.append(
                Panel(f"{target} kernel, {weights} weights", "gamma", "median error", series, x_log=True, y_log=True)
            )
    return Figure("gamma", "Skyformer by regularisation and solver", [p for p in panels if p.series], columns=2)


def _by_gamma(label: str, by_gamma: Mapping[float, Result], mark: Mark) -> Series:
    gammas = sorted(by_gamma)
    return Series(label, gammas, [_visible(by_gamma[gamma].quartiles()[1]) for gamma in gammas], mark=mark)
