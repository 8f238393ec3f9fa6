"""Skyformer as its authors wrote it, loaded from a clone of their repository that the user names.

Their code is no package: its modules are called `models` and `config` and must be found on the path. They are imported
once, without leaving these names, a longer path or compiled files behind.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skyformer.errors import InputError

MODULE = "models.attention_skyformer"
HEAD_DIM = 32
"""They divide by the fourth root of 32, whatever the head dimension is."""
GAMMA = 0.1

_FILE = Path("src", *MODULE.split(".")).with_suffix(".py")


class AuthorsSkyformer(nn.Module):
    """Their module as a function of q, k, v (B, H, n, 32)."""

    def __init__(self, clone: str, length: int, landmarks: int, device: str) -> None:
        super().__init__()
        settings = {
            "device": device,
            "max_seq_len": length,
            "head_dim": HEAD_DIM,
            "nb_features": landmarks,
            "sketched_kernel": "kernel_RS_RBF",
            "accumulation": 1,
            "sampling_factor": 4,
            "no_projection": False,
        }
        self.inner: Any = load_class(clone)(settings)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        no_padding = torch.ones(q.shape[0], q.shape[2], device=q.device)
        out: Tensor = self.inner(q, k, v, no_padding)
        return out

    @property
    def rows(self) -> Tensor:
        """The landmarks of the last call (B, d), as rows of [Q; K]."""
        drawn: Tensor = self.inner.sketching_matrix
        return drawn[:, 0]


@cache
def load_class(clone: str) -> type[nn.Module]:
    """Their class `Skyformer`; an error if the folder is not their repository."""
    wanted = f"--authors must be a clone of the authors' repository of Skyformer, with {_FILE} in it"
    if not (Path(clone) / _FILE).is_file():
        raise InputError(f"{wanted}; there is none in {clone!r}")
    try:
        with _found_in(Path(clone).resolve() / "src"):
            module: Any = importlib.import_module(MODULE)
            found: type[nn.Module] = module.Skyformer
    except (ImportError, AttributeError, SyntaxError) as error:
        raise InputError(f"{wanted}; that of {clone!r} could not be loaded: {error}") from error
    return found


@contextmanager
def _found_in(folder: Path) -> Iterator[None]:
    """Import from `folder` first, and put everything back at the end."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_theirs(name)}
    compiles = sys.dont_write_bytecode
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.dont_write_bytecode = compiles
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if _is_theirs(name)]:
            del sys.modules[name]
        sys.modules.update(ours)


def _is_theirs(name: str) -> bool:
    return name.partition(".")[0] in ("models", "config")
