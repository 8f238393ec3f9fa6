"""The options of a registered attention, checked at registration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from skyformer.attention import attention_options, build_attention
from skyformer.attention.tilted import TiltedPlan, check_kernel
from skyformer.checks import check_at_least, check_memory_budget, check_positive
from skyformer.errors import InputError, UnknownNameError, UnsupportedError
from skyformer.functional import GAMMA
from skyformer.landmarks import (
    CustomSampler,
    PaperSampler,
    QuerySampler,
    Sampler,
    StratifiedSampler,
    UniformSampler,
    get_sampler,
)
from skyformer.ops.kernels import Kernel, SoftmaxKernel, get_kernel
from skyformer.ops.products import MEMORY_BUDGET
from skyformer.ops.solve import Solver, get_solver

_SAMPLERS_PER_HEAD: Mapping[str, Sampler] = {
    sampler.name: sampler(per_head=True) for sampler in (UniformSampler, PaperSampler, StratifiedSampler, QuerySampler)
}
"""Named samplers that here draw separately for each head; the others use each head's points, or draw nothing."""

_SET_BY_THE_MODEL: Mapping[str, str] = {
    "scale": "it passes the scaling of its scores with every call",
    "dropout": "it passes the attention dropout of its config with every call",
    "num_heads": "it is the number of heads of the tensors it passes",
    "head_dim": "it is the head dim of the tensors it passes",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every registered attention.

    Args:
        local_layers: what layers with a sliding window do: "refuse" raises an error, "sdpa" keeps their own windowed
            softmax attention.
    """

    local_layers: str = "refuse"

    def __post_init__(self) -> None:
        if self.local_layers not in ("refuse", "sdpa"):
            raise UnknownNameError("value of local_layers", self.local_layers, ("refuse", "sdpa"))


@dataclass(frozen=True, kw_only=True)
class TiltedOptions(Options):
    """Options of tilted attention, all as in `tilted_attention`."""

    budget: int | None = None
    num_blocks: int | None = None
    num_exact: int | None = None
    num_cells: int | None = None
    slope: bool = True
    ordered: bool = True
    kernel: str = "softmax"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kernel(self.kernel)
        TiltedPlan.choose(self.budget, self.num_blocks, self.num_exact, self.num_cells)


@dataclass(frozen=True, kw_only=True)
class KernelizedOptions(Options):
    """Options of exact Kernelized Attention.

    Args:
        kernel, memory_budget: see `kernelized_attention`.
    """

    kernel: str | Kernel = "gaussian"
    memory_budget: int = MEMORY_BUDGET

    def __post_init__(self) -> None:
        super().__post_init__()
        get_kernel(self.kernel)
        check_memory_budget(self.memory_budget)


@dataclass(frozen=True, kw_only=True)
class SkyformerOptions(KernelizedOptions):
    """Options of Skyformer.

    Args:
        num_landmarks, gamma, solver: see `skyformer_attention`.
        landmarks: likewise; by default "stratified", or "queries" for the softmax kernel.
        seed: the seed of the landmarks in `eval()`, combined with the layer's number.
    """

    num_landmarks: int = 128
    landmarks: str | Sampler | CustomSampler | None = None
    gamma: float = GAMMA
    solver: str | Solver = "cholesky"
    seed: int = 0
    sampler: Sampler | CustomSampler = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("num_landmarks", self.num_landmarks, 1)
        check_positive("gamma", self.gamma)
        check_at_least("seed", self.seed, 0, most=2**62)
        get_solver(self.solver)
        object.__setattr__(self, "sampler", self._sampler())

    def _sampler(self) -> Sampler | CustomSampler:
        landmarks = self.landmarks
        if landmarks is None:
            landmarks = "queries" if isinstance(get_kernel(self.kernel), SoftmaxKernel) else "stratified"
        if isinstance(landmarks, str) and landmarks in _SAMPLERS_PER_HEAD:
            return _SAMPLERS_PER_HEAD[landmarks]
        return get_sampler(landmarks)


@dataclass(frozen=True, kw_only=True)
class ModuleOptions(Options):
    """Options of any other attention of `list_attentions()`.

    Args:
        attention: its name. settings: its own options.
    """

    attention: str
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            # The options are checked by building it, which costs nothing on the meta device.
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                built = build_attention(self.attention, 2, 8, **self.settings)
        except TypeError as refused:
            raise InputError(f"the options do not fit attention {self.attention!r}: {refused}") from refused
        learned = [name for name, _ in built.named_parameters()]
        if learned:
            raise UnsupportedError(
                f"attention {self.attention!r} has parameters to learn ({', '.join(learned)}), and a "
                "model of transformers has no place for them; train a Skyformer model with it: "
                f"SkyformerConfig(attention={self.attention!r})"
            )


_TYPES: Mapping[str, type[Options]] = {
    "tilted": TiltedOptions,
    "skyformer": SkyformerOptions,
    "kernelized": KernelizedOptions,
}


def read_options(attention: str, given: Mapping[str, Any]) -> Options:
    """The options of an attention, or an error that lists the known ones."""
    if attention in _TYPES:
        known = [option.name for option in fields(_TYPES[attention]) if option.init]
    else:
        not_here = (*_SET_BY_THE_MODEL, "max_length")
        known = ["local_layers", *(option for option in attention_options(attention) if option not in not_here)]
    for name in given:
        if name == "max_length" and attention not in _TYPES:
            raise InputError("max_length cannot be given: the inputs of the model decide how long they are")
        if name in _SET_BY_THE_MODEL:
            raise InputError(f"{name} comes from the model: {_SET_BY_THE_MODEL[name]}; remove it from register")
        if name not in known:
            raise UnknownNameError(f"option for attention {attention!r}:", name, ["attention", *known])
    if attention in _TYPES:
        return _TYPES[attention](**given)
    settings = {name: value for name, value in given.items() if name != "local_layers"}
    return ModuleOptions(
        attention=attention, settings=settings, local_layers=given.get("local_layers", Options.local_layers)
    )
