"""What a study is: its options, the cells to measure, and the tables and figures made from the results.

A study of the paper, or a benchmark, is one file:

    @dataclass(frozen=True)
    class Options:
        seeds: tuple[int, ...] = option((0, 1, 2), small=(0,), help="Seeds, separated by commas.")

    @dataclass(frozen=True)
    class Cell: ...          what one measurement depends on: numbers and text only

    @dataclass(frozen=True)
    class Result: ...        what it gave: numbers, text, or dataclasses or tuples of these; None for NaN

    @register_study
    class MyStudy(Study[Options, Cell, Result]): ...

`skyformer study my_study` then has an option for each field. It measures cell by cell, saves each result in a JSON file
at once, resumes where it stopped, and draws tables and figures from that file alone.
"""

from __future__ import annotations

import abc
import math
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, TypeVar

from skyformer.errors import InputError, UnknownNameError
from skyformer.report.figures import Figure
from skyformer.report.tables import Table
from skyformer.studies.targets import Target

OptionsT = TypeVar("OptionsT")
CellT = TypeVar("CellT")
ResultT = TypeVar("ResultT")

NONE = "none"
"""How an option without a value, or with an empty list, is written."""

Fact = str | int | float | None


class Study(abc.ABC, Generic[OptionsT, CellT, ResultT]):
    """Subclasses name their three types in brackets, which are frozen dataclasses, and write the methods."""

    name: ClassVar[str]
    title: ClassVar[str]
    """One line for the list of studies, with the place in the paper."""
    options_type: ClassVar[type]
    cell_type: ClassVar[type]
    result_type: ClassVar[type]
    is_timing_study: ClassVar[bool] = False
    """Whether it measures time: then cells are never measured in parallel, and the machine is one of the facts."""
    keeps_other_cells: ClassVar[bool] = False
    """Whether a record may have cells that are not in the plan, such as runs that have been deleted since; facts that
    only one of the two has, such as the data of another task, then belong to its own cells."""
    no_cells: ClassVar[str] = "one of their lists is empty"
    """Why a plan may have no cells, for the error."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for base in vars(cls).get("__orig_bases__", ()):
            named = typing.get_args(base)
            if len(named) == 3 and not any(isinstance(each, TypeVar) for each in named):
                cls.options_type, cls.cell_type, cls.result_type = named

    def __init__(self, options: OptionsT) -> None:
        for each in option_fields(self.options_type):
            each.check(getattr(options, each.name))
        self.options = options

    def facts(self) -> Mapping[str, Fact]:
        """What all results depend on besides their cells: the model and the text, for example, with their hashes. A
        record with different facts is not continued."""
        return {}

    @abc.abstractmethod
    def cells(self) -> Sequence[CellT]:
        """The plan, in the order of measuring."""

    @abc.abstractmethod
    def measure(self, cell: CellT) -> ResultT:
        """Measure one cell; the result must not depend on what was measured before."""

    def refresh(self, cell: CellT, result: ResultT) -> ResultT:
        """A stored result, brought up to date with what the options name, such as another record; most studies leave it
        as it is."""
        return result

    @classmethod
    @abc.abstractmethod
    def tables(cls, results: Mapping[CellT, ResultT]) -> Sequence[Table]:
        """The tables of a complete or partial record."""

    @classmethod
    def figures(cls, results: Mapping[CellT, ResultT]) -> Sequence[Figure]:
        """The figures of a complete or partial record; the first is named "figure"."""
        return ()

    @classmethod
    def targets(cls, results: Mapping[CellT, ResultT]) -> Sequence[Target]:
        """The targets that the results are compared with, as far as they are measured."""
        return ()


StudyClass = type[Study[Any, Any, Any]]


def check_names(what: str, names: Sequence[str], known: Collection[str]) -> None:
    """Check that all names are known."""
    for name in names:
        if name not in known:
            raise UnknownNameError(what, name, known)


def option(
    default: Any,
    *,
    help: str,
    small: Any = MISSING,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    required: bool = False,
) -> Any:
    """A field of a study's options.

    Args:
        small: the default of the small version, if it differs.
        least, above, below: bounds of the number, or of each number of a list.
        required: whether a list must have at least one value.
    """
    declared = Option(help, default, default if small is MISSING else small, least, above, below, required)
    return field(default=default, metadata={"option": declared})


@dataclass(frozen=True)
class Option:
    """One option of a study as the command line sees it; see `option`. Its name and type are those of the field."""

    help_text: str
    default: Any
    small: Any
    least: float | None
    above: float | None
    below: float | None
    required: bool
    name: str = ""
    kind: type = str
    """The type of the value, or of its members."""
    many: bool = False
    optional: bool = False
    """Whether None is a value."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def read(self, text: str) -> Any:
        """The value of a user's text; an empty list is written as "none" or as nothing."""
        if self.many and text.strip() in ("", NONE):
            return ()
        if self.optional and text.strip() == NONE:
            return None
        parts = [part.strip() for part in text.split(",")] if self.many else [text]
        try:
            values = tuple(self.kind(part) for part in parts)
        except ValueError:
            wanted = {int: "a whole number", float: "a number"}[self.kind]
            form = f"{wanted}, or several separated by commas" if self.many else wanted
            raise InputError(f"{self.flag} must be {form}; got {text!r}") from None
        if self.kind is float and not all(map(math.isfinite, values)):
            raise InputError(f"{self.flag} must be finite; got {text!r}")
        return values if self.many else values[0]

    def check(self, value: Any) -> None:
        """Raise an error if the value is outside the option's limits; None is always inside."""
        values = value if self.many else [value]
        if self.required and not values:
            raise InputError(f"{self.flag} must have at least one value; got none")
        for each in values:
            if each is not None and not self._allows(each):
                bounds = {"at least": self.least, "above": self.above, "below": self.below}
                limits = " and ".join(f"{name} {bound:g}" for name, bound in bounds.items() if bound is not None)
                raise InputError(f"{self.flag} must be {limits}; got {each!r}")

    def _allows(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def help(self) -> str:
        shown, small = (_spell(value) for value in (self.default, self.small))
        defaults = f"default: {shown}" if shown == small else f"default: {shown}; with --small: {small}"
        return f"{self.help_text} ({defaults})"


def option_fields(options_type: type) -> list[Option]:
    """The options of a study."""
    hints = typing.get_type_hints(options_type)
    found = []
    for each in fields(options_type):
        members = [kind for kind in typing.get_args(hints[each.name]) if kind not in (types.NoneType, ...)]
        typed = {
            "kind": members[0] if members else hints[each.name],
            "many": typing.get_origin(hints[each.name]) is tuple,
            "optional": isinstance(hints[each.name], types.UnionType),
        }
        found.append(replace(each.metadata["option"], name=each.name, **typed))
    return found


def make_options(
    study: type[Study[OptionsT, CellT, ResultT]], small: bool, given: Mapping[str, str | bool]
) -> OptionsT:
    """The defaults of the small or the full version, replaced by what the user has given."""
    values = {}
    for each in option_fields(study.options_type):
        text = given.get(each.name)
        default = each.small if small else each.default
        values[each.name] = default if text is None else each.read(text) if isinstance(text, str) else text
    options: OptionsT = study.options_type(**values)
    return options


def _spell(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(str(each) for each in value) or NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NONE if value is None else str(value)
