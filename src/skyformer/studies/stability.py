"""How much a training step moves the model's output (appendix, Table 3), and what learning rates a model bears.

The paper's instability score of step i on its batch x_i, with f the embedding after two layers:

    tau_i = |f(x_i, W_i) - f(x_i, W_{i-1})|_F^2 / |W_i - W_{i-1}|_F^2

and its table holds the average over 20 steps of tau_i divided by that of softmax attention. What f does with dropout
is left open there, so it is measured in three variants, all along one and the same training:

- "off": no dropout while f is evaluated.
- "same": dropout, with the same masks before and after the step.
- "fresh": dropout, with new masks after the step. Then the difference holds the noise of two masks besides the step's
  work; that noise alone, two masks and no step, is kept as well.

f is taken after the norm that follows the second layer, which is what the model hands on (the figures called "normed"),
and also before it, where the layers leave it. Landmarks and other random choices of an attention are the same in all
evaluations of f.

Besides the paper: the loss that short trainings end with at learning rates from harmless to absurd.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from skyformer.errors import InputError
from skyformer.report.figures import Figure, Panel, Series
from skyformer.report.paper import INSTABILITY, TASK_TITLES, tasks_among
from skyformer.report.tables import Table, number
from skyformer.studies.base import Fact, Study, check_names, option, quantile
from skyformer.studies.record import significant
from skyformer.studies.registry import register_study

if TYPE_CHECKING:
    from skyformer.lra.batching import Batch
    from skyformer.lra.dataset import Task
    from skyformer.training.building import Trainee
    from skyformer.training.config import RunConfig

SCORE, RATES = "score", "rates"
BASELINE = "softmax"
VARIANTS = {"off": "dropout off", "same": "same dropout masks", "fresh": "fresh dropout masks"}
TITLES = {
    "nystromformer": "Nystromformer",
    "kernelized": "Kernelized Attention",
    "skyformer": "Skyformer",
    "softmax": "Self-Attention",
}
LAST = 20
"""Steps whose losses make the final loss of a short training."""


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
    preset: str = option("paper", small="short", help="Preset of `skyformer train` for the scores.")
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
    rate_steps: int = option(200, small=20, least=1, help="Steps of a short training.")
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
    """Figures of each step. But for `loss`, all are squared Frobenius norms: `update` of W_i - W_{i-1}, `size` of f,
    and the rest of the differences of f. A short training has its losses alone; None is not finite."""

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

    def scores(self, variant: str) -> list[float]:
        """tau_i."""
        return _quotients(getattr(self, variant), self.update)

    def relative(self, variant: str) -> list[float]:
        """The change of f as a share of f."""
        return _quotients(getattr(self, variant), self.size)

    def final_loss(self) -> float | None:
        """The mean of the last losses; None if the training left the finite numbers."""
        last = self.loss[-LAST:]
        return None if None in self.loss else mean(loss for loss in last if loss is not None)

    def diverged(self) -> bool:
        """Not finite, or worse than at the start."""
        final, first = self.final_loss(), self.loss[0]
        return final is None or first is None or final > first


@register_study
class Stability(Study[Options, Cell, Result]):
    name = "stability"
    title = "Instability of training steps (appendix, Table 3)"
    options_type, cell_type, result_type = Options, Cell, Result

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        check_names("attention of this study", options.attentions, TITLES)
        if options.attentions and BASELINE not in options.attentions:
            raise InputError(
                f"--attentions must have {BASELINE!r} among them, for every score is divided by its; "
                f"got {', '.join(options.attentions)}"
            )
        self._loaded: dict[tuple[str, str], Task] = {}

    def facts(self) -> Mapping[str, Fact]:
        from skyformer.studies.tasks import data_fact

        names = ("preset", "dropout", "steps", "examples", "rate_steps")
        found: dict[str, Fact] = {name: getattr(self.options, name) for name in names}
        # What cannot be made here is missing before ListOps is made.
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
        return _scores(config, data, self.options.steps, self.options.examples)

    def _config(self, cell: Cell) -> RunConfig:
        from skyformer.studies.tasks import run_config

        chosen = self.options
        if cell.measure == SCORE:
            changes = {} if chosen.dropout is None else {"model_dropout": chosen.dropout}
            return run_config(cell.task, chosen.preset, cell.attention, cell.seed, self._limit(cell.task), **changes)
        steps = chosen.rate_steps
        return run_config(
            cell.task,
            "short",
            cell.attention,
            cell.seed,
            self._limit(cell.task),
            optim_lr=cell.rate,
            optim_warmup_steps=max(1, steps // 10),
            loop_steps=steps,
        )

    def _limit(self, task: str) -> int | None:
        return {"pathfinder": self.options.pathfinder_limit, "listops": self.options.listops_limit}.get(task)

    def _data(self, cell: Cell) -> Task:
        """Kept: data depends on neither attention, seed nor rate."""
        from skyformer.studies.tasks import study_data

        key = (cell.measure, cell.task)
        if key not in self._loaded:
            self._loaded[key] = study_data(self._config(cell), self.options.data_dir)
        return self._loaded[key]

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        scores = {cell: result for cell, result in results.items() if cell.measure == SCORE}
        found = [
            _ratio_table(scores, normed(variant), f"tau to softmax's, {title}") for variant, title in VARIANTS.items()
        ]
        found += [
            _ratio_table(scores, variant, f"The same before the final norm, {title}", paper=False)
            for variant, title in VARIANTS.items()
        ]
        found += [_seed_table(scores), _relative_table(scores), _makeup_table(scores), _rate_table(results)]
        return [table for table in found if table.rows]

    @classmethod
    def figures(cls, results: Mapping[Cell, Result]) -> Sequence[Figure]:
        scores = {cell: result for cell, result in results.items() if cell.measure == SCORE}
        found = [_score_figure(scores), _rate_figure(results)]
        return [figure for figure in found if figure.panels]


def normed(figure: str) -> str:
    """The name of the same figure after the final norm."""
    return f"normed_{figure}"


def _trainee(config: RunConfig) -> Trainee:
    from skyformer.training.building import Trainee

    return Trainee(config)


def _scores(config: RunConfig, data: Task, steps: int, examples: int) -> Result:
    """Trains for `steps` steps, and looks at f before and after each."""
    from skyformer.studies.tasks import batches_of

    trainee = _trainee(config)
    rows, losses = [], []
    for step, batch in enumerate(islice(batches_of(data, config), steps)):
        looks = _Looks(trainee.model, batch, examples, seed=step)
        old_weights = _flat(trainee.model)
        before = looks.take()
        losses.append(significant(trainee.step(batch)))
        rows.append([_squared(_flat(trainee.model) - old_weights), *_changes(before, looks.take())])
    columns = [tuple(significant(value, 6) for value in column) for column in zip(*rows, strict=True)]
    return Result(tuple(losses), *columns)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Look:
    """f without dropout, and with two sets of masks, each (tokens, dim) before and after the final norm."""

    off: tuple[Tensor, Tensor]
    first: tuple[Tensor, Tensor]
    second: tuple[Tensor, Tensor]


class _Looks:
    """f on some examples of one batch, as often as asked, with the same masks and landmarks each time."""

    def __init__(self, model: nn.Module, batch: Batch, examples: int, seed: int) -> None:
        self._model, self._seed = model, seed
        self._tokens, self._mask = batch.tokens[:examples], batch.mask[:examples]

    @torch.no_grad()
    def take(self) -> _Look:
        self._model.eval()
        return _Look(self._embedding(None), self._embedding(2 * self._seed), self._embedding(2 * self._seed + 1))

    def _embedding(self, masks: int | None) -> tuple[Tensor, Tensor]:
        """Only the dropout layers are in training: the attentions draw what they draw in evaluation, always alike."""
        for module in self._model.modules():
            if isinstance(module, nn.Dropout):
                module.train(masks is not None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(masks or 0)
            return embedding(self._model.encoder, self._tokens, self._mask)  # type: ignore[arg-type]


def embedding(encoder: Any, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """What the last layer leaves at the real tokens (N, dim), and that after the final norm."""
    x: Tensor = encoder.embeddings(tokens, mask)
    for layer in encoder.layers:
        x = layer(x, mask)
    real = x[mask].double()
    return real, encoder.norm(x)[mask].double()


def _changes(before: _Look, after: _Look) -> list[float]:
    """In the order of Result's fields: size, off, same, fresh, noise; then the same after the norm."""
    found = []
    for place in (0, 1):
        old, new = before.first[place], after.first[place]
        found += [
            _squared(before.off[place]),
            _squared(after.off[place] - before.off[place]),
            _squared(new - old),
            _squared(after.second[place] - old),
            _squared(before.second[place] - old),
        ]
    return found


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def _squared(x: Tensor) -> float:
    return float(x.square().sum())


def _short_training(config: RunConfig, data: Task) -> Result:
    """Losses until the last step, or until one is not finite."""
    from skyformer.studies.tasks import batches_of

    trainee, losses = _trainee(config), []
    for batch in islice(batches_of(data, config), config.loop.steps):
        loss = trainee.step(batch)
        losses.append(significant(loss))
        if not math.isfinite(loss):
            break
    return Result(tuple(losses))


def _ratios(scores: Mapping[Cell, Result], task: str, attention: str, variant: str) -> list[float]:
    """For each seed, as the paper does it: tau_i divided by that of softmax attention, averaged over the steps."""
    by_seed = [_step_ratios(*pair, variant) for pair in _with_baseline(scores, task, attention)]
    return [mean(ratios) for ratios in by_seed]


def _ratios_of_means(scores: Mapping[Cell, Result], task: str, attention: str, variant: str) -> list[float]:
    """For each seed the other average: the mean of tau_i divided by the mean of softmax attention's."""
    pairs = [(own.scores(variant), its.scores(variant)) for own, its in _with_baseline(scores, task, attention)]
    return [mean(own) / mean(its) if 0 < mean(its) < math.inf else math.inf for own, its in pairs]


def _step_ratios(own: Result, baseline: Result, variant: str) -> list[float]:
    """Infinite where a score is not finite."""
    pairs = zip(own.scores(variant), baseline.scores(variant), strict=True)
    return [ours / its if math.isfinite(ours) and 0 < its < math.inf else math.inf for ours, its in pairs]


def _with_spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    if not all(map(math.isfinite, values)):
        return "not finite"
    digits = 2 if mean(values) < 100 else 0
    spread = f" ± {stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):,.{digits}f}{spread}"


def _rivals(scores: Iterable[Cell]) -> list[str]:
    present = {cell.attention for cell in scores}
    return [attention for attention in TITLES if attention in present and attention != BASELINE]


def _ratio_table(scores: Mapping[Cell, Result], variant: str, title: str, paper: bool = True) -> Table:
    tasks = tasks_among(scores)
    rows = []
    for attention in _rivals(scores):
        ours = [_with_spread(_ratios(scores, task, attention, variant)) for task in tasks]
        theirs = [
            f" ({INSTABILITY[attention][task]:.2f})" if paper and attention in INSTABILITY else "" for task in tasks
        ]
        rows.append([TITLES[attention], *(own + its for own, its in zip(ours, theirs, strict=True))])
    several = len({cell.seed for cell in scores}) > 1
    average = "Mean and standard deviation over seeds" if several else "One seed"
    note = average + (", in brackets the paper's." if paper else ".")
    return Table(title, ["Model", *(TASK_TITLES[task] for task in tasks)], rows, note)


def _seed_table(scores: Mapping[Cell, Result]) -> Table:
    """Whether seeds agree, and whether it matters how steps are averaged."""
    rows = []
    for task in tasks_among(scores):
        for attention in _rivals(scores):
            for variant, title in VARIANTS.items():
                averages = (_ratios, _ratios_of_means)
                found = [average(scores, task, attention, normed(variant)) for average in averages]
                rows.append([TASK_TITLES[task], TITLES[attention], title, *map(_one_by_one, found)])
    header = ["Task", "Model", "f with", "mean of ratios", "ratio of means"]
    note = (
        "tau to softmax's after the final norm, a number a seed in ascending order: the ratios of single steps "
        "averaged, as the paper does it, and the ratio of the averages over steps."
    )
    return Table("Seed by seed", header, rows, note)


def _one_by_one(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" if math.isfinite(value) else "not finite" for value in values) or "-"


def _relative_table(scores: Mapping[Cell, Result]) -> Table:
    """Without the scale of the embedding: the change of f as a share of f."""
    tasks = tasks_among(scores)
    rows = [
        [TITLES[attention], *(_relative_change(scores, task, attention) for task in tasks)]
        for attention in [BASELINE, *_rivals(scores)]
        if tasks
    ]
    title = "Squared change of f in a step as a share of f's squared size, before the final norm, dropout off"
    return Table(title, ["Model", *(TASK_TITLES[task] for task in tasks)], rows, "Median over steps and seeds.")


def _relative_change(scores: Mapping[Cell, Result], task: str, attention: str) -> str:
    chosen = [result for cell, result in scores.items() if (cell.task, cell.attention) == (task, attention)]
    return _median([result.relative("off") for result in chosen])


def _makeup_table(scores: Mapping[Cell, Result]) -> Table:
    """What the score is made of: noise of dropout, size of the embedding, length of the update."""
    rows = []
    for task in tasks_among(scores):
        for attention in [BASELINE, *_rivals(scores)]:
            pairs = _with_baseline(scores, task, attention)
            if pairs:
                rows.append([TASK_TITLES[task], TITLES[attention], *_makeup(pairs)])
    header = [
        "Task",
        "Model",
        "dropout noise in the fresh variant",
        "at least",
        "dropout noise",
        "length of the update",
        "size of f before the norm",
    ]
    note = (
        "Medians over steps and seeds: a share, with the least of all, then squared norms divided by those of softmax "
        "attention."
    )
    return Table("What the score is made of", header, rows, note)


def _with_baseline(scores: Mapping[Cell, Result], task: str, attention: str) -> list[tuple[Result, Result]]:
    """Pairs of results, by seed."""
    found = []
    for cell, result in sorted(scores.items(), key=lambda item: item[0].seed):
        baseline = scores.get(Cell(SCORE, task, BASELINE, cell.seed, None))
        if (cell.task, cell.attention) == (task, attention) and baseline is not None:
            found.append((result, baseline))
    return found


def _makeup(pairs: Sequence[tuple[Result, Result]]) -> list[str]:
    share = [_quotients(own.normed_noise, own.normed_fresh) for own, _ in pairs]
    ratios = [
        [_quotients(getattr(own, name), getattr(its, name)) for own, its in pairs]
        for name in (normed("noise"), "update", "size")
    ]
    together = _finite(share)
    shares = [f"{100 * f(together):.2f} %" if together else "-" for f in (median, min)]
    return [*shares, *map(_median, ratios)]


def _quotients(above: Sequence[float | None], below: Sequence[float | None]) -> list[float]:
    """Step by step; infinite where either is not finite, or where nothing is divided by: no dropout makes no noise."""
    return [math.inf if a is None or not b else a / b for a, b in zip(above, below, strict=True)]


def _finite(values: Sequence[Sequence[float]]) -> list[float]:
    return [value for some in values for value in some if math.isfinite(value)]


def _median(values: Sequence[Sequence[float]]) -> str:
    together = _finite(values)
    return number(quantile(together, 0.5)) if together else "-"


def _rate_table(results: Mapping[Cell, Result]) -> Table:
    chosen = {cell: result for cell, result in results.items() if cell.measure == RATES}
    rates = sorted({cell.rate for cell in chosen if cell.rate is not None})
    rows = []
    for attention in TITLES:
        own = {cell: result for cell, result in chosen.items() if cell.attention == attention}
        if own:
            finals = [_final_losses(own, rate) for rate in rates]
            worse = [result.diverged() for result in own.values()]
            rows.append([TITLES[attention], *map(_with_range, finals), f"{sum(worse)} of {len(worse)}"])
    header = ["Model", *(f"rate {rate:g}" for rate in rates), "diverged"]
    note = (
        f"Short ListOps, as in the preset `short`. The mean loss of the last {LAST} steps: median over seeds, range. "
        "Diverged: not finite, or above the first step's."
    )
    return Table("Final loss by learning rate", header, rows, note)


def _final_losses(own: Mapping[Cell, Result], rate: float) -> list[float | None]:
    return [result.final_loss() for cell, result in own.items() if cell.rate == rate]


def _with_range(losses: Sequence[float | None]) -> str:
    finite = [loss for loss in losses if loss is not None]
    lost = f", {len(losses) - len(finite)} not finite" if len(finite) < len(losses) else ""
    if not finite:
        return lost.removeprefix(", ") or "-"
    spread = f" ({min(finite):.2f} to {max(finite):.2f})" if len(finite) > 1 else ""
    return f"{quantile(finite, 0.5):.2f}{spread}{lost}"


def _score_figure(scores: Mapping[Cell, Result]) -> Figure:
    """tau_i to softmax's over the steps: a row of panels a variant, a column a task."""
    tasks, panels = tasks_among(scores), []
    for variant, title in VARIANTS.items():
        for task in tasks:
            series = [_ratio_line(scores, task, attention, normed(variant)) for attention in _rivals(scores)]
            panels.append(
                Panel(
                    f"{TASK_TITLES[task]}, {title}", "step", "tau to softmax's", [s for s in series if s.x], y_log=True
                )
            )
    panels = [panel for panel in panels if panel.series]
    return Figure("figure", "Instability score to that of softmax attention", panels, columns=max(1, len(tasks)))


def _ratio_line(scores: Mapping[Cell, Result], task: str, attention: str, variant: str) -> Series:
    by_seed = [_step_ratios(*pair, variant) for pair in _with_baseline(scores, task, attention)]
    steps = list(zip(*by_seed, strict=True))
    return Series(
        TITLES[attention],
        range(1, len(steps) + 1),
        [_visible(mean(values)) for values in steps],
        [_visible(min(values)) for values in steps],
        [_visible(max(values)) for values in steps],
    )


def _visible(ratio: float) -> float | None:
    return ratio if 0 < ratio < math.inf else None


def _rate_figure(results: Mapping[Cell, Result]) -> Figure:
    chosen = {cell: result for cell, result in results.items() if cell.measure == RATES}
    rates = sorted({cell.rate for cell in chosen if cell.rate is not None})
    lines = []
    for attention in TITLES:
        own = {cell: result for cell, result in chosen.items() if cell.attention == attention}
        finals = [[loss for loss in _final_losses(own, rate) if loss is not None] for rate in rates]
        if own:
            middle, low, high = (
                [pick(losses) if losses else None for losses in finals]
                for pick in (lambda losses: quantile(losses, 0.5), min, max)
            )
            lines.append(Series(TITLES[attention], rates, middle, low, high))
    panels = [Panel("Short ListOps", "learning rate", "final loss", lines, x_log=True, y_log=True)] if lines else []
    return Figure("rates", "Loss after a short training, median and range over seeds", panels, columns=1)
