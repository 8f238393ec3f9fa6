"""Singular values of attention in a trained softmax transformer (appendix, Figure 3).

On each task a trained model, in the paper with softmax attention, reads a batch of test examples. From the queries,
keys and values of its second layer, separately for each example and without padding:

- outputs, with the heads concatenated (n, H P): softmax attention as the model computes it, and Kernelized Attention
  and Skyformer on the same Q, K, V.
- score matrices of each head (n, n): the unnormalised A = exp(Q K^T / sqrt(P)), its row-normalised form D^-1 A, and
  the Gaussian C. Their condition numbers are the paper's explanation of why softmax trains less stably.

Singular values are averaged over examples and heads, as they are and divided by the largest. The models are runs of the
accuracy study, or of any preset; a missing run is trained, and an interrupted one is resumed, unless `--no-train`
leaves them out. A record may have models of several presets and attentions: each command adds its own to the others'.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skyformer.errors import DataError, InputError
from skyformer.functional import kernelized_attention, skyformer_attention, softmax_attention
from skyformer.lra.tasks import TASKS
from skyformer.ops.kernels import GaussianKernel
from skyformer.report.figures import COVERED, Figure, Mark, Panel, Series
from skyformer.report.paper import SPECTRA, SPECTRUM_INDEX, TASK_TITLES
from skyformer.report.tables import Table, number, yes_or_no
from skyformer.studies.base import Fact, Study, check_names, option
from skyformer.studies.record import significant
from skyformer.studies.registry import register_study

if TYPE_CHECKING:
    from skyformer.lra.batching import Batch
    from skyformer.lra.dataset import Task
    from skyformer.training.config import RunConfig
    from skyformer.training.runs import Run

LAYER = 2
GAMMA = 0.1
"""The regularisation in the authors' code."""

OUTPUTS = ("softmax", "kernelized", "skyformer")
SCORES = ("A", "D^-1 A", "C")
MATRICES = (*OUTPUTS, *SCORES)
INDEX = (*range(1, 17), *range(20, 65, 4), 80, 96, 128, 192, 256, 384, 512, 768, 1024)
"""The positions of the singular values that are recorded."""

ENERGY = 0.99
VISIBLE = 0.01
SMALL_TRAINING = (
    "task.max_length=128",
    "task.limit=1000",
    "optim.warmup_steps=5",
    "loop.steps=50",
    "loop.eval_every=50",
)


@dataclass(frozen=True)
class Options:
    tasks: tuple[str, ...] = option(tuple(TASK_TITLES), small=("listops",), help="Tasks of Long Range Arena.")
    preset: str = option("study", small="short", help="Preset of `skyformer train` for the softmax models.")
    changes: tuple[str, ...] = option(
        (), small=SMALL_TRAINING, help="Changes to the preset, as in `skyformer train --set`."
    )
    attentions: tuple[str, ...] = option(
        ("softmax",), help="Attentions of the trained models: softmax as in the paper, kernelized, skyformer."
    )
    train: bool = option(True, help="Train models that are missing, or leave them out.")
    seed: int = option(0, help="Seed of the trained models, and for test examples and landmarks.")
    runs_dir: str = option(
        "studies/accuracy/runs", small="studies/small/spectrum/runs", help="Folder of the trained models."
    )
    data_dir: str | None = option(
        None, help="Folder of the prepared data; short ListOps is generated if it is missing."
    )
    examples: int = option(8, small=4, least=1, help="Test examples per task.")
    length: int = option(1024, least=2, help="Number of tokens of each example that are used, at most.")
    landmarks: int = option(128, least=1, help="Landmarks of Skyformer.")


@dataclass(frozen=True)
class Cell:
    """run: the name of the trained model, which ends in a digest of its settings. attention: its attention. length: how
    many tokens of each example are used, at most."""

    task: str
    run: str
    preset: str
    attention: str
    length: int


@dataclass(frozen=True)
class Result:
    """One value for each of MATRICES, in that order; None for a zero matrix.

    lengths: tokens of the examples. trained_length: the longest that the model was trained on. curves: mean singular
    values at INDEX, divided by the largest, up to the smallest matrix. values: the same, not divided. energy_rank: how
    many hold 99 % of the squared sum. visible: how many are at least 1 % of the largest. effective_rank: the
    exponential of the entropy of the values' shares. condition: the median of the largest value over the smallest,
    where the smallest is at least the rounding error. singular: the share of matrices whose smallest value is within
    the rounding error. row_spread: for scores, the median of the largest over the smallest row sum.
    """

    steps: int
    test_accuracy: float
    lengths: tuple[int, ...]
    trained_length: int
    curves: tuple[tuple[float | None, ...], ...]
    values: tuple[tuple[float | None, ...], ...]
    energy_rank: tuple[float | None, ...]
    visible: tuple[float | None, ...]
    effective_rank: tuple[float | None, ...]
    condition: tuple[float | None, ...]
    singular: tuple[float, ...]
    row_spread: tuple[float | None, ...]


def statistics_of(matrices: Sequence[Tensor]) -> dict[str, Any]:
    """The fields of a `Result` for matrices of one kind. Zero matrices have no spectrum and count as singular."""
    values = [torch.linalg.svdvals(matrix.double()) for matrix in matrices]
    kept = [each for each in values if each[0] > 0]
    shares = [each / each[0] for each in kept]
    shortest = min((len(each) for each in shares), default=0)
    # Smaller values are rounding errors of the largest one.
    floors = [max(m.shape) * torch.finfo(torch.float64).eps for m, v in zip(matrices, values, strict=True) if v[0]]
    lost = sum(float(each[-1]) <= floor for each, floor in zip(shares, floors, strict=True))
    conditions = [1 / max(float(each[-1]), floor) for each, floor in zip(shares, floors, strict=True)]
    return {
        "curves": tuple(_mean([float(each[i - 1]) for each in shares]) if i <= shortest else None for i in INDEX),
        "values": tuple(_mean([float(each[i - 1]) for each in kept]) if i <= shortest else None for i in INDEX),
        "energy_rank": _mean([energy_rank(each) for each in kept]),
        "visible": _mean([int((each >= VISIBLE).sum()) for each in shares]),
        "effective_rank": _mean([effective_rank(each) for each in kept]),
        "condition": significant(statistics.median(conditions)) if conditions else None,
        "singular": (lost + len(values) - len(kept)) / len(values),
    }


def energy_rank(values: Tensor) -> int:
    """How many of the singular values hold 99 % of the sum of their squares."""
    energy = values.square().cumsum(0)
    return int((energy < ENERGY * energy[-1]).sum()) + 1


def effective_rank(values: Tensor) -> float:
    """exp of the entropy of the values as shares of their sum: r equal values, and zeros, give r."""
    shares = values / values.sum()
    return float(torch.special.entr(shares).sum().exp())


def _mean(values: Sequence[float]) -> float | None:
    return significant(statistics.mean(values)) if values else None


@dataclass(frozen=True)
class Example:
    """Queries, keys and values (H, n, P) of one example in one layer, without padding."""

    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    def outputs(self, landmarks: int, seed: int) -> list[Tensor]:
        """The output of each of OUTPUTS, with heads concatenated: (n, H P) each."""
        q, k, v = (x.double().unsqueeze(0) for x in (self.query, self.key, self.value))
        generator = torch.Generator().manual_seed(seed)
        found = (
            softmax_attention(q, k, v),
            kernelized_attention(q, k, v),
            skyformer_attention(q, k, v, num_landmarks=landmarks, gamma=GAMMA, generator=generator),
        )
        return [each[0].transpose(0, 1).flatten(1) for each in found]

    def scores(self) -> list[list[Tensor]]:
        """Each of SCORES for every head: (n, n) each."""
        query, key = self.query.double(), self.key.double()
        inner = self.scale * query @ key.mT
        # A common factor changes none of the statistics but `values`, which are only shown of outputs; without it no
        # exponential overflows.
        A = (inner - inner.amax((-2, -1), keepdim=True)).exp()
        C = GaussianKernel().matrix(query, key, self.scale)
        return [list(A), list(torch.softmax(inner, -1)), list(C)]


@torch.no_grad()
def read_layer(model: Any, batch: Batch, layer: int) -> list[Example]:
    """The inputs of a layer's attention for each example, or the first sequence of a pair. Layers count from 1."""
    seen: list[tuple[Tensor, ...]] = []
    attention = model.encoder.layers[layer - 1].attention.attention
    hook = attention.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    try:
        model.eval().encoder(batch.tokens, batch.mask)
    finally:
        hook.remove()
    (inputs,) = seen
    return [Example(*(x[number][:, real] for x in inputs)) for number, real in enumerate(batch.mask)]


def row_spread(scores: Sequence[Tensor]) -> float | None:
    """The median over matrices of the largest over the smallest row sum."""
    sums = [matrix.sum(-1) for matrix in scores]
    return significant(statistics.median(float(each.max() / each.min()) for each in sums))


def summarise(examples: Sequence[Example], landmarks: int, seed: int) -> dict[str, tuple[Any, ...]]:
    """The fields of a `Result` that are computed from the matrices."""
    by_output = list(zip(*(example.outputs(landmarks, seed) for example in examples), strict=True))
    by_score = [
        [head for heads in of_kind for head in heads]
        for of_kind in zip(*(example.scores() for example in examples), strict=True)
    ]
    spectra = [statistics_of(matrices) for matrices in (*by_output, *by_score)]
    found = {name: tuple(each[name] for each in spectra) for name in spectra[0]}
    return {**found, "row_spread": (*(None for _ in by_output), *map(row_spread, by_score))}


@register_study
class Spectrum(Study[Options, Cell, Result]):
    name = "spectrum"
    title = "Singular values of attention in trained models (appendix, Figure 3)"
    keeps_other_cells = True

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        check_names("task", options.tasks, TASKS)
        check_names("attention of this study", options.attentions, OUTPUTS)

    def facts(self) -> Mapping[str, Fact]:
        """Loads all data, so that missing data is reported before anything is trained."""
        from skyformer.studies.tasks import data_fact

        chosen = self.options
        data = {f"{task} data, preset {chosen.preset}": data_fact(self._data[task]) for task in chosen.tasks}
        return {"examples": chosen.examples, "landmarks": chosen.landmarks, **data}

    def cells(self) -> Sequence[Cell]:
        chosen, found = self.options, []
        for task in chosen.tasks:
            for attention in chosen.attentions:
                run = self._finished_run(task, attention)
                name = self._config(task, attention).run_name() if run is None else run.name
                if run is not None or chosen.train:
                    found.append(Cell(task, name, chosen.preset, attention, chosen.length))
        if not found:
            raise DataError(
                f"--runs-dir must have finished runs of the preset {chosen.preset!r} with these changes, this seed "
                f"and data; {chosen.runs_dir} has none. Finish them with `skyformer train --resume`, or leave out "
                "--no-train"
            )
        return found

    def measure(self, cell: Cell) -> Result:
        from skyformer.training.prediction import load_best_model

        run = self._trained(cell.task, cell.attention)
        assert run.result is not None
        batch = draw_test_batch(self._data[cell.task], self.options.examples, cell.length, self.options.seed)
        examples = read_layer(load_best_model(run), batch, LAYER)
        return Result(
            steps=run.result.steps,
            test_accuracy=run.result.test_accuracy,
            lengths=tuple(example.query.shape[1] for example in examples),
            trained_length=run.config.task.longest,
            **summarise(examples, self.options.landmarks, self.options.seed),
        )

    def _trained(self, task: str, attention: str) -> Run:
        from skyformer.training import open_run, train_or_resume

        found = self._finished_run(task, attention)
        if found is not None:
            return found
        runs_dir, config = self._runs_dir(task), self._config(task, attention)
        result = train_or_resume(config, runs_dir=runs_dir, data_dir=self.options.data_dir, progress=False)
        return open_run(runs_dir / result.run)

    def _finished_run(self, task: str, attention: str) -> Run | None:
        """The finished run with these settings and this data, of the accuracy study or of `skyformer train`."""
        from skyformer.training import list_runs
        from skyformer.training.runs import DataRecord

        name = self._config(task, attention).run_name()
        runs = [
            run for folder in (self._runs_dir(task), Path(self.options.runs_dir)) for run in list_runs(folder, task)
        ]
        data = DataRecord.of(self._data[task].manifest).digest()
        same = (run for run in runs if run.name == name and run.finished)
        return next((run for run in same if run.data is None or run.data.digest() == data), None)

    def _runs_dir(self, task: str) -> Path:
        """The folder where the accuracy study keeps its runs on this data."""
        from skyformer.studies.tasks import runs_of_data

        return runs_of_data(self.options.runs_dir, self._data[task])

    def _config(self, task: str, attention: str) -> RunConfig:
        from skyformer.training import load_preset

        chosen = self.options
        config = load_preset(task, chosen.preset, attention=attention, overrides=chosen.changes, seed=chosen.seed)
        if config.model.num_layers < LAYER:
            raise InputError(
                f"model.num_layers must be at least {LAYER}, because layer {LAYER} is examined; got "
                f"{config.model.num_layers}"
            )
        return config

    @cached_property
    def _data(self) -> dict[str, Task]:
        from skyformer.studies.tasks import study_data

        return {task: study_data(self._config(task, "softmax"), self.options.data_dir) for task in self.options.tasks}

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        tables = (_value_table, _output_table, _score_table, _run_table)
        return [*_claims(_furthest(results)), *(table(results) for table in tables)]

    @classmethod
    def figures(cls, results: Mapping[Cell, Result]) -> Sequence[Figure]:
        shown = _furthest(results)
        return [_paper_figure(shown), *_matrix_figures(shown)] if shown else []


def draw_test_batch(task: Task, count: int, length: int, seed: int) -> Batch:
    """Random test examples, cut to `length` tokens."""
    from skyformer.lra.batching import collate

    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(task.test), generator=generator)[:count].tolist()
    examples = [task.test[row] for row in rows]
    return collate([each._replace(tokens=each.tokens[:length], second=None) for each in examples])


def _ordered(results: Mapping[Cell, Result]) -> dict[Cell, Result]:
    """By preset as they were measured, then by task in the order of the paper's tables, then by attention."""
    presets, tasks = list(dict.fromkeys(cell.preset for cell in results)), list(TASK_TITLES)
    places = sorted(
        results,
        key=lambda cell: (presets.index(cell.preset), tasks.index(cell.task), OUTPUTS.index(cell.attention), cell.run),
    )
    return {cell: results[cell] for cell in places}


def _by_preset(results: Mapping[Cell, Result]) -> dict[str, dict[Cell, Result]]:
    found: dict[str, dict[Cell, Result]] = {}
    for cell, result in _ordered(results).items():
        found.setdefault(cell.preset, {})[cell] = result
    return found


def _title(cell: Cell) -> str:
    """The task, and the attention that the model was trained with if it is not softmax."""
    return TASK_TITLES[cell.task] + ("" if cell.attention == "softmax" else f", {cell.attention}")


def _furthest(results: Mapping[Cell, Result]) -> dict[Cell, Result]:
    """One model for each task, preset and attention, that with the longest examples and the most steps: figures and
    conclusions cannot tell several apart. The tables have all."""
    chosen: dict[tuple[str, str, str], Cell] = {}
    for cell in sorted(results, key=lambda cell: (cell.length, results[cell].steps)):
        chosen[cell.task, cell.preset, cell.attention] = cell
    return {cell: result for cell, result in results.items() if cell in chosen.values()}


def _statistics(result: Result, name: str) -> list[str]:
    """The ranks of a matrix, and for scores also the condition number and the spread of the row sums."""
    place = MATRICES.index(name)
    ranks = [number(values[place]) for values in (result.energy_rank, result.visible, result.effective_rank)]
    sign = "> " if result.singular[place] > 0.5 else ""
    more = [sign + number(result.condition[place]), number(result.row_spread[place])]
    return ranks + (more if name in SCORES else [])


def _matrix_table(
    results: Mapping[Cell, Result], title: str, names: Sequence[str], header: list[str], note: str
) -> Table:
    rows = [
        [_title(cell), cell.preset, *(text for name in names for text in _statistics(result, name))]
        for cell, result in _ordered(results).items()
    ]
    groups = [("", 2), *((name, len(header)) for name in names)]
    return Table(f"{title} of layer {LAYER}", ["model", "preset", *header * len(names)], rows, note, groups)


def _output_table(results: Mapping[Cell, Result]) -> Table:
    note = (
        "Means over the batch. 99 %: how many singular values hold 99 % of the squared sum; 1 %: how many are at least "
        "1 % of the largest; rank: the exponential of the entropy of their shares. None exceeds the width of all heads."
    )
    return _matrix_table(results, "Attention output", OUTPUTS, ["99 %", "1 %", "rank"], note)


def _score_table(results: Mapping[Cell, Result]) -> Table:
    note = (
        "99 %, 1 % and rank as above. Condition: the median of the largest over the smallest singular value; a > means "
        "that most matrices are singular in double precision. Rows: the median of the largest over the smallest row "
        "sum."
    )
    header = ["99 %", "1 %", "rank", "condition", "rows"]
    return _matrix_table(results, "Score matrices", SCORES, header, note)


def _value_table(results: Mapping[Cell, Result]) -> Table:
    """Figure 3 in numbers: absolute singular values of the output of the attention that the model was trained with."""
    shown = (1, 2, 3, 4, 8, 16, 32, 64)
    rows = []
    for cell, result in _ordered(results).items():
        values = dict(zip(INDEX, result.values[MATRICES.index(cell.attention)], strict=True))
        rows.append([_title(cell), cell.preset, *(number(values[index]) for index in shown)])
    title = f"Singular values of the attention output of layer {LAYER}, by index"
    return Table(title, ["model", "preset", *map(str, shown)], rows, "Means over the batch, not divided by anything.")


def _run_table(results: Mapping[Cell, Result]) -> Table:
    rows = [
        [
            _title(cell),
            cell.preset,
            cell.run,
            f"{r.steps:,}",
            f"{r.trained_length:,}",
            f"{100 * r.test_accuracy:.1f}",
            f"{min(r.lengths):,} to {max(r.lengths):,}",
        ]
        for cell, r in _ordered(results).items()
    ]
    header = ["model", "preset", "run", "steps", "longest in training", "test accuracy (%)", "tokens examined"]
    return Table("The trained models", header, rows)


def _claims(results: Mapping[Cell, Result]) -> list[Table]:
    """The paper's conclusions, as far as the tasks were measured with softmax models of one preset."""
    rows = []
    for preset, models in _by_preset(results).items():
        by_task = {cell.task: result for cell, result in models.items() if cell.attention == "softmax"}
        claims = [
            _slower(by_task, slow, fast)
            for slow in ("retrieval", "pathfinder")
            for fast in ("text", "listops")
            if slow in by_task and fast in by_task
        ]
        for softmax in ("A", "D^-1 A"):
            claims += [_better_condition(TASK_TITLES[task], result, softmax) for task, result in by_task.items()]
        rows += [[claim, preset, *rest] for claim, *rest in claims]
    note = "Outputs: effective rank of softmax attention. Scores: condition numbers, with a > as below."
    return (
        [Table("The paper's conclusions", ["claim", "preset", "first", "second", "holds"], rows, note)] if rows else []
    )


def _slower(by_task: Mapping[str, Result], slow: str, fast: str) -> list[str]:
    left, right = (by_task[task].effective_rank[0] or 0.0 for task in (slow, fast))
    claim = f"singular values of the output decay slower on {TASK_TITLES[slow]} than on {TASK_TITLES[fast]}"
    return [claim, number(left), number(right), yes_or_no(left > right)]


def _better_condition(title: str, result: Result, softmax: str) -> list[str]:
    """No verdict if both matrices are singular in double precision."""
    places = [MATRICES.index(name) for name in ("C", softmax)]
    texts = [_statistics(result, name)[-2] for name in ("C", softmax)]
    ours, its = (result.condition[place] for place in places)
    open_ = ours is None or its is None or all(result.singular[place] > 0.5 for place in places)
    verdict = "both singular" if open_ else yes_or_no((ours or 0.0) < (its or 0.0))
    return [f"C is better conditioned than {softmax} on {title}", *texts, verdict]


def _line(label: str, curve: Sequence[float | None]) -> Series:
    points = [(i, value) for i, value in zip(INDEX, curve, strict=True) if value is not None and value > 1e-17]
    return Series(label, [i for i, _ in points], [value for _, value in points])


def _paper_figure(results: Mapping[Cell, Result]) -> Figure:
    """Figure 3: absolute singular values of the output of the attention that a model was trained with, one panel for
    each of the paper's tasks, and dashed the paper's own values."""
    panels = []
    for task, papers in SPECTRA.items():
        lines = [
            _line(f"{cell.attention}, preset {cell.preset}", result.values[MATRICES.index(cell.attention)])
            for cell, result in _ordered(results).items()
            if cell.task == task
        ]
        if lines:
            lines.append(Series("softmax, the paper", SPECTRUM_INDEX, papers, mark=Mark.DASHED))
            panels.append(Panel(TASK_TITLES[task], "index", "singular value", lines, y_log=True))
    title = f"Singular values of the attention output of layer {LAYER}, and the paper's Figure 3"
    note = (
        "The paper's: read off its plot. Our models have less training, and those of the preset study, except on "
        "Pathfinder, also shorter inputs."
    )
    return Figure("figure", title, panels, columns=2, note=note)


MATRIX_NOTE = (
    f"Outputs and scores of layer {LAYER}: A before and D^-1 A after the normalisation of softmax attention, C of "
    f"Kernelized Attention. {COVERED}"
)


def _matrix_figures(results: Mapping[Cell, Result]) -> list[Figure]:
    """For each preset: outputs in the first row and score matrices in the second, one column per model."""
    found = []
    for preset, models in _by_preset(results).items():
        panels = []
        for names, what in ((OUTPUTS, "output"), (SCORES, "scores")):
            for cell, result in models.items():
                lines = [_line(name, result.curves[MATRICES.index(name)]) for name in names]
                title = f"{_title(cell)}, {what}"
                panels.append(Panel(title, "index", "singular value / largest", lines, x_log=True, y_log=True))
        title = f"Singular values on the same Q, K, V, preset {preset}"
        columns = max(2, len(models))
        found.append(Figure(f"matrices_{preset}", title, panels, columns, MATRIX_NOTE, direct=False, same_y=True))
    return found
