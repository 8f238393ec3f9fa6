"""Table 3 read as its authors may have run it: the instability score of the study `stability` in other settings.

The paper says that the models of Table 3 have the settings of Table 1 and are updated for 20 steps, but not whether
dropout was active, whether the schedule then had 20 steps or 50,000, and from which split the batches came. In the
authors' code at the time of publication, the script for training has a mode for tests that is on by default; it trains
exactly 20 steps. A reading is a set of letters, each of which changes settings of `stability` (the preset `paper_v1`)
to theirs:

- a: a schedule of 20 steps with a warm-up of 2, so the learning rate is highest at step 2 and then falls to almost
  zero. The update of step 20 is lost in rounding, so that step does not count.
- b: dropout at all places: the embeddings, the attention weights (softmax and Kernelized Attention), the output of the
  attention, inside the MLPs and at their end.
- c: batches of any lengths, padded to the longest length of the task; black pixels count as padding.
- d: AdamW's beta1 falls from 0.95 to 0.85 while the learning rate rises, and then rises again.
- e: f is evaluated on the whole batch, with new landmarks (half from Q, half from K, with replacement) whenever the
  dropout masks are new, and for every evaluation with dropout off; the batches are those of the dev set.

A record may have cells of several sizes (`--batch-size`, `--length`): each command adds its cells to those of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skyformer.errors import InputError
from skyformer.lra.tasks import TASKS, Split, task_spec
from skyformer.report.figures import Figure, Mark, Panel, Series, finite_or_none, side_by_side
from skyformer.report.paper import INSTABILITY, TASK_TITLES
from skyformer.report.tables import NOTHING, Table
from skyformer.studies.base import Fact, Study, check_names, option
from skyformer.studies.registry import register_study
from skyformer.studies.stability import (
    BASELINE,
    LOST,
    TITLES,
    VARIANTS,
    Result,
    Scores,
    mean_and_deviation,
    normed,
    score_steps,
)

if TYPE_CHECKING:
    from skyformer.lra.batching import Batch
    from skyformer.lra.dataset import Task
    from skyformer.training.config import RunConfig

PRESET = "paper_v1"
LETTERS = "abcde"
EXAMPLES = 4
"""Examples on which f is evaluated unless the reading has the letter e, as in `stability`."""
WARMUP = 2
FULL_SIZE = "the paper's"
BLACK = 1
"""The token of a black pixel: its value plus one."""


@dataclass(frozen=True)
class Options:
    data_dir: str | None = option(None, help="Folder of the prepared data.")
    readings: tuple[str, ...] = option(
        ("a", "ab", "abc", "abcd", "abcde"),
        small=("a", "abcde"),
        required=True,
        help="Sets of changes, each written as letters from a to e: "
        "a schedule of 20 steps; b dropout at all places; c unsorted, padded batches without black pixels; "
        "d cycle of beta1; e f on the whole batch, landmarks drawn anew, dev set.",
    )
    tasks: tuple[str, ...] = option(tuple(TASK_TITLES), small=("listops",), help="Tasks of Long Range Arena.")
    attentions: tuple[str, ...] = option(
        (BASELINE, "nystromformer", "kernelized", "skyformer"), help="Attentions; softmax must be among them."
    )
    seeds: tuple[int, ...] = option((0, 1, 2), small=(0,), help="Seeds for weights, batches and landmarks.")
    steps: int = option(20, small=4, least=WARMUP + 1, help="Training steps to compute the score for.")
    batch_size: int | None = option(None, small=8, least=1, help="Examples of a batch; none: the paper's.")
    length: int | None = option(
        None,
        small=128,
        least=64,
        help="Cut texts, shrink Image and generate ListOps up to this length (Pathfinder keeps its own); "
        "none: the paper's.",
    )
    pathfinder_limit: int = option(3000, least=1, help="Pathfinder images per split, as prepared with --limit.")
    listops_limit: int | None = option(
        None, small=500, least=1, help="ListOps examples per split; they are generated if they are missing."
    )


@dataclass(frozen=True)
class Cell:
    """batch_size, length: as in the options; None is the paper's."""

    reading: str
    task: str
    attention: str
    seed: int
    batch_size: int | None = None
    length: int | None = None

    @property
    def size(self) -> str:
        """The size of a batch as in "8 x 256", or "the paper's"."""
        if self.batch_size is None and self.length is None:
            return FULL_SIZE
        return f"{self.batch_size or 'all'} x {self.length or 'all'}"


@register_study
class Readings(Study[Options, Cell, Result]):
    name = "readings"
    title = "Instability of training steps in other settings (appendix, Table 3)"
    keeps_other_cells = True

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        check_names("task", options.tasks, TASKS)
        check_names("attention of this study", options.attentions, TITLES)
        for reading in options.readings:
            if not reading or reading != "".join(letter for letter in LETTERS if letter in reading):
                raise InputError(
                    f"--readings must be letters from {LETTERS!r} in this order, such as ab; got {reading!r}"
                )
        if BASELINE not in options.attentions:
            raise InputError(f"--attentions must include {BASELINE!r}; got {', '.join(options.attentions) or 'none'}")
        self._loaded: dict[str, Task] = {}

    def facts(self) -> Mapping[str, Fact]:
        from skyformer.studies.tasks import data_fact

        chosen = self.options
        found: dict[str, Fact] = {"preset": PRESET, "steps": chosen.steps}
        at_length = "" if chosen.length is None else f" for length {chosen.length}"
        # ListOps comes last: missing data of other tasks is reported before ListOps is generated.
        for task in sorted(chosen.tasks, key=lambda task: task == "listops"):
            found[f"{task} data{at_length}"] = data_fact(self._data(task))
        return found

    def cells(self) -> Sequence[Cell]:
        chosen = self.options
        return [
            Cell(reading, task, attention, seed, chosen.batch_size, chosen.length)
            for seed in chosen.seeds
            for reading in reversed(chosen.readings)
            for task in chosen.tasks
            for attention in chosen.attentions
        ]

    def measure(self, cell: Cell) -> Result:
        config, whole = self.config(cell), "e" in cell.reading
        batches = self._batches(cell, config)
        return score_steps(config, batches, self.options.steps, None if whole else EXAMPLES, redraw_landmarks=whole)

    def config(self, cell: Cell) -> RunConfig:
        """The settings of a cell, which the letters of its reading change."""
        from skyformer.studies.tasks import run_config

        chosen, on = self.options, set(cell.reading)
        changes: dict[str, object] = {}
        if cell.batch_size is not None:
            changes["loop_batch_size"] = cell.batch_size
        # The thin lines of Pathfinder would not survive in a smaller image.
        if cell.length is not None and cell.task != "pathfinder" and cell.length < task_spec(cell.task).max_length:
            changes["task_max_length"] = cell.length
        if "a" in on:
            changes |= {"optim_warmup_steps": WARMUP, "loop_steps": chosen.steps}
        if "b" in on:
            changes |= {"model_embedding_dropout": "null", "model_mlp_hidden_dropout": "null"}
            if cell.attention in (BASELINE, "kernelized"):
                changes["model_attention_dropout"] = "null"
        if "c" in on:
            changes |= {"loop_group_by_length": "false", "loop_pad_to_max": "true"}
        if "d" in on:
            changes["optim_cycle_beta1"] = "true"
        if "e" in on and cell.attention == "skyformer":
            changes["model_attention_options.landmarks"] = "paper"
        limit = {"pathfinder": chosen.pathfinder_limit, "listops": chosen.listops_limit}.get(cell.task)
        return run_config(cell.task, PRESET, cell.attention, cell.seed, limit, **changes)

    def _data(self, task: str) -> Task:
        """Loaded once, because data depends on nothing but the task."""
        from skyformer.studies.tasks import study_data

        if task not in self._loaded:
            config = self.config(Cell("", task, BASELINE, 0, self.options.batch_size, self.options.length))
            self._loaded[task] = study_data(config, self.options.data_dir)
        return self._loaded[task]

    def _batches(self, cell: Cell, config: RunConfig) -> Iterator[Batch]:
        from skyformer.studies.tasks import batches_of

        split = Split.DEV if "e" in cell.reading else Split.TRAIN
        no_black = "c" in cell.reading and task_spec(cell.task).image_side is not None
        for batch in batches_of(self._data(cell.task), config, split):
            yield replace(batch, mask=batch.mask & (batch.tokens != BLACK)) if no_black else batch

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        return [*(_ratio_table(results, name) for name in VARIANTS), _seed_table(results)]

    @classmethod
    def figures(cls, results: Mapping[Cell, Result]) -> Sequence[Figure]:
        figure = _figure(results)
        return [figure] if figure.panels else []


def _by_size_and_reading(results: Mapping[Cell, Result]) -> dict[tuple[str, str], Scores]:
    found: dict[tuple[str, str], dict[Cell, Result]] = {}
    for cell in sorted(results, key=lambda cell: (cell.size == FULL_SIZE, cell.size, cell.reading)):
        found.setdefault((cell.size, cell.reading), {})[cell] = results[cell]
    return {key: Scores(cells) for key, cells in found.items()}


def _ratio_table(results: Mapping[Cell, Result], variant: str) -> Table:
    """One row per model, size and reading, and the paper's below; one column per task."""
    grouped = _by_size_and_reading(results)
    tasks = [task for task in TASK_TITLES if any(cell.task == task for cell in results)]
    rivals = [name for name in TITLES if name != BASELINE and any(cell.attention == name for cell in results)]
    rows = []
    for name in rivals:
        for (size, reading), scores in grouped.items():
            ratios = scores.ratios(normed(variant)).groupby(["attention", "task"]).agg(mean_and_deviation)
            if any((name, task) in ratios for task in tasks):
                rows.append([TITLES[name], reading, size, *(ratios.get((name, task), NOTHING) for task in tasks)])
        papers = (f"{INSTABILITY[name][task]:.2f}" for task in tasks)
        rows.append([TITLES[name], "the paper", NOTHING, *papers])
    title = f"Instability score divided by that of softmax, f with {VARIANTS[variant]}"
    header = ["Model", "reading", "batches", *(TASK_TITLES[task] for task in tasks)]
    note = (
        "Mean and standard deviation over seeds of the mean ratio over steps; no deviation: one seed. Batches: "
        f"examples x tokens at most, but Pathfinder always has its 1,024. {LOST}"
    )
    return Table(title, header, rows, note)


def _seed_table(results: Mapping[Cell, Result]) -> Table:
    """How often a Gaussian attention has a smaller score than softmax attention."""
    rows = []
    for (size, reading), scores in _by_size_and_reading(results).items():
        for variant, title in VARIANTS.items():
            counts = []
            for name in ("kernelized", "skyformer"):
                for ratios in (scores.ratios(normed(variant)), scores.ratios_of_means(normed(variant))):
                    here = ratios[ratios.index.get_level_values("attention") == name]
                    counts.append(f"{int((here < 1).sum())} of {len(here)}")
            noise = scores.pairs["normed_noise"] / scores.pairs["normed_fresh"]
            share = f"{100 * noise.median():.2f} %" if variant == "fresh" and len(noise) else NOTHING
            rows.append([reading, size, title, *counts, share])
    header = ["reading", "batches", "f with", *["mean of ratios", "ratio of means"] * 2, "dropout noise"]
    groups = [("", 3), (TITLES["kernelized"], 2), (TITLES["skyformer"], 2), ("", 1)]
    note = (
        "Tasks and seeds in which the score is smaller than that of softmax attention. Dropout noise: the median share "
        "of the squared change of f, of all models, that two masks make without a step."
    )
    return Table("How often the score is smaller than that of softmax attention", header, rows, note, groups)


def _figure(results: Mapping[Cell, Result]) -> Figure:
    """Fresh masks: one panel per task, the ratio for each reading, and the paper's as a dashed line. Of several sizes,
    the one with the most cells."""
    grouped = _by_size_and_reading(results)
    sizes = [cell.size for cell in results]
    largest = max(sizes, key=sizes.count, default=FULL_SIZE)
    by_reading = {reading: scores for (size, reading), scores in grouped.items() if size == largest}
    places = {reading: place for place, reading in enumerate(by_reading)}
    panels = []
    for task in TASK_TITLES:
        lines = []
        for name, shift in zip(("kernelized", "skyformer"), side_by_side(2), strict=True):
            points = []
            for reading, scores in by_reading.items():
                ratios = scores.ratios(normed("fresh"))
                here = [value for (a, t, _), value in ratios.items() if (a, t) == (name, task)]
                if here:
                    points.append((places[reading] + shift, sum(here) / len(here), min(here), max(here)))
            if points:
                x, y, low, high = map(finite_or_none, zip(*points, strict=True))
                lines.append(Series(TITLES[name], x, y, low, high, Mark.POINTS))
        if lines:
            ends = [-0.3, len(places) - 0.7]
            paper = [INSTABILITY["kernelized"][task]] * 2
            lines.append(Series("the paper, Kernelized Attention", ends, paper, mark=Mark.DASHED))
            lines.append(Series("as softmax attention", ends, [1, 1], mark=Mark.DASHED))
            panels.append(Panel(TASK_TITLES[task], "reading", "score / softmax", lines, x_names=tuple(by_reading)))
    title = "Instability score divided by that of softmax, fresh dropout masks, mean and range over seeds"
    return Figure("figure", title, panels, columns=2 if len(panels) == 4 else 3, direct=False)
