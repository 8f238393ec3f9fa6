"""A study of squares, to test the frame that all studies share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from skyformer.errors import UnknownNameError
from skyformer.report.figures import Figure, Panel, Series
from skyformer.report.tables import Table, number
from skyformer.studies.base import Fact, Study, option
from skyformer.studies.targets import Target, at_most


@dataclass(frozen=True)
class Options:
    seeds: tuple[int, ...] = option((0, 1), small=(0,), help="Seeds, separated by commas.")
    power: float = option(2.0, help="The exponent.")
    note: str | None = option(None, help="A remark.")
    loud: bool = option(False, help="Print more.")


@dataclass(frozen=True)
class Cell:
    x: int
    seed: int


@dataclass(frozen=True)
class Part:
    name: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    y: float | None
    parts: tuple[float, ...] = ()
    named: tuple[Part, ...] = ()


class Squares(Study[Options, Cell, Result]):
    name = "squares"
    title = "Squares (Table 0)"
    fails_at: ClassVar[Cell | None] = None
    breaks_at: ClassVar[int] = 9
    measured: ClassVar[list[Cell]] = []

    def facts(self) -> Mapping[str, Fact]:
        return {"power": self.options.power}

    def cells(self) -> Sequence[Cell]:
        return [Cell(x, seed) for seed in self.options.seeds for x in (1, 2, 4)]

    def measure(self, cell: Cell) -> Result:
        if cell == self.fails_at:
            raise KeyboardInterrupt
        if cell.x * cell.seed == self.breaks_at:
            raise UnknownNameError("square", "x", ["y"])
        self.measured.append(cell)
        parts = (float(cell.x), 0.5)
        return Result(cell.x**self.options.power + cell.seed, parts, (Part("half", (cell.x / 2,)),))

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        rows = [[f"x_{cell.x} & 5%", f"**{number(result.y)}**"] for cell, result in results.items()]
        return [Table("Squares", ["x", "x^2"], rows, "A note.", [("", 1), ("power", 1)])]

    @classmethod
    def figures(cls, results: Mapping[Cell, Result]) -> Sequence[Figure]:
        x, y = [float(cell.x) for cell in results], [result.y for result in results.values()]
        line = Series("x^2", x, y, y, y)
        return [Figure("figure", "Squares", [Panel("all", "x", "y", [line], x_log=True, y_log=True)] * 2)]

    @classmethod
    def targets(cls, results: Mapping[Cell, Result]) -> Sequence[Target]:
        return [at_most(f"square of {cell.x}", result.y or 0, 20, "") for cell, result in results.items()]
