"""How well attention is approximated on real queries, keys and values (section 4.5, Figure 1).

Each cell is one method with one setting, on every layer and head of a BERT-shaped model over several passages of text.
Its result is one number per head and passage: the relative spectral error of the output, |approximation - exact| /
|exact|.

- target "softmax": the paper's comparison, all methods against exact softmax attention.
- target "gaussian": Skyformer against exact Kernelized Attention.
- method "svd": the best rank-d approximation of the score matrix, times V. No method of rank d has a smaller error of
  the score matrix, so this is a lower limit.
- method "tilted": tilted attention, which needs no d; it gets 2 d scores per query, as many as Skyformer.
- method "as printed": Skyformer's algorithm on the softmax kernel as in the paper, up to the effect of gamma: the keys
  are not shifted, and the approximate row sums are used as they are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skyformer.attention import build_attention
from skyformer.attention.tilted import SMALLEST_BUDGET, tilted_attention
from skyformer.errors import JitterWarning, SolveError
from skyformer.functional import GAMMA, kernelized_attention, skyformer_attention, softmax_attention
from skyformer.landmarks import SAMPLERS, Candidates, CustomSampler, Landmarks, ProbeSampler
from skyformer.ops.kernels import GaussianKernel, half_norms
from skyformer.report.figures import COVERED, Figure, Mark, Panel, Series
from skyformer.report.tables import NOTHING, Table, from_frame, number, yes_or_no
from skyformer.studies.base import option
from skyformer.studies.frames import median_and_quartiles, quantile, to_frame
from skyformer.studies.heads import LENGTHS_HELP, LONG_LENGTHS_HELP, SHORTEST, HeadOptions, Heads, HeadStudy
from skyformer.studies.record import significant
from skyformer.studies.registry import register_study
from skyformer.studies.theorem import spectral_norm

if TYPE_CHECKING:
    from pandas import DataFrame

RIVALS: dict[str, Callable[[int], dict[str, int]]] = {
    "nystromformer": lambda d: {"num_landmarks": d},
    "linformer": lambda d: {"num_features": d},
    "performer": lambda d: {"num_features": d},
    "informer": lambda d: {"num_features": d},
    # Two rounds of hashing, each with a chunk and the one before it: 4 chunk_size keys per query.
    "reformer": lambda d: {"chunk_size": max(1, d // 4), "num_hashes": 2},
    # Two global blocks, a window of three and three random ones: 8 block_size keys per query.
    "bigbird": lambda d: {"block_size": max(1, d // 8)},
}
"""What d features mean for each method: d numbers per row of the score matrix, or d keys per query."""

ONE_PRODUCT = ("reformer", "bigbird")
"""Methods that compute d scores per query. All others have two thin products with d columns, or features of queries and
of keys: 2 d."""

_SAMPLERS = ("uniform", "stratified", "queries", "probe", "leverage", "segment_means")

COMPARED_SAMPLERS = ("uniform", "queries", "probe")
"""The paper's sampler, the recommended one for the softmax kernel, and importance sampling."""

AS_PRINTED = "as printed"
SVD = "svd"
TILTED = "tilted"
SKYFORMER = "skyformer"
BEST = "best of rank d"
TARGETS = {"gaussian": "Kernelized Attention", "softmax": "softmax attention"}


@dataclass(frozen=True)
class Options(HeadOptions):
    lengths: tuple[int, ...] = option((128, 256, 512), small=(128,), least=SHORTEST, required=True, help=LENGTHS_HELP)
    long_lengths: tuple[int, ...] = option((1024, 2048, 4096), small=(), least=SHORTEST, help=LONG_LENGTHS_HELP)
    features: tuple[int, ...] = option(
        (16, 32, 64, 128, 256), small=(16, 64), least=1, required=True, help="Numbers d of landmarks or features."
    )
    gammas: tuple[float, ...] = option(
        (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0), small=(1e-4, 1e-2, 1.0), above=0, help="Regularisations of Skyformer."
    )
    seeds: tuple[int, ...] = option(
        (0, 1, 2), small=(0,), least=0, required=True, help="Passages, by number, which is also the random seed."
    )
    long_seeds: tuple[int, ...] = option(
        (0,), least=0, required=True, help="Indices of the passages for --long-lengths."
    )


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
    """One error per passage, layer and head, in this order; None where a method failed. jittered: the number of
    passages for which the factorisation needed a raised diagonal."""

    errors: tuple[float | None, ...]
    jittered: int = 0
    layers: int = 1

    def quartiles(self) -> tuple[float, float, float]:
        """25, 50 and 75 % quantiles; a failure counts as an infinite error."""
        low, middle, high = (quantile(self.errors, q) for q in (0.25, 0.5, 0.75))
        return low, middle, high

    def median_of_layer(self, layer: int, passages: int) -> float:
        """The median over the heads of one layer, in all passages."""
        heads = len(self.errors) // (passages * self.layers)
        starts = [(passage * self.layers + layer) * heads for passage in range(passages)]
        return quantile([error for start in starts for error in self.errors[start : start + heads]], 0.5)


@register_study
class Approximation(HeadStudy[Options, Cell, Result]):
    name = "approximation"
    title = "Approximation error on real heads (section 4.5, Figure 1)"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._source.check(options.weights, max(options.lengths), "--lengths")

    def cells(self) -> Sequence[Cell]:
        """The paper's comparison first, then the comparisons of landmarks and regularisation."""
        lengths, weights = self.options.lengths, self.options.weights
        places = [(each, n) for each in weights for n in lengths]
        long = [("initialised", n) for n in self.options.long_lengths if "initialised" in weights]
        # Exact leverage scores take most of the time, and for initialised weights the length makes little difference.
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
            cells += [self._other("softmax", weights, length, d, method) for method in (AS_PRINTED, *RIVALS, TILTED)]
        return cells

    def _samplers(self, weights: str, length: int) -> list[Cell]:
        cells = []
        for target in TARGETS:
            for d in self.options.features:
                cells += [self._skyformer(target, weights, length, d, sampler) for sampler in _SAMPLERS]
                cells += [self._other(target, weights, length, d, method) for method in (SVD, TILTED)]
        return cells

    def _regularisation(self, weights: str) -> list[Cell]:
        length, d = max(self.options.lengths), _middle(self.options.features)
        return [
            self._skyformer(target, weights, length, d, sampler, gamma, solver)
            for target in TARGETS
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
        jittered = layers = 0
        for seed in self.passages(cell):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", JitterWarning)
                errors += self._errors(cell, seed)
            jittered += any(issubclass(warning.category, JitterWarning) for warning in caught)
            layers = self._truth(cell.target, cell.weights, cell.length, seed).layers
        return Result(tuple(errors), jittered, layers)

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
        """Drawn once for all regularisations and solvers. If every row is a landmark, Skyformer gets the name of the
        sampler instead, because it then computes exact attention."""
        if cell.method != SKYFORMER or cell.features >= 2 * cell.length:
            return cell.sampler
        return self._drawn_once(cell.target, cell.weights, cell.length, cell.sampler, cell.features, seed)

    @lru_cache(maxsize=6)  # noqa: B019  the study exists as long as the process
    def _drawn_once(self, target: str, weights: str, length: int, sampler: str, d: int, seed: int) -> CustomSampler:
        return draw_once(SAMPLERS.get(sampler))

    @lru_cache(maxsize=6)  # noqa: B019  the study exists as long as the process
    def _truth(self, target: str, weights: str, length: int, seed: int) -> Truth:
        return Truth(target, self._source.at(weights, length, seed))

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        note = "Relative spectral error against softmax attention: median [quartiles] over heads and passages."
        found = [
            _claim_table(results),
            *_layer_tables(results),
            *(_error_table(f"All methods, {title}", rows, note) for title, rows in _comparison(results)),
            *(
                _error_table(f"Landmarks: Skyformer against {name}, {title}", rows)
                for target, name in TARGETS.items()
                for title, rows in _samplers(results, target)
            ),
            *(_gamma_table(title, rows) for title, rows in _regularised(results)),
        ]
        return [table for table in found if table.rows]

    @classmethod
    def figures(cls, results: Mapping[Cell, Result]) -> Sequence[Figure]:
        at_equal_cost = [
            _error_panel(title, _drawn(rows), "scores per query", "cost") for title, rows in _ends(_comparison(results))
        ]
        # With initialised weights all errors are small; the tables have them.
        samplers = [
            _error_panel(f"{TARGETS[target]}, n = {rows['length'].iloc[0]:,}", _short_labels(rows), "landmarks d")
            for target in TARGETS
            for _, rows in _ends(_samplers(results, target))[:1]
        ]
        by_layer = _layer_panels(results)
        weights = "pretrained" if _has_pretrained(results) else "initialised"
        gammas = [_gamma_panel(*each) for each in _regularised(results) if each[0].endswith(f"{weights} weights")]
        solid = f"Solid: Cholesky factorisation. Dashed: Schulz iteration. {COVERED}"
        drawn = [
            Figure("figure", "Error against cost: approximations of softmax attention", at_equal_cost, 2, same_x=True),
            Figure("layers", "Error by layer: approximations of softmax attention", by_layer, same_y=True),
            Figure("landmarks", "Skyformer by landmarks, tilted attention, and the best of rank d", samplers, 2),
            Figure("gamma", "Skyformer by regularisation", gammas, 2, solid),
        ]
        return [figure for figure in drawn if figure.panels]


class Truth:
    """The exact output of all heads (layers, heads, n, P), which approximations are compared with."""

    def __init__(self, target: str, heads: Heads) -> None:
        self.target, self.layers, self.heads = target, heads.query.shape[0], heads.flat()
        heads = self.heads
        exact = softmax_attention if target == "softmax" else kernelized_attention
        self.output = exact(*(x.double() for x in (heads.query, heads.key, heads.value)))
        self.norm = spectral_norm(self.output)

    @cached_property
    def rotated(self) -> Tensor:
        """U^T C V (H, n, Pv) with the left singular vectors U of the score matrix C, largest first. U is orthogonal, so
        the rows from d on are the error of the best approximation of rank d."""
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
    """A sampler that repeats the first draw of `sampler`."""
    drawn: list[Tensor | Landmarks] = []

    def draw(candidates: Candidates, num_landmarks: int, generator: torch.Generator | None) -> Tensor | Landmarks:
        if not drawn:
            drawn.append(sampler(candidates, num_landmarks, generator))
        return drawn[0]

    return draw


def approximate(cell: Cell, heads: Heads, seed: int, landmarks: str | CustomSampler | None = None) -> Tensor:
    """The output of the cell's method for the heads (1, H, n, P), with the cell's sampler or the given landmarks."""
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
    if cell.method == TILTED:
        budget = max(SMALLEST_BUDGET, 2 * cell.features)
        return tilted_attention(heads.query, heads.key, heads.value, budget=budget, kernel=cell.target)
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


def _middle(features: Sequence[int]) -> int:
    """The paper's d = 128, or the largest one measured."""
    return 128 if 128 in features else max(features)


def _label(cell: Cell) -> str:
    if cell.method == SKYFORMER:
        return f"skyformer, {cell.sampler}"
    return {AS_PRINTED: "skyformer, as printed", SVD: BEST}.get(cell.method, cell.method)


def cost(cell: Cell) -> int:
    """Scores per query: inner products of the head dimension, for L = S."""
    if cell.method in ONE_PRODUCT:
        return cell.features
    # The Gaussian kernel is probed for the weights of queries and of keys, the softmax kernel for those of keys only.
    probed = 0 if cell.sampler != "probe" else 1 if cell.target == "softmax" else 2
    return 2 * cell.features + probed * ProbeSampler.num_probes


def _cost_text(cell: Cell) -> str:
    if cell.method == SVD:
        return NOTHING
    extra = cost(cell) - 2 * cell.features
    return "d" if cell.method in ONE_PRODUCT else f"2 d + {extra}" if extra else "2 d"


def _frame(results: Mapping[Cell, Result]) -> DataFrame:
    """One row per cell, with `label`, `quartiles` and `median` as text; pretrained and short passages first."""
    frame = to_frame(Cell, results, quartiles=Result.quartiles, median=_median_text)
    frame["label"] = [_label(cell) for cell in results]
    frame["cost"] = [cost(cell) for cell in results]
    frame["cost_text"] = [_cost_text(cell) for cell in results]
    frame["initialised"] = frame["weights"] != "pretrained"
    return frame.sort_values(["initialised", "length"], kind="stable")


def _median_text(result: Result) -> str:
    middle = result.quartiles()[1]
    return ("fails" if middle == math.inf else number(middle)) + ("*" if result.jittered else "")


def _by_setting(results: Mapping[Cell, Result], target: str) -> Iterator[tuple[str, int, DataFrame]]:
    """Weights, length and the rows of each setting of a target, at the default regularisation."""
    frame = _frame(results)
    default = frame["gamma"].isin([GAMMA]) | frame["gamma"].isna()
    chosen = frame[(frame["target"] == target) & default & frame["solver"].isin(["", "cholesky"])]
    for (weights, length), rows in chosen.groupby(["weights", "length"], sort=False):
        yield weights, length, rows


def _comparison(results: Mapping[Cell, Result]) -> Iterator[tuple[str, DataFrame]]:
    """The title and the rows of each panel of Figure 1."""
    for weights, length, rows in _by_setting(results, "softmax"):
        shown = (rows["method"] != SVD) & rows["sampler"].isin(["", *COMPARED_SAMPLERS])
        yield f"{weights} weights, n = {length:,}", rows[shown]


def _has_pretrained(results: Mapping[Cell, Result]) -> bool:
    return any(cell.weights == "pretrained" for cell in results)


def _ends(settings: Iterable[tuple[str, DataFrame]]) -> list[tuple[str, DataFrame]]:
    """The setting with the longest passages of each kind of weights."""
    longest: dict[str, tuple[str, DataFrame]] = {}
    for title, rows in settings:
        longest[rows["weights"].iloc[0]] = (title, rows)
    return list(longest.values())


def _drawn(rows: DataFrame) -> DataFrame:
    """Without Skyformer's other samplers, which the figure of landmarks shows."""
    return rows[rows["sampler"].isin(["", "probe"])]


LAYER_METHODS = (AS_PRINTED, SKYFORMER, "nystromformer", "performer", "informer", TILTED)
"""The methods of the paper's Figure 1, and tilted attention."""


def _by_layer(results: Mapping[Cell, Result]) -> list[tuple[Cell, Result]]:
    """Figure 1's methods on the longest passages with pretrained weights, or initialised ones if there are none."""
    weights = "pretrained" if _has_pretrained(results) else "initialised"
    found = [
        (cell, result)
        for cell, result in results.items()
        if (cell.target, cell.weights) == ("softmax", weights)
        and cell.method in LAYER_METHODS
        and cell.sampler in ("", "probe")
        and cell.gamma in (None, GAMMA)
        and cell.solver in ("", "cholesky")
    ]
    longest = max((cell.length for cell, _ in found), default=0)
    return [(cell, result) for cell, result in found if cell.length == longest and result.layers > 1]


def _layer_medians(results: Mapping[Cell, Result], layer: int) -> dict[str, dict[int, float]]:
    """The median error of a layer by method and d."""
    medians: dict[str, dict[int, float]] = {}
    for cell, result in _by_layer(results):
        passages = cell.seeds.count(",") + 1
        medians.setdefault(_label(cell), {})[cell.features] = result.median_of_layer(layer, passages)
    return medians


def _num_layers(results: Mapping[Cell, Result]) -> int:
    return max((result.layers for _, result in _by_layer(results)), default=0)


def _layer_tables(results: Mapping[Cell, Result]) -> list[Table]:
    """How the median error of each layer falls from the smallest to the largest d."""
    layers = [_layer_medians(results, layer) for layer in range(_num_layers(results))]
    if not layers:
        return []
    cell = _by_layer(results)[0][0]
    rows = [[label] for label in layers[0]]
    for row in rows:
        for medians in layers:
            by_d = medians[row[0]]
            row.append(f"{number(by_d[min(by_d)])} to {number(by_d[max(by_d)])}")
    d = sorted(layers[0][rows[0][0]])
    title = f"By layer, {cell.weights} weights, n = {cell.length:,}: median error at d = {d[0]} and at d = {d[-1]}"
    return [Table(title, ["method", *(f"layer {layer}" for layer in range(len(layers)))], rows)]


def _layer_panels(results: Mapping[Cell, Result]) -> list[Panel]:
    panels = []
    for layer in range(_num_layers(results)):
        lines = [
            Series(label, sorted(by_d), [_visible(by_d[d]) for d in sorted(by_d)])
            for label, by_d in _layer_medians(results, layer).items()
        ]
        panels.append(Panel(f"layer {layer}", "features d", "relative error, median", lines, x_log=True, y_log=True))
    return panels


def _samplers(results: Mapping[Cell, Result], target: str) -> Iterator[tuple[str, DataFrame]]:
    """The title and the rows of each setting in which all samplers are compared with the best of rank d."""
    for weights, length, rows in _by_setting(results, target):
        if (rows["method"] == SVD).any():
            yield f"{weights} weights, n = {length:,}", rows[rows["method"].isin([SKYFORMER, SVD, TILTED])]


def _regularised(results: Mapping[Cell, Result]) -> Iterator[tuple[str, DataFrame]]:
    """The title and the rows of each target and kind of weights, where gamma was varied."""
    frame = _frame(results)
    varied = frame[~frame["gamma"].isin([GAMMA]) & frame["gamma"].notna()]
    places = frame.set_index(["length", "features"]).index.isin(varied.set_index(["length", "features"]).index)
    chosen = frame[places & frame["gamma"].notna()]
    for target in TARGETS:
        for weights in dict.fromkeys(cell.weights for cell in results):
            rows = chosen[(chosen["target"] == target) & (chosen["weights"] == weights)]
            several = rows.groupby(["sampler", "solver"])["gamma"].transform("size") > 1
            if several.any():
                yield f"{target} kernel, {weights} weights", rows[several]


def _error_table(title: str, rows: DataFrame, note: str = "") -> Table:
    """Median and quartiles: one row per method, one column per number of features."""
    texts = rows.assign(text=rows["quartiles"].map(median_and_quartiles))
    shown = texts.pivot(index=["label", "cost_text"], columns="features", values="text")
    shown = shown.reindex(list(dict.fromkeys(zip(rows["label"], rows["cost_text"], strict=True))))
    return from_frame(title, shown.rename(columns="d = {}".format).rename_axis(["method", "scores per query"]), note)


def _gamma_table(title: str, rows: DataFrame) -> Table:
    shown = rows.pivot(index=["sampler", "solver"], columns="gamma", values="median")
    order = list(dict.fromkeys(zip(rows["sampler"], rows["solver"], strict=True)))
    shown = shown.reindex(order).rename(columns="{:g}".format).rename_axis(["landmarks", "solver"])
    note = "A star marks settings where the factorisation needed a raised diagonal on some passage."
    return from_frame(f"Regularisation, {title}: median error by gamma", shown, note)


def _claim_table(results: Mapping[Cell, Result]) -> Table:
    """probe against uniform: a third of the error at the same d, and better with a quarter of the landmarks."""
    rows = []
    for target in TARGETS:
        for weights, length, here in _by_setting(results, target):
            errors = {(r.label, r.features): r.quartiles[1] for r in here.itertuples()}
            wanted = [("skyformer, uniform", 128), ("skyformer, probe", 128), ("skyformer, probe", 32)]
            if all(each in errors for each in wanted):
                found = [errors[each] for each in wanted]
                rows.append([target, weights, f"{length:,}", *map(number, found), *_verdicts(*found)])
    medians = ["uniform, d = 128", "probe, d = 128", "probe, d = 32"]
    header = ["kernel", "weights", "n", *medians, "ratio at 128", "at most a third", "32 beats 128"]
    return Table("The claim: probe landmarks and uniform landmarks, median errors", header, rows)


def _verdicts(uniform: float, probe: float, few: float) -> list[str]:
    ratio = probe / uniform if uniform > 0 else 1.0
    return [number(ratio), yes_or_no(ratio <= 1 / 3), yes_or_no(few < uniform)]


def _error_panel(title: str, rows: DataFrame, x_label: str, x: str = "features") -> Panel:
    lines = []
    for label, points in rows.groupby("label", sort=False):
        ordered = points.sort_values(x)
        medians = [_visible(middle) for _, middle, _ in ordered["quartiles"]]
        lines.append(Series(label, ordered[x].tolist(), medians, mark=Mark.DASHED if label == BEST else Mark.LINE))
    return Panel(title, x_label, "relative error, median over heads", lines, x_log=True, y_log=True)


def _visible(error: float) -> float | None:
    """None for errors that a logarithmic axis cannot show: exact, or failed."""
    return error if 1e-12 < error < 1e4 else None


def _short_labels(rows: DataFrame) -> DataFrame:
    """The rows with samplers alone as labels of Skyformer."""
    return rows.assign(label=rows["label"].str.removeprefix("skyformer, "))


def _gamma_panel(title: str, rows: DataFrame) -> Panel:
    """Both solvers under one name, because their lines are close to each other."""
    lines = []
    for (sampler, solver), points in rows.groupby(["sampler", "solver"], sort=False):
        ordered = points.sort_values("gamma")
        medians = [_visible(middle) for _, middle, _ in ordered["quartiles"]]
        mark = Mark.LINE if solver == "cholesky" else Mark.DASHED
        lines.append(Series(sampler, ordered["gamma"].tolist(), medians, mark=mark))
    return Panel(title, "gamma", "relative error, median over heads", lines, x_log=True, y_log=True)
