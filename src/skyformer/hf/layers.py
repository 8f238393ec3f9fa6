"""A number for every attention module of a model: each layer draws its own landmarks, and the same ones every time."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

_NUMBER = "_skyformer_layer"
_numbered: dict[int, tuple[weakref.ref[Any], int]] = {}
"""How many modules have been numbered, by the id of the config that the modules of a model share."""


def layer_generator(module: nn.Module, seed: int) -> torch.Generator | None:
    """Where a layer draws its landmarks from: torch's own generator in training, a fresh one of fixed seed else."""
    if module.training:
        return None
    # Far apart, so that layer 1 of seed 0 is not layer 0 of seed 1.
    return torch.Generator().manual_seed((seed + layer_number(module) * 0x9E3779B97F4A7C15) % 2**63)


def layer_number(module: nn.Module) -> int:
    """`layer_idx` where the model sets it; else the place of the module in the first forward pass."""
    number = getattr(module, "layer_idx", None)
    if number is None:
        number = getattr(module, _NUMBER, None)
    if number is None:
        number = _next_number(getattr(module, "config", None))
        # Kept on the module, so that copies of it draw the same.
        setattr(module, _NUMBER, number)
    return int(number)


def _next_number(config: object) -> int:
    if config is None:
        return 0
    owner, count = _numbered.get(id(config), (None, 0))
    if owner is None or owner() is not config:
        owner, count = weakref.ref(config, _forget(id(config))), 0
    _numbered[id(config)] = (owner, count + 1)
    # Two models may share a config: the second starts at zero again.
    return count % max(1, getattr(config, "num_hidden_layers", None) or count + 1)


def _forget(config_id: int) -> Any:
    return lambda _: _numbered.pop(config_id, None)
