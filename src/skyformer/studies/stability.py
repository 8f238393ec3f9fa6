"""How much a training step changes the output of the model (appendix, Table 3), and which learning rates work.

The paper's instability score of step i on its batch x_i, with f the embedding after two layers:

    tau_i = |f(x_i, W_i) - f(x_i, W_{i-1})|_F^2 / |W_i - W_{i-1}|_F^2

The paper's table holds the average over 20 steps of tau_i divided by that of softmax attention. The paper does not say
whether dropout is active while f is evaluated, so f is evaluated in three variants during the same training:

- "off": no dropout.
- "same": dropout, with the same masks before and after the step.
- "fresh": dropout, with new masks after the step. The difference then contains the noise of two masks as well as the
  effect of the step. That noise alone, two masks without a step, is recorded too.

f is taken after the norm that follows the second layer, which is the output of the encoder (the results called
"normed"), and also before that norm. Landmarks and other random choices of an attention are the same in all evaluations
of f.

In addition to the paper: the loss at the end of short trainings with learning rates from very small to far too large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from skyformer.attention.base import Attention
from skyformer.errors import InputError
from skyformer.report.figures import COVERED, Figure, Mark, Panel, Series, side_by_side
from skyformer.report.paper import INSTABILITY, TASK_TITLES, tasks_among
from skyformer.report.tables import NOTHING, Table, from_frame, number
from skyformer.report.ticks import tick_texts
from skyformer.studies.base import Fact, Study, check_names, option
from skyformer.studies.frames import missing_as_none, task_table, to_frame, with_paper
from skyformer.studies.record import significant
from skyformer.studies.registry import register_study

if TYPE_CHECKING:
    from pandas import DataFrame
    from pandas import Series as Column

    from skyformer.lra.batching import Batch
    from skyformer.lra.dataset import Task
    from skyformer.training.config import RunConfig

SCORE, RATES = "score", "rates"
BASELINE = "softmax"
BY_SEED = ["attention", "task", "seed"]
VARIANTS = {"off": "dropout off", "same": "same dropout masks", "fresh": "fresh dropout masks"}
TITLES = {
    "nystromformer": "Nystromformer",
    "kernelized": "Kernelized Attention",
    "skyformer": "Skyformer",
    "softmax": "Self-Attention",
}
LAST = 20
"""The final loss of a short training is the mean over this many last steps."""
SMALLEST_UPDATE = 1e-9
"""Steps count if |W_i - W_{i-1}|^2 is at least this share of the largest of its training. A schedule may end with a
learning rate so small that float32 rounds the update away; tau_i would then be rounding error or noise, divided by
almost nothing, and decide the mean over steps alone."""
LOST = (
    f"Steps whose update float32 rounds away (a squared length below {SMALLEST_UPDATE:g} of the largest) are left out."
)


@dataclass(frozen=True)
class Options:
    data_dir: str | None = option(None, help="Folder of the prepared data.")
    tasks: tuple[str, ...] = option(
        ("listops", "text", "pathfinder", "image", "retrieval"), small=("listops",), help="Tasks of Long Range Arena."
    )
    attentions: tuple[str, ...] = option(
        ("softmax", "nystromformer", "kernelized", "skyformer"),
        help="Attentions; softmax must be among them, because every score is divided by its score.",
    )
    seeds: tuple[int, ...] = option((0, 1, 2), small=(0,), help="Seeds for weights, batches and landmarks.")
    preset: str = option("paper_v1", small="short", help="Preset of `skyformer train` for the scores.")
    dropout: float | None = option(
        None, small=0.1, least=0, below=1, help="Dropout of the models for the scores; none: the preset's."
    )
    steps: int = option(20, small=4, least=1, help="Training steps to compute the score for.")
    examples: int = option(4, least=1, help="Examples of each batch on which f is evaluated.")
    rates: tuple[float, ...] = option(
        (1e-4, 1e-3, 1e-2, 3e-2, 1e-1),
        small=(1e-3, 1e-1),
        above=0,
        help="Learning rates of the short trainings on ListOps.",
    )
    rate_steps: int = option(200, small=20, least=2, help="Steps of a short training.")
    pathfinder_limit: int = option(3000, least=1, help="Pathfinder images per split, as prepared with --limit.")
    listops_limit: int | None = option(
        None, small=500, least=1, help="ListOps examples per split; they are generated if they are missing."
    )


@dataclass(frozen=True)
class Cell:
    measure: str
    task: str
    attention: str
    seed: int
    rate: float | None


Numbers = tuple[float | None, ...]


@dataclass(frozen=True)
class Result:
    """One number per step; None if it is not finite. A short training has only `loss`.

    Except for `loss`, all are squared Frobenius norms: `update` of W_i - W_{i-1}, `size` of f, `noise` of the
    difference between two dropout masks without a step, and the others of the change of f in each variant.
    """

    loss: Numbers
    update: Numbers = ()
    size: Numbers = ()
    off: Numbers = ()
    same: Numbers = ()
    fresh: Numbers = ()
    noise: Numbers = ()
    normed_size: Numbers = ()
    normed_off: Numbers = ()
    normed_same: Numbers = ()
    normed_fresh: Numbers = ()
    normed_noise: Numbers = ()

    def final_loss(self) -> float | None:
        """The mean of the last losses; None if any loss is not finite."""
        losses = [loss for loss in self.loss if loss is not None]
        last = losses[-LAST:]
        return None if None in self.loss else sum(last) / len(last)

    def diverged(self) -> bool:
        """Whether the final loss is not finite, or above the first one."""
        final, first = self.final_loss(), self.loss[0]
        return final is None or first is None or final > first


@register_study
class Stability(Study[Options, Cell, Result]):
    name = "stability"
    title = "Instability of training steps (appendix, Table 3)"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        check_names("attention of this study", options.attentions, TITLES)
        if options.attentions and BASELINE not in options.attentions:
            raise InputError(
                f"--attentions must include {BASELINE!r}, because every score is divided by its score; "
                f"got {', '.join(options.attentions)}"
            )
        self._check_steps()
        self._loaded: dict[tuple[str, str], Task] = {}

    def _check_steps(self) -> None:
        from skyformer.training import load_preset

        steps, preset = self.options.steps, self.options.preset
        for task in self.options.tasks:
            most = load_preset(task, preset).loop.steps
            if steps > most:
                raise InputError(f"--steps must be at most {most}, those of preset {preset} on {task}; got {steps}")

    def facts(self) -> Mapping[str, Fact]:
        from skyformer.studies.tasks import data_fact

        names = ("preset", "dropout", "steps", "examples", "rate_steps")
        found: dict[str, Fact] = {name: getattr(self.options, name) for name in names}
        # ListOps comes last: missing data of other tasks is reported before ListOps is generated.
        for cell in sorted(self.cells(), key=lambda cell: cell.task == "listops"):
            found[f"{cell.task} data, {cell.measure}"] = data_fact(self._data(cell))
        return found

    def cells(self) -> Sequence[Cell]:
        chosen = self.options
        scores = [
            Cell(SCORE, task, attention, seed, None)
            for seed in chosen.seeds
            for task in chosen.tasks
            for attention in chosen.attentions
        ]
        rates = [
            Cell(RATES, "listops", attention, seed, rate)
            for seed in chosen.seeds
            for rate in chosen.rates
            for attention in chosen.attentions
        ]
        return [*rates, *scores]

    def measure(self, cell: Cell) -> Result:
        config, data = self._config(cell), self._data(cell)
        if cell.measure == RATES:
            return _short_training(config, data)
        from skyformer.studies.tasks import batches_of

        return score_steps(config, batches_of(data, config), self.options.steps, self.options.examples)

    def _config(self, cell: Cell) -> RunConfig:
        from skyformer.studies.tasks import run_config

        chosen = self.options
        limit = {"pathfinder": chosen.pathfinder_limit, "listops": chosen.listops_limit}.get(cell.task)
        if cell.measure == SCORE:
            changes: dict[str, object] = {} if chosen.dropout is None else {"model_dropout": chosen.dropout}
            return run_config(cell.task, chosen.preset, cell.attention, cell.seed, limit, **changes)
        changes = {
            "optim_lr": cell.rate,
            "optim_warmup_steps": max(1, chosen.rate_steps // 10),
            "loop_steps": chosen.rate_steps,
        }
        return run_config(cell.task, "short", cell.attention, cell.seed, limit, **changes)

    def _data(self, cell: Cell) -> Task:
        """Loaded once, because data depends on neither attention, seed nor learning rate."""
        from skyformer.studies.tasks import study_data

        key = (cell.measure, cell.task)
        if key not in self._loaded:
            self._loaded[key] = study_data(self._config(cell), self.options.data_dir)
        return self._loaded[key]

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        scores = Scores(_of_scores(results))
        found = [
            *(
                _ratio_table(
                    scores, normed(name), f"Instability score divided by that of softmax, {title}", papers=True
                )
                for name, title in VARIANTS.items()
            ),
            *(
                _ratio_table(scores, name, f"The same before the final norm, {title}")
                for name, title in VARIANTS.items()
            ),
            _seed_table(scores),
            _relative_table(scores),
            _component_table(scores),
            _rate_table(results),
        ]
        return [table for table in found if table.rows]

    @classmethod
    def figures(cls, results: Mapping[Cell, Result]) -> Sequence[Figure]:
        found = [_score_figure(Scores(_of_scores(results))), _rate_figure(results)]
        return [figure for figure in found if figure.panels]


def score_steps(
    config: RunConfig,
    batches: Iterable[Batch],
    steps: int,
    examples: int | None,
    redraw_landmarks: bool = False,
) -> Result:
    """Train for `steps` steps, and evaluate f before and after each, on some examples of its batch or on all."""
    from skyformer.training.building import Trainee

    trainee = Trainee(config)
    rows, losses = [], []
    for step, batch in enumerate(islice(batches, steps)):
        evaluator = _Evaluator(trainee.model, batch, examples, step, redraw_landmarks)
        old_weights = _flat(trainee.model)
        before = evaluator.evaluate()
        losses.append(significant(trainee.step(batch)))
        after = evaluator.evaluate(after=True)
        rows.append([_squared(_flat(trainee.model) - old_weights), *_changes(before, after)])
    columns = [tuple(significant(value, 6) for value in column) for column in zip(*rows, strict=True)]
    return Result(tuple(losses), *columns)  # type: ignore[arg-type]


class _Evaluator:
    """Evaluates f on some examples of one batch with given dropout masks, and with the same landmarks every time or
    with new ones."""

    def __init__(
        self, model: nn.Module, batch: Batch, examples: int | None, seed: int, redraw_landmarks: bool = False
    ) -> None:
        self._model, self._seed, self._redraw = model, seed, redraw_landmarks
        self._tokens, self._mask = batch.tokens[:examples], batch.mask[:examples]

    @torch.no_grad()
    def evaluate(self, after: bool = False) -> list[tuple[Tensor, Tensor]]:
        """f without dropout and with two sets of dropout masks, after the step with the second set only; each (tokens,
        dim), before and after the final norm."""
        self._model.eval()
        first, second = 4 * self._seed, 4 * self._seed + 1
        plain = self._embedding(4 * self._seed + 2 + after, dropout=False)
        return [plain, *(self._embedding(seed) for seed in ((second,) if after else (first, second)))]

    def _embedding(self, seed: int, dropout: bool = True) -> tuple[Tensor, Tensor]:
        """An attention in evaluation mode makes fixed random choices, so only what drops is in training mode."""
        for module in self._model.modules():
            if isinstance(module, nn.Dropout):
                module.train(dropout)
            elif isinstance(module, Attention):
                has_dropout = getattr(module, "dropout", 0.0) > 0
                module.train(dropout if has_dropout else self._redraw)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return embedding(self._model.encoder, self._tokens, self._mask)  # type: ignore[arg-type]


def embedding(encoder: Any, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The output of the last layer at the real tokens (N, dim), before and after the final norm."""
    found: list[Tensor] = []
    with encoder.norm.register_forward_pre_hook(lambda _, inputs: found.extend(inputs)):
        found.append(encoder(tokens, mask))
    before, after = (x[mask].double() for x in found)
    return before, after


def _changes(before: Sequence[tuple[Tensor, Tensor]], after: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """In the order of Result's fields: size, off, same, fresh, noise; then the same after the norm."""
    found: list[float] = []
    for place in (0, 1):
        off, first, second = (each[place] for each in before)
        new_off, new_second = after[0][place], after[-1][place]
        found += map(_squared, (off, new_off - off, new_second - second, new_second - first, second - first))
    return found


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def _squared(x: Tensor) -> float:
    return float(x.square().sum())


def _short_training(config: RunConfig, data: Task) -> Result:
    """Losses until the last step, or until one is not finite."""
    from skyformer.studies.tasks import batches_of
    from skyformer.training.building import Trainee

    trainee, losses = Trainee(config), []
    for batch in islice(batches_of(data, config), config.loop.steps):
        loss = trainee.step(batch)
        losses.append(significant(loss))
        if not math.isfinite(loss):
            break
    return Result(tuple(losses))


def _of_scores(results: Mapping[Cell, Result]) -> dict[Cell, Result]:
    return {cell: result for cell, result in results.items() if cell.measure == SCORE}


class Scores:
    """The scores as data frames with one row per attention, task, seed and step.

    steps: the fields of the results, without the steps whose update is lost in rounding (`SMALLEST_UPDATE`).
    pairs: the same, beside those of softmax for the same task, seed and step.
    """

    def __init__(self, scores: Mapping[Any, Result]) -> None:
        """Of cells with the fields attention, task and seed."""
        cell_type = type(next(iter(scores), Cell(SCORE, "", "", 0, None)))
        norms = [field.name for field in fields(Result) if field.name != "loss"]
        columns = {name: attrgetter(name) for name in norms}
        frame = to_frame(cell_type, scores, **columns, step=lambda result: range(1, len(result.update) + 1))
        frame = frame.explode([*norms, "step"]).astype(dict.fromkeys(norms, float))
        steps = frame.set_index([*BY_SEED, "step"])[norms].sort_index().replace(math.inf, math.nan)
        largest = steps["update"].groupby(BY_SEED).transform("max")
        # Not finite updates stay: they make the score infinite.
        self.steps = steps[~(steps["update"] < SMALLEST_UPDATE * largest)]
        softmax = self.steps[self.steps.index.get_level_values("attention") == BASELINE].droplevel("attention")
        self.pairs = self.steps.join(softmax.add_suffix(" softmax"), how="inner")
        self.tasks = tasks_among(scores)
        self.rivals = [name for name in TITLES if name != BASELINE and any(cell.attention == name for cell in scores)]

    def tau(self, variant: str, of: str = "") -> Column:
        """tau_i; infinite where it is not finite."""
        return _finite_or_inf(self.pairs[variant + of] / self.pairs["update" + of])

    def step_ratios(self, variant: str) -> Column:
        """tau_i divided by that of softmax; infinite where it is not finite."""
        return _ratio(self.tau(variant), self.tau(variant, " softmax"))

    def ratios(self, variant: str) -> Column:
        """By attention, task and seed, as in the paper: the mean of the ratios of all steps."""
        return self.step_ratios(variant).groupby(BY_SEED).mean()

    def ratios_of_means(self, variant: str) -> Column:
        """By attention, task and seed: the mean of tau_i divided by the mean of that of softmax."""
        own, softmax = (self.tau(variant, of).groupby(BY_SEED).mean() for of in ("", " softmax"))
        return _ratio(own, softmax)

    def table(self, title: str, values: Column, attentions: Sequence[str], note: str, papers: bool = False) -> Table:
        """A table of text by attention and task: one row per attention, one column per task."""
        import pandas

        shown = values.unstack("task").reindex(index=attentions, columns=self.tasks)
        if papers:
            shown = with_paper(shown, pandas.DataFrame(dict(INSTABILITY)).T, "{:.2f}".format)
        return task_table(title, shown.rename(index=TITLES), note, rows="Model")


def _finite_or_inf(values: Column) -> Column:
    return values.where(values < math.inf, math.inf)


def _ratio(own: Column, softmax: Column) -> Column:
    """Infinite also where the score of softmax is: nothing is smaller than a number that is not known."""
    return _finite_or_inf(own / softmax.replace(math.inf, math.nan))


def normed(name: str) -> str:
    """The field of the same quantity after the final norm."""
    return f"normed_{name}"


def _ratio_table(scores: Scores, variant: str, title: str, papers: bool = False) -> Table:
    by_seed = scores.ratios(variant)
    several = by_seed.index.get_level_values("seed").nunique() > 1
    note = "Mean and standard deviation over seeds" if several else "One seed"
    texts = by_seed.groupby(["attention", "task"]).agg(mean_and_deviation)
    note += "; in brackets: the paper." if papers else "."
    return scores.table(title, texts, scores.rivals, f"{note} {LOST}", papers)


def mean_and_deviation(values: Column) -> str:
    if not (values < math.inf).all():
        return "not finite"
    mean, digits = values.mean(), 2 if values.mean() < 100 else 0
    return f"{mean:,.{digits}f}" + (f" ± {values.std():,.{digits}f}" if len(values) > 1 else "")


def _seed_table(scores: Scores) -> Table:
    """Whether seeds agree, and whether it matters how steps are averaged."""
    averages = {
        title: [
            ratios.groupby(["attention", "task"]).agg(_each_seed)
            for ratios in (scores.ratios(normed(variant)), scores.ratios_of_means(normed(variant)))
        ]
        for variant, title in VARIANTS.items()
    }
    rows = [
        [TASK_TITLES[task], TITLES[attention], title, *(texts.get((attention, task), NOTHING) for texts in both)]
        for task in scores.tasks
        for attention in scores.rivals
        for title, both in averages.items()
    ]
    header = ["Task", "Model", "f with", "mean of ratios", "ratio of means"]
    note = (
        "Instability score after the final norm divided by that of softmax, one number per seed in ascending order of "
        "seeds: the mean over the ratios of single steps, as in the paper, and the ratio of the means over steps."
    )
    return Table("Instability score of each seed", header, rows, note)


def _each_seed(values: Column) -> str:
    return ", ".join(f"{value:.2f}" if value < math.inf else "not finite" for value in values)


def _relative_table(scores: Scores) -> Table:
    """Independent of the scale of the embedding: the change of f divided by f."""
    relative = (scores.steps["off"] / scores.steps["size"]).replace(math.inf, math.nan)
    medians = relative.groupby(["attention", "task"]).median().map(number)
    title = "Squared change of f per step divided by the squared size of f, before the final norm, dropout off"
    attentions = [BASELINE, *scores.rivals] if scores.tasks else []
    return scores.table(title, medians, attentions, "Median over steps and seeds.")


def _component_table(scores: Scores) -> Table:
    """What the score depends on: noise of dropout, size of the embedding, length of the update."""
    pairs = scores.pairs
    ratios = {
        "dropout noise": pairs["normed_noise"] / pairs["normed_noise softmax"],
        "length of the update": pairs["update"] / pairs["update softmax"],
        "size of f before the norm": pairs["size"] / pairs["size softmax"],
    }
    share = 100 * pairs["normed_noise"] / pairs["normed_fresh"]
    by_task = pairs.assign(share=share, **ratios).replace(math.inf, math.nan).groupby(["task", "attention"])
    shares = by_task["share"].agg(["median", "min"]).map(lambda x: NOTHING if math.isnan(x) else f"{x:.2f} %")
    shares.columns = ["dropout noise in the fresh variant", "at least"]
    shown = shares.join(by_task[list(ratios)].median().map(number))
    order = [(task, attention) for task in scores.tasks for attention in (BASELINE, *scores.rivals)]
    shown = shown.reindex([place for place in order if place in shown.index])
    note = (
        "Medians over steps and seeds. First a percentage of the squared difference, with the smallest of all steps; "
        "then squared norms divided by those of softmax attention."
    )
    names = {**TASK_TITLES, **TITLES}
    return from_frame("Components of the score", shown.rename(index=names).rename_axis(["Task", "Model"]), note)


def _final_losses(results: Mapping[Cell, Result]) -> DataFrame:
    rates = {cell: result for cell, result in results.items() if cell.measure == RATES}
    return to_frame(Cell, rates, final=Result.final_loss, diverged=Result.diverged).astype({"final": float})


def _rate_table(results: Mapping[Cell, Result]) -> Table:
    frame = _final_losses(results)
    shown = frame.groupby(["attention", "rate"])["final"].agg(_median_and_range).unstack("rate")
    shown = shown.rename(columns=lambda rate: f"rate {rate:g}")
    counts = frame.groupby("attention")["diverged"].agg(["sum", "size"])
    shown["diverged"] = [f"{lost} of {count}" for lost, count in counts.itertuples(index=False)]
    shown = shown.reindex([name for name in TITLES if name in shown.index]).rename(index=TITLES).rename_axis("Model")
    note = (
        f"Short ListOps with the preset `short`. Mean loss of the last {LAST} steps: median over seeds, and range. "
        "Diverged: not finite, or above the loss of the first step."
    )
    return from_frame("Final loss by learning rate", shown, note)


def _median_and_range(losses: Column) -> str:
    finite = losses.dropna()
    lost = f"{len(losses) - len(finite)} not finite" if len(finite) < len(losses) else ""
    if finite.empty:
        return lost
    spread = f" ({finite.min():.2f} to {finite.max():.2f})" if len(finite) > 1 else ""
    return f"{finite.median():.2f}{spread}" + (f", {lost}" if lost else "")


def _score_figure(scores: Scores) -> Figure:
    """The ratio of each step: one row of panels per task, one column per variant."""
    panels = []
    for task in scores.tasks:
        for variant, title in VARIANTS.items():
            by_step = scores.step_ratios(normed(variant)).groupby(["task", "attention", "step"])
            spread = by_step.agg(["mean", "min", "max"])
            spread = spread.where((spread > 0) & (spread < math.inf))
            lines = [_line(spread.loc[task], name) for name in scores.rivals if (task, name) in spread.index]
            if lines:
                panels.append(Panel(f"{TASK_TITLES[task]}, {title}", "step", "score / softmax", lines, y_log=True))
    title = "Instability score divided by that of softmax attention, mean and range over seeds"
    return Figure("figure", title, panels, columns=len(VARIANTS), note=COVERED, same_y=True)


def _line(spread: DataFrame, attention: str) -> Series:
    """Three columns of one attention as a line with a band; the rest of the index is x."""
    here = spread.loc[attention]
    middle, low, high = (missing_as_none(here[name]) for name in here)
    return Series(TITLES[attention], here.index.tolist(), middle, low, high)


def _rate_figure(results: Mapping[Cell, Result]) -> Figure:
    """The learning rates side by side, and at each rate the attentions side by side, because their ranges overlap."""
    spread = _final_losses(results).groupby(["attention", "rate"])["final"].agg(["median", "min", "max"])
    rates = sorted(spread.index.unique("rate"))
    names = [attention for attention in TITLES if attention in spread.index]
    points = []
    for name, shift in zip(names, side_by_side(len(names)), strict=True):
        line = _line(spread, name)
        points.append(replace(line, x=[rates.index(rate) + shift for rate in line.x], mark=Mark.POINTS))
    panel = Panel("Short ListOps", "learning rate", "final loss", points, x_names=tick_texts(rates))
    title = "Loss after a short training, median and range over seeds"
    return Figure("rates", title, [panel] if points else [], columns=1)
