"""The base of all settings: typed, frozen, and with errors that name the setting as a user writes it."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Self

from skyformer.errors import InputError, MissingExtraError, UnknownNameError

try:
    from pydantic import BaseModel, ConfigDict, ValidationError
    from pydantic_core import ErrorDetails
except ImportError as missing:
    raise MissingExtraError("pydantic", "train") from missing


class Settings(BaseModel):
    """Settings that cannot change and have no others beside them; bad ones are an `InputError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    section: ClassVar[str] = ""
    """Where they stand in a run's config; errors put it before the name of a setting."""

    def __init__(self, /, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as invalid:
            raise _as_input_error(invalid, type(self)) from None

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


def _as_input_error(invalid: ValidationError, cls: type[Settings]) -> InputError:
    """pydantic's list of complaints as one sentence; an error of ours comes out as it went in."""
    details = invalid.errors(include_url=False)
    own = details[0].get("ctx", {}).get("error")
    if isinstance(own, InputError):
        return own
    prefix = f"{cls.section}." if cls.section else ""
    first = details[0]
    if first["type"] == "extra_forbidden":
        known = [prefix + name for name in cls.model_fields]
        hints = [name for name in setting_names(cls) if name.split(".")[-1] == first["loc"][-1]]
        return UnknownNameError("setting", f"{prefix}{first['loc'][-1]}", known, hints)
    return InputError("; ".join(_sentence(detail, prefix) for detail in details))


def _sentence(detail: ErrorDetails, prefix: str) -> str:
    # A setting of one type or another has one complaint for each type; the type is no part of its name.
    name = prefix + str(detail["loc"][0])
    if detail["type"] == "missing":
        return f"{name} is required"
    complaint = re.sub("^[Ii]nput should", f"{name} must", detail["msg"])
    return f"{complaint}; got {detail['input']!r}"
