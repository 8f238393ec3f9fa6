"""Which rows go where: seeded choices that keep the classes in proportion."""

from __future__ import annotations

import numpy as np

from skyformer.lra.examples import Integers, Symbols


def choose(labels: Symbols, count: int, seed: int) -> Integers:
    """`count` row numbers in rising order, with every class as frequent as among all rows."""
    if count >= len(labels):
        return np.arange(len(labels))
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(labels))
    # Each row's place within its own class, as a share of it: the smallest shares are a proportional sample.
    shares = np.empty(len(labels))
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        shares[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.sort(shuffled[np.argsort(shares[shuffled], kind="stable")[:count]])


def hold_out(labels: Symbols, count: int, seed: int) -> tuple[Integers, Integers]:
    """Row numbers to keep, and `count` to hold out."""
    held_out = choose(labels, count, seed)
    return np.setdiff1d(np.arange(len(labels)), held_out), held_out
