"""Data of one's own: texts or pairs of texts with labels, from files, `datasets` or lists, prepared as the tasks are.

>>> from tempfile import TemporaryDirectory
>>> from skyformer.own import own_data
>>> texts = [f"{word} film number {n}" for n in range(20) for word in ("good", "bad")]
>>> folder = TemporaryDirectory()
>>> prepared = own_data((texts, ["pos", "neg"] * 20), name="films", data_dir=folder.name)
>>> prepared.manifest.variant.spec.label_names
('neg', 'pos')
>>> {str(split): record.examples for split, record in prepared.manifest.splits.items()}
{'train': 32, 'dev': 4, 'test': 4}
>>> folder.cleanup()

`load_preset(prepared)` in `skyformer.training` makes a config of it. Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyformer.own.preparation import own_data

__all__ = ["own_data"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from skyformer.own.preparation import own_data

    return own_data
