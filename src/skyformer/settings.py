"""Typed settings and records: the base classes of every config and of every JSON file of a run.

Errors of pydantic become an `InputError` that names the setting as a user writes it, or a `DataError` that names the
file.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from skyformer.errors import DataError, InputError, MissingExtraError, UnknownNameError
from skyformer.files import read_json

try:
    from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
    from pydantic_core import ErrorDetails
except ImportError as missing:
    raise MissingExtraError("pydantic", "model") from missing


RECORD_FORMAT = 1
_LONGEST_SHOWN = 200
Accuracy = Annotated[float, Field(ge=0, le=1)]
AnyRecord = TypeVar("AnyRecord")


def as_tuple(values: Any) -> Any:
    """YAML and JSON have lists but no tuples."""
    return tuple(values) if isinstance(values, list) else values


class JsonRecord(BaseModel):
    """The content of a JSON file; a later version that changes the fields raises `format`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: int = RECORD_FORMAT


def read_json_record(file: Path, cls: type[AnyRecord]) -> AnyRecord:
    """The record in a JSON file; a `DataError` says what is wrong with the file."""
    content = read_json(file)
    check_format(file, content)
    try:
        return TypeAdapter(cls).validate_python(content)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{file} is damaged: {place}: {first['msg']}") from None


def check_format(file: Path, content: dict[str, Any]) -> None:
    """Refuse a file of a newer version, which may have fields that are unknown here."""
    version = content.get("format")
    if isinstance(version, int) and version > RECORD_FORMAT:
        raise DataError(
            f"{file} has format {version}, which was written by a newer version (this one reads formats up to "
            f"{RECORD_FORMAT}); upgrade skyformer to use it"
        )


class Settings(BaseModel):
    """Immutable settings; unknown names and values of the wrong type raise an `InputError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    section: ClassVar[str] = ""
    """The section of a run's config that contains them; errors put it before the name of a setting."""

    def __init__(self, /, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as invalid:
            raise _as_input_error(invalid, type(self), settings) from None

    @classmethod
    def unknown_setting(cls, name: str) -> InputError:
        """The error for a setting that does not exist; a subclass can give better advice."""
        prefix = f"{cls.section}." if cls.section else ""
        return unknown_setting(prefix + name, setting_names(cls, prefix))

    def replace(self, /, **changes: Any) -> Self:
        """A copy with some settings changed, checked again."""
        return type(self)(**{**dict(self), **changes})


def setting_names(cls: type[Settings], prefix: str = "") -> list[str]:
    """Every setting as it is written after `--set`: optim.lr, loop.steps, ..."""
    names = []
    for name, field in cls.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            names += setting_names(field.annotation, f"{prefix}{name}.")
        else:
            names.append(f"{prefix}{name}")
    return names


def unknown_setting(name: str, known: Sequence[str]) -> UnknownNameError:
    """The error for a name that is not one of `known`; it suggests a known one."""
    section, _, own = name.rpartition(".")
    inside = [other for other in known if other.startswith(f"{name}.")]
    siblings = [other for other in known if section and other.rpartition(".")[0] == section]
    sections = {other.partition(".")[0] for other in known}
    return UnknownNameError("setting", name, inside or siblings or sections, _suggestion(name, own, known))


def _suggestion(name: str, own: str, known: Sequence[str]) -> str | None:
    """The setting of the same last name, or else of a similar whole name, or else of a similar last name."""
    of_last_name = {other.rpartition(".")[2]: other for other in known}
    if own in of_last_name:
        return of_last_name[own]
    similar = difflib.get_close_matches(name, known, n=1)
    if similar:
        return similar[0]
    similar = difflib.get_close_matches(own, of_last_name, n=1)
    return of_last_name[similar[0]] if similar else None


def _as_input_error(invalid: ValidationError, cls: type[Settings], settings: Mapping[str, Any]) -> InputError:
    """Turn pydantic's errors into one sentence; an `InputError` that a validator raised is returned unchanged."""
    details = invalid.errors(include_url=False)
    own = details[0].get("ctx", {}).get("error")
    if isinstance(own, InputError):
        return own
    prefix = f"{cls.section}." if cls.section else ""
    # A misspelt name is reported twice, as unknown and as missing; the first says more.
    for detail in details:
        if detail["type"] == "extra_forbidden":
            return cls.unknown_setting(str(detail["loc"][0]))
    by_name: dict[str, list[ErrorDetails]] = {}
    for detail in details:
        by_name.setdefault(prefix + _name(detail, settings), []).append(detail)
    return InputError("; ".join(_sentence(name, errors) for name, errors in by_name.items()))


def _name(detail: ErrorDetails, settings: Mapping[str, Any]) -> str:
    # Where a setting may be of two types, pydantic appends the type; only a place in a list or a dict belongs to the
    # name.
    first, *inside = detail["loc"]
    given = settings.get(str(first))
    keys = given if isinstance(given, dict) else {}
    return ".".join([str(first), *(str(part) for part in inside if isinstance(part, int) or part in keys)])


def _sentence(name: str, details: Sequence[ErrorDetails]) -> str:
    """What is wrong with one setting; a setting that allows two types has one error for each."""
    if details[0]["type"] == "missing":
        return f"{name} is required"
    expectations = [detail["msg"].partition(" should ")[2] or detail["msg"] for detail in details]
    allowed = " or ".join(expectations).replace(" or be ", " or ")
    return f"{name} must {allowed}; got {_shortened(details[0]['input'])}"


def _shortened(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:
        return "a number with thousands of digits"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
