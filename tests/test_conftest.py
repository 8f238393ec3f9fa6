"""Where AMX is advertised but kills the process, the tests exclude it by themselves and say so."""

from __future__ import annotations

import os

import pytest

from skyformer.processes import ISA_VARIABLE, ISA_WITHOUT_AMX
from tests import conftest


def test_amx_is_excluded_only_where_it_kills_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "")
    monkeypatch.delenv(ISA_VARIABLE)
    monkeypatch.setattr(conftest, "half_precision_crashes", lambda dtype: False)
    conftest.pytest_configure()
    assert ISA_VARIABLE not in os.environ
    assert conftest.pytest_report_header() is None

    monkeypatch.setattr(conftest, "half_precision_crashes", lambda dtype: True)
    conftest.pytest_configure()
    assert os.environ[ISA_VARIABLE] == ISA_WITHOUT_AMX
    assert f"{ISA_VARIABLE}={ISA_WITHOUT_AMX}" in (conftest.pytest_report_header() or "")
