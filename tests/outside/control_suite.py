"""transformers' tests of its own BERT, to tell a fault of the Skyformer models from a copy of another version."""

from __future__ import annotations

from borrowed import folder, prepare

prepare(folder())

from tests.models.bert.test_modeling_bert import BertModelTest as ControlTest  # noqa: E402, F401
