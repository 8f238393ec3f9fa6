"""Numbers for the attention modules of a model: each layer draws its own landmarks, the same in every call."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

_NUMBER = "_skyformer_layer"
_numbered: dict[int, tuple[weakref.ref[Any], int]] = {}
"""The number of modules numbered so far, by the id of the config that the modules of a model share."""


def layer_generator(module: nn.Module, seed: int) -> torch.Generator | None:
    """The generator of a layer's landmarks: None (torch's global one) in training, else a new one with a fixed seed."""
    return None if module.training else torch.Generator().manual_seed(layer_seed(module, seed))


def layer_seed(module: nn.Module, seed: int) -> int:
    """A seed for one layer."""
    # The factor keeps the seeds apart: layer 1 of seed 0 must not equal layer 0 of seed 1.
    return (seed + layer_number(module) * 0x9E3779B97F4A7C15) % 2**62


def layer_number(module: nn.Module) -> int:
    """`layer_idx` if the model sets it; otherwise the place of the module in the first forward pass."""
    number = getattr(module, "layer_idx", None)
    if number is None:
        number = getattr(module, _NUMBER, None)
    if number is None:
        number = _next_number(getattr(module, "config", None))
        # Stored on the module, so that copies of it draw the same landmarks.
        setattr(module, _NUMBER, number)
    return int(number)


def _next_number(config: object) -> int:
    if config is None:
        return 0
    key = id(config)
    owner, count = _numbered.get(key, (None, 0))
    if owner is None or owner() is not config:
        owner, count = weakref.ref(config, lambda _: _numbered.pop(key, None)), 0
    _numbered[key] = (owner, count + 1)
    # Two models may share a config: the second starts at zero again.
    return count % max(1, getattr(config, "num_hidden_layers", None) or count + 1)
