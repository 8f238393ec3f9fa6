"""How long work tells of its progress, without knowing who listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told what begins and how much of it there is, then how much was done."""

    def begin(self, what: str, total: int | None) -> None: ...

    def advance(self, count: int) -> None: ...

    def note(self, message: str) -> None: ...


class Silent:
    """Nobody listens."""

    def begin(self, what: str, total: int | None) -> None: ...

    def advance(self, count: int) -> None: ...

    def note(self, message: str) -> None: ...
