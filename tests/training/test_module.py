"""The module that Lightning trains: seeded steps, the schedule, and scores that add up."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import HalfPrecision

from skyformer.lra import Batch, load_task, training_loader
from skyformer.training.building import build_model, mixed_seed, one_cycle
from skyformer.training.module import ClassifierModule, Evaluation, Scores, StepPart
from tests.training.tiny import tiny_config


@pytest.fixture
def batch(data_dir: Path) -> Batch:
    task = load_task("listops", data_dir, limit=64, max_length=64)
    return next(iter(training_loader(task.train, 8)))


def test_seeds_have_nothing_in_common() -> None:
    seeds = [mixed_seed("step", seed, step, rank) for seed in range(10) for step in range(10) for rank in range(3)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Half of the bits differ from one step to the next, give or take.
    changed = [(mixed_seed("step", 0, step) ^ mixed_seed("step", 0, step + 1)).bit_count() for step in range(100)]
    assert 28 < sum(changed) / len(changed) < 35
    assert mixed_seed("step", 1, 23) != mixed_seed("step", 12, 3)
    assert mixed_seed("step", 0) != mixed_seed("weights", 0)


def test_weights_are_a_function_of_the_seed() -> None:
    one, same, other = (build_model(tiny_config(seed=seed)).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.0.weight"], other["head.0.weight"])
    # Two attentions start from the same weights, but for their own.
    linformer = build_model(tiny_config(attention="linformer", options={"num_features": 8})).state_dict()
    assert all(torch.equal(one[name], linformer[name]) for name in one)


@pytest.mark.parametrize("attention", ["skyformer", "performer"])
def test_a_step_is_a_function_of_its_number(attention: str, batch: Batch) -> None:
    options = {"num_landmarks": 8} if attention == "skyformer" else {"num_features": 8}
    config = tiny_config(attention=attention, options=options)
    module = ClassifierModule(config, build_model(config))
    losses = []
    for number in (4, 5, 4):
        torch.rand(number)
        losses.append(module.training_step(batch, number).item())
    assert losses[0] == losses[2] != losses[1]


def test_parts_of_a_step(batch: Batch) -> None:
    module = ClassifierModule(tiny_config(accumulate=2), build_model(tiny_config()))
    for number in range(5):
        module.training_step(batch, number)
    assert len(module.parts) == 1
    module.training_step(batch, 5)
    assert [part.ids.tolist() for part in module.parts] == [batch.ids.tolist()] * 2
    assert int(module.window.sums[2]) == 6 * len(batch)


def learning_rates(steps: int, warmup: int) -> list[float]:
    config = tiny_config(steps=steps)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1, betas=(0.9, 0.999))
    schedule = one_cycle(optimizer, config.optim.replace(lr=1.0, warmup_steps=warmup), steps)
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    return rates


def test_the_schedule_is_one_linear_cycle() -> None:
    rates = learning_rates(100, 20)
    assert rates.index(max(rates)) == 19
    assert max(rates) == pytest.approx(1.0)
    assert rates[0] == pytest.approx(1 / 25)
    assert rates[-1] < 1e-4
    rises = [after - before for before, after in pairwise(rates[:20])]
    falls = [after - before for before, after in pairwise(rates[19:])]
    assert max(rises) == pytest.approx(min(rises))
    assert max(falls) == pytest.approx(min(falls))


@pytest.mark.parametrize(("warmup", "highest"), [(1, 0.9), (2, 1.0), (9, 1.0)])
def test_short_and_long_warm_ups(warmup: int, highest: float) -> None:
    rates = learning_rates(10, warmup)
    assert rates.index(max(rates)) == warmup - 1
    assert max(rates) == pytest.approx(highest)


def test_beta1_falls_while_the_learning_rate_rises() -> None:
    optim = tiny_config().optim.replace(lr=1.0, warmup_steps=20, cycle_beta1=True)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1, betas=(0.9, 0.999))
    schedule = one_cycle(optimizer, optim, 100)
    betas = []
    for _ in range(100):
        betas.append(optimizer.param_groups[0]["betas"])
        optimizer.step()
        schedule.step()
    first, second = zip(*betas, strict=True)
    assert set(second) == {0.999}
    assert (first[0], first[19], first[99]) == pytest.approx((0.95, 0.85, 0.95))
    assert all(after < before for before, after in pairwise(first[:20]))
    assert all(after > before for before, after in pairwise(first[19:]))


def test_scores_add_up() -> None:
    scores, trainer = Scores(), Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    scores.add(StepPart(torch.arange(2), torch.tensor(2.0), torch.tensor(1)))
    scores.add(StepPart(torch.arange(6), torch.tensor(0.5), torch.tensor(6)))
    saved = scores.gather(trainer)
    assert saved == {"loss": 7.0, "correct": 7, "examples": 8}
    assert scores.take(trainer) == Evaluation(7 / 8, 7 / 8, 8)
    assert not scores.sums.any()
    scores.restore(saved)
    scores.add(StepPart(torch.arange(2), torch.tensor(1.0), torch.tensor(0)))
    assert scores.take(trainer) == Evaluation(0.9, 0.7, 10)


def test_scores_count_exactly_if_the_default_is_bfloat16() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with HalfPrecision("bf16-true").forward_context():
        scores = Scores()
        for _ in range(10):
            scores.add(StepPart(torch.arange(301), torch.tensor(2.25), torch.tensor(299)))
    assert scores.take(trainer) == Evaluation(2.25, 2990 / 3010, 3010)


def test_a_part_counts_what_is_right(batch: Batch) -> None:
    logits = torch.nn.functional.one_hot(batch.label, 10).float()
    logits[0] = -logits[0]
    part = StepPart.of(batch, logits, torch.tensor(1.5))
    assert (int(part.correct), float(part.loss)) == (len(batch) - 1, 1.5)
