"""Gradient norms in training (section 4.5, remark): does Nystrom on the softmax kernel make gradients explode?

The paper does not recommend its approximation for softmax attention itself: in the authors' experiments "the variant
suffers a more severe gradient explosion issue than usual transformers", because the d x d matrix between the landmarks
inherits the condition number of the scores, and the derivative of its inverse contains the inverse twice. Here all
variants train on ListOps with the same weights at the start, the same batches and the same settings:

- nystrom-printed: equations (4) to (6) with the softmax kernel exp(<x, y> / sqrt(p)) instead of the Gaussian one,
  divided by its row sums, with plain autograd through the inverse.
- nystrom-package: `skyformer_attention(kernel="softmax")`, which approximates the same attention by a Gaussian
  kernel between shifted keys and queries, and keeps the output within the range of the values.
- softmax, kernelized, skyformer and nystromformer as they are.

The norm is that of the gradient of all weights before clipping. A training ends if it or the loss is not finite, or if
the d x d matrix is singular in float32.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from skyformer.attention.base import Attention, Inputs, Promise
from skyformer.errors import SolveError
from skyformer.landmarks import Candidates, get_sampler, take_rows
from skyformer.ops.kernels import GaussianKernel
from skyformer.report.figures import Figure, Panel, Series
from skyformer.report.tables import Table, number
from skyformer.studies.base import Fact, Study, check_names, option
from skyformer.studies.frames import quantile
from skyformer.studies.fresh_steps import replace_attention
from skyformer.studies.record import significant
from skyformer.studies.registry import register_study

if TYPE_CHECKING:
    from skyformer.lra.dataset import Task
    from skyformer.training.config import RunConfig

PRINTED, PACKAGE = "nystrom-printed", "nystrom-package"
VARIANTS = ("softmax", "nystromformer", PACKAGE, PRINTED, "kernelized", "skyformer")
SINGULAR = "singular matrix"
LAST = 20
"""The final loss is the mean over this many last steps."""


@dataclass(frozen=True)
class Options:
    variants: tuple[str, ...] = option(VARIANTS, small=("softmax", PRINTED), required=True, help="What to train.")
    seeds: tuple[int, ...] = option((0, 1, 2), small=(0,), required=True, help="Seeds for weights and batches.")
    rates: tuple[float, ...] = option(
        (2e-3, 1e-2), small=(2e-3,), above=0, required=True, help="Learning rates; 2e-3 is that of the preset `short`."
    )
    steps: int = option(200, small=10, least=2, help="Training steps.")
    data_dir: str | None = option(None, help="Folder of the prepared data; short ListOps is generated if missing.")


@dataclass(frozen=True)
class Cell:
    variant: str
    rate: float
    seed: int


@dataclass(frozen=True)
class Result:
    """For each step the gradient norm and the loss, None where it is not finite. `ended` says what ended a training
    early; None if nothing did."""

    norms: tuple[float | None, ...]
    loss: tuple[float | None, ...]
    ended: str | None = None

    def end(self) -> str | None:
        """What ended the training early, also in records that do not say why."""
        return self.ended or ("not finite" if None in (*self.norms, *self.loss) else None)

    def final_loss(self) -> float | None:
        """The mean over the last steps; None if the training ended early."""
        last = [loss for loss in self.loss[-LAST:] if loss is not None]
        return sum(last) / len(last) if self.end() is None else None


class PrintedNystrom(Attention):
    """D^-1 A~ V with A~ = SM(Q, W) (SM(W, W) + gamma I)^-1 SM(W, K), SM(x, y) = exp(<x, y> / sqrt(P)), D = diag(A~ 1),
    and W the rows of [Q; K] that are drawn uniformly."""

    name = "nystrom"
    cannot: ClassVar[Mapping[Promise, str]] = {Promise.CAUSAL: "every output depends on all landmarks"}
    num_landmarks: int = 64
    gamma: float = 0.1

    def attend(self, inputs: Inputs) -> Tensor:
        query, key, value, mask = inputs.query, inputs.key, inputs.value, inputs.key_mask
        scale = query.shape[-1] ** -0.5
        candidates = Candidates(query, key, inputs.query_mask, mask, GaussianKernel(), scale)
        rows = get_sampler("uniform")(candidates, self.num_landmarks, self.generator())
        assert isinstance(rows, Tensor)
        W = take_rows(torch.cat([query, key], 2), rows.unsqueeze(1))
        left, middle, right = ((scale * a @ b.mT).exp() for a, b in ((query, W), (W, W), (W, key)))
        if mask is not None:
            right = right.masked_fill(~mask[:, None, None, :], 0)
        inner = torch.linalg.solve(
            middle + self.gamma * torch.eye(self.num_landmarks, device=W.device),
            right @ torch.cat([value, torch.ones_like(value[..., :1])], -1),
        )
        both = left @ inner
        return both[..., :-1] / both[..., -1:]


@register_study
class Gradients(Study[Options, Cell, Result]):
    name = "gradients"
    title = "Gradient norms with Nystrom on the softmax kernel (section 4.5, remark)"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        check_names("variant", options.variants, VARIANTS)
        self._loaded: Task | None = None

    def facts(self) -> Mapping[str, Fact]:
        from skyformer.studies.tasks import data_fact

        return {"preset": "short", "steps": self.options.steps, "listops data": data_fact(self._data())}

    def cells(self) -> Sequence[Cell]:
        chosen = self.options
        return [Cell(v, rate, seed) for seed in chosen.seeds for rate in chosen.rates for v in chosen.variants]

    def measure(self, cell: Cell) -> Result:
        from skyformer.studies.tasks import batches_of
        from skyformer.training.building import Trainee, build_model

        config = self._config(cell)
        model = build_model(config)
        if cell.variant == PRINTED:
            replace_attention(model, PrintedNystrom)
        trainee, squares = Trainee(config, model), list[Tensor]()
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(lambda w: squares.append(w.grad.square().sum()))  # type: ignore
        norms, losses, ended = list[float | None](), list[float | None](), None
        for batch in islice(batches_of(self._data(), config), self.options.steps):
            squares.clear()
            try:
                loss = trainee.step(batch)
            except (SolveError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
                loss, ended = math.nan, SINGULAR
            norm = math.sqrt(float(torch.stack(squares).sum())) if squares else math.nan
            norms.append(significant(norm))
            losses.append(significant(loss))
            if not (math.isfinite(norm) and math.isfinite(loss)):
                ended = ended or ("gradient not finite" if math.isfinite(loss) else "loss not finite")
                break
        return Result(tuple(norms), tuple(losses), ended)

    def _config(self, cell: Cell) -> RunConfig:
        from skyformer.studies.tasks import run_config

        attention = {PRINTED: "softmax", PACKAGE: "skyformer"}.get(cell.variant, cell.variant)
        steps = self.options.steps
        changes: dict[str, object] = {
            "optim_lr": cell.rate,
            "optim_warmup_steps": max(1, steps // 10),
            "loop_steps": steps,
        }
        if cell.variant == PACKAGE:
            changes["model_attention_options.kernel"] = "softmax"
        return run_config("listops", "short", attention, cell.seed, None, **changes)

    def _data(self) -> Task:
        from skyformer.studies.tasks import study_data

        if self._loaded is None:
            any_cell = Cell("softmax", self.options.rates[0], 0)
            self._loaded = study_data(self._config(any_cell), self.options.data_dir)
        return self._loaded

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        return [_norm_table(results)]

    @classmethod
    def figures(cls, results: Mapping[Cell, Result]) -> Sequence[Figure]:
        return [_figure(results)]


def _groups(results: Mapping[Cell, Result]) -> dict[tuple[float, str], list[Result]]:
    """The results of all seeds by learning rate and variant."""
    found: dict[tuple[float, str], list[Result]] = {}
    for rate in sorted({cell.rate for cell in results}):
        for variant in VARIANTS:
            of = [result for cell, result in results.items() if (cell.rate, cell.variant) == (rate, variant)]
            if of:
                found[rate, variant] = of
    return found


def _norm_table(results: Mapping[Cell, Result]) -> Table:
    rows = []
    for (rate, variant), of in _groups(results).items():
        norms = [math.inf if norm is None else norm for result in of for norm in result.norms]
        ends = Counter(end for result in of if (end := result.end()))
        finals = [final for result in of if (final := result.final_loss()) is not None]
        rows.append(
            [
                f"{rate:g}",
                variant,
                *(number(quantile(norms, q)) for q in (0.5, 0.99, 1.0)),
                ", ".join(f"{count} of {len(of)}: {why}" for why, count in ends.items()) or f"0 of {len(of)}",
                ", ".join(f"{final:.2f}" for final in finals) or "-",
            ]
        )
    header = [
        "learning rate",
        "variant",
        "median norm",
        "99 %",
        "largest",
        "ended early",
        f"loss of the last {LAST} steps",
    ]
    note = (
        "Norms of the gradient of all weights before clipping, over all steps and seeds; inf where there is none. "
        "Losses: one for each seed that did not end early."
    )
    return Table("Gradient norms on short ListOps", header, rows, note)


def _figure(results: Mapping[Cell, Result]) -> Figure:
    panels: dict[float, list[Series]] = {}
    for (rate, variant), of in _groups(results).items():
        steps = range(1, max(len(result.norms) for result in of) + 1)
        by_step = [[r.norms[i - 1] for r in of if len(r.norms) >= i] for i in steps]
        known = [[norm for norm in norms if norm is not None] for norms in by_step]
        middle, low, high = (
            [pick(norms) if norms else None for norms in known] for pick in (lambda n: quantile(n, 0.5), min, max)
        )
        panels.setdefault(rate, []).append(Series(_LABELS.get(variant, variant), list(steps), middle, low, high))
    drawn = [
        Panel(f"learning rate {rate:g}", "step", "gradient norm", lines, y_log=True) for rate, lines in panels.items()
    ]
    title = "Norm of the gradient by step on short ListOps, median and range over seeds"
    return Figure("figure", title, drawn, columns=2, direct=False)


_LABELS = {PRINTED: "Nyström as printed", PACKAGE: "Nyström of this package"}
