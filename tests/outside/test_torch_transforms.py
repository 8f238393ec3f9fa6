"""Every transform of torch with every attention; `python -m tests.outside.torch_transforms` writes the table."""

from __future__ import annotations

import pytest
from torch import Tensor

from skyformer.attention import list_attentions
from tests.outside.torch_transforms import (
    CHECKS,
    build,
    check_export,
    check_strict_export,
    key_mask,
)

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


@pytest.mark.parametrize("mask", [None, key_mask()], ids=["full", "masked"])
@pytest.mark.parametrize("name", list_attentions())
@pytest.mark.parametrize("title", CHECKS)
def test_transform(title: str, name: str, mask: Tensor | None) -> None:
    if name == "tilted" and CHECKS[title] in (check_export, check_strict_export):
        with pytest.raises(Exception, match="tilted attention must have a fixed length"):
            CHECKS[title](build(name), mask)
        return
    CHECKS[title](build(name), mask)
