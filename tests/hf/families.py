"""Small models of many families with random weights, as they are run in the tests and listed in docs/huggingface.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

Inputs = dict[str, Tensor]
LENGTH = 40
SHORT = 28
"""The tokens of the second example of a batch that are not padding."""


def tokens() -> Inputs:
    """Two texts, the second padded."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, SHORT:] = 0
    return {"input_ids": torch.randint(5, 50, (2, LENGTH), generator=generator), "attention_mask": mask}


def left_padded() -> Inputs:
    inputs = tokens()
    return {**inputs, "attention_mask": inputs["attention_mask"].flip(1)}


def two_texts() -> Inputs:
    """For an encoder and a decoder."""
    inputs = tokens()
    return {**inputs, "decoder_input_ids": inputs["input_ids"][:, :13]}


def noise(name: str, *shape: int) -> Callable[[], Inputs]:
    return lambda: {name: torch.randn(shape, generator=torch.Generator().manual_seed(1))}


@dataclass(frozen=True, eq=False)
class Family:
    """How a small model is made, and its inputs. `name` is its class, or more if the class alone does not say it."""

    model: str
    inputs: Callable[[], Inputs]
    settings: dict[str, Any]
    part: str = ""
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.model

    @property
    def has_padding(self) -> bool:
        return "attention_mask" in self.inputs()

    def build(self) -> PreTrainedModel:
        config = getattr(transformers, self.model.removesuffix("Model") + "Config")
        torch.manual_seed(0)
        model = getattr(transformers, self.model)(config(**self.settings))
        if self.part:
            model = getattr(model, self.part)()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    # The library's defaults are so small that all keys would have the same weight.
                    parameter.normal_(0, 0.2)
        return model.eval()


@cache
def model_of(family: Family) -> PreTrainedModel:
    """One model per family for all tests; each test sets the implementation it needs."""
    return family.build()


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": 50, "max_position_embeddings": 80}
BERT: dict[str, Any] = {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODERN: dict[str, Any] = {**TEXT, **IDS, "cls_token_id": 1, "sep_token_id": 2}
SPEECH: dict[str, Any] = {
    **SIZES,
    "vocab_size": 20,
    "conv_dim": [16, 16],
    "conv_stride": [4, 4],
    "conv_kernel": [8, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}
PICTURE: dict[str, Any] = {**SIZES, "image_size": 24, "patch_size": 4}
BOTH: dict[str, Any] = {
    "vocab_size": 50,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
pixels = noise("pixel_values", 2, 3, 24, 24)
wave = noise("input_values", 2, 700)

DISTILBERT: dict[str, Any] = {
    "vocab_size": 50,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 80,
    "attention_dropout": 0.0,
    "dropout": 0.0,
}
GROUPED: dict[str, Any] = {**TEXT, "num_key_value_heads": 2}
T5: dict[str, Any] = {"vocab_size": 50, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}

BERT_FAMILY, VIT_FAMILY = Family("BertModel", tokens, BERT), Family("ViTModel", pixels, PICTURE)
MODERN_FAMILY = Family("ModernBertModel", tokens, {**MODERN, "layer_types": ["full_attention"] * 2})
LIKE_BERT = (
    "RobertaModel",
    "XLMRobertaModel",
    "XLMRobertaXLModel",
    "CamembertModel",
    "RobertaPreLayerNormModel",
    "Data2VecTextModel",
    "ErnieModel",
    "NomicBertModel",
    "GteModel",
    "JinaEmbeddingsV3Model",
    "LayoutLMModel",
    "MarkupLMModel",
    "SplinterModel",
)
LIKE_VIT = ("SiglipVisionModel", "CLIPVisionModel", "DeiTModel", "BeitModel", "Dinov2Model", "IJepaModel")
ENCODERS = [
    BERT_FAMILY,
    *(Family(name, tokens, BERT) for name in LIKE_BERT),
    Family("DistilBertModel", tokens, DISTILBERT),
    MODERN_FAMILY,
    Family("ElectraModel", tokens, {**BERT, "embedding_size": 16}),
    Family("AlbertModel", tokens, {**BERT, "embedding_size": 16}),
    Family("XmodModel", tokens, {**BERT, "languages": ["en_XX"], "default_language": "en_XX"}),
    Family("EsmModel", tokens, {**BERT, "pad_token_id": 1, "mask_token_id": 3}),
    Family("EuroBertModel", tokens, {**TEXT, **IDS, "mask_token_id": 3}),
    Family("SiglipTextModel", tokens, {**TEXT, **IDS}),
    VIT_FAMILY,
    *(Family(name, pixels, PICTURE) for name in LIKE_VIT),
    Family("VideoMAEModel", noise("pixel_values", 2, 4, 3, 24, 24), {**PICTURE, "patch_size": 8, "num_frames": 4}),
    Family(
        "ASTModel",
        noise("input_values", 2, 64, 16),
        {**SIZES, "patch_size": 8, "max_length": 64, "num_mel_bins": 16},
    ),
    Family("Wav2Vec2Model", wave, SPEECH),
    Family("HubertModel", wave, SPEECH),
    Family(
        "WhisperModel",
        noise("input_features", 2, 8, 60),
        {**BOTH, **IDS, "num_mel_bins": 8, "max_source_positions": 30, "decoder_start_token_id": 1},
        part="get_encoder",
        name="WhisperModel (encoder)",
    ),
]
"""Families that work with every attention."""

CAUSAL = [
    Family("CLIPTextModel", tokens, {**TEXT, **IDS}),
    Family("BertModel", left_padded, {**BERT, "is_decoder": True}, name="BertModel (is_decoder=True)"),
    Family("GPT2Model", left_padded, {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 80}),
    Family("LlamaModel", left_padded, GROUPED),
    Family("Qwen2Model", left_padded, GROUPED),
    Family("MistralModel", left_padded, {**GROUPED, "sliding_window": None}, name="MistralModel (sliding_window=None)"),
    Family("OPTModel", left_padded, {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    Family("BartModel", two_texts, {**BOTH, "max_position_embeddings": 80}),
    Family("MarianModel", two_texts, {**BOTH, **IDS, "max_position_embeddings": 80, "decoder_start_token_id": 1}),
]
"""Causal models, which work with exact Kernelized Attention only."""

BIASED = [
    *(Family(name, two_texts, T5) for name in ("T5Model", "MT5Model", "UMT5Model", "LongT5Model")),
    Family(
        "SwitchTransformersModel",
        two_texts,
        {**T5, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0, "num_experts": 2},
    ),
    Family("UdopModel", lambda: {**two_texts(), "bbox": torch.zeros(2, LENGTH, 4)}, T5),
    Family(
        "Pix2StructTextModel",
        tokens,
        {**T5, "hidden_size": 32, "initializer_range": 0.02},
    ),
]
"""Models that use the interface but add a bias to the scores, which no kernel has."""

OWN_ATTENTION = (
    "BigBirdModel",
    "BloomModel",
    "CanineModel",
    "ConvBertModel",
    "DebertaModel",
    "DebertaV2Model",
    "FlaubertModel",
    "FunnelModel",
    "IBertModel",
    "LayoutLMv3Model",
    "LEDModel",
    "LongformerModel",
    "LukeModel",
    "MegatronBertModel",
    "MPNetModel",
    "MraModel",
    "NystromformerModel",
    "PerceiverModel",
    "ReformerModel",
    "RemBertModel",
    "RoFormerModel",
    "SqueezeBertModel",
    "Swinv2Model",
    "TapasModel",
    "WavLMModel",
    "XLMModel",
    "XLNetModel",
    "YosoModel",
)
"""Models that compute attention with their own code instead of the interface."""
