"""transformers' own tests of models and configs on the Skyformer models.

tests/outside/test_transformers.py copies it, with borrowed.py, to another folder and runs it there in a process whose
package `tests` is that of transformers. SKYFORMER_ATTENTION names the attention of the config, and
SKYFORMER_IMPLEMENTATION, if it is set, the implementation that runs in its place.
"""

from __future__ import annotations

import os
import tempfile
import unittest
from typing import Any
from unittest import mock

from borrowed import folder, prepare

prepare(folder())

from transformers import PreTrainedModel  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

from skyformer.hf import (  # noqa: E402
    SkyformerConfig,
    SkyformerForMaskedLM,
    SkyformerForQuestionAnswering,
    SkyformerForSequenceClassification,
    SkyformerForTokenClassification,
    SkyformerModel,
)
from skyformer.hf.modeling import SkyformerPreTrainedModel  # noqa: E402
from tests.test_configuration_common import ConfigTester  # noqa: E402
from tests.test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask  # noqa: E402

# The tests look up by these names which labels a class takes; a model outside the library is not in the lists.
modeling_auto.MODEL_MAPPING_NAMES["skyformer"] = "SkyformerModel"
modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES["skyformer"] = "SkyformerForMaskedLM"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["skyformer"] = "SkyformerForSequenceClassification"
modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES["skyformer"] = "SkyformerForTokenClassification"
modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES["skyformer"] = "SkyformerForQuestionAnswering"
if not hasattr(SkyformerConfig, "has_no_defaults_at_init"):
    # An attribute of the version that the copied tests belong to.
    SkyformerConfig.has_no_defaults_at_init = False
# Some tests set the epsilon under every name that any model has for it; the package refuses names like its own.
SkyformerConfig._refuse_misnamed = lambda self, name: None


class SkyformerTester:
    """Small models and their inputs, as ModelTesterMixin expects them."""

    def __init__(self, parent: unittest.TestCase) -> None:
        self.parent = parent
        self.batch_size, self.seq_length, self.vocab_size = 3, 9, 99
        self.hidden_size, self.num_hidden_layers, self.num_attention_heads = 32, 2, 4
        self.is_training = True

    def get_config(self) -> SkyformerConfig:
        return SkyformerConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=37,
            max_position_embeddings=64,
            attention=os.environ.get("SKYFORMER_ATTENTION", "softmax"),
            type_vocab_size=2,
            pad_token_id=0,
            attn_implementation=os.environ.get("SKYFORMER_IMPLEMENTATION"),
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[SkyformerConfig, dict[str, Any]]:
        shape = [self.batch_size, self.seq_length]
        return self.get_config(), {
            "input_ids": ids_tensor(shape, self.vocab_size),
            "attention_mask": random_attention_mask(shape),
            "token_type_ids": ids_tensor(shape, 2),
        }


class SkyformerModelTest(ModelTesterMixin, unittest.TestCase):
    test_resize_position_embeddings = True
    all_model_classes = (
        SkyformerModel,
        SkyformerForMaskedLM,
        SkyformerForSequenceClassification,
        SkyformerForTokenClassification,
        SkyformerForQuestionAnswering,
    )

    def setUp(self) -> None:
        self.model_tester = SkyformerTester(self)
        self.config_tester = ConfigTester(self, config_class=SkyformerConfig, hidden_size=32)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    def test_sdpa_can_dispatch_non_composite_models(self) -> None:
        """The test expects "sdpa" as the default; here the attention of the config is."""
        default = PreTrainedModel.get_correct_attn_implementation
        with mock.patch.object(SkyformerPreTrainedModel, "get_correct_attn_implementation", default):
            super().test_sdpa_can_dispatch_non_composite_models()

    def test_can_init_all_missing_weights(self) -> None:
        """The test is only for files that say when they were written."""
        with tempfile.NamedTemporaryFile("w", suffix=".py") as dated:
            dated.write("# Copyright 2026")
            dated.flush()
            with mock.patch("inspect.getfile", return_value=dated.name):
                super().test_can_init_all_missing_weights()
