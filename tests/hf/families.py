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
"""How many tokens of the second example of a batch are no padding."""


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
    """How a small model is made, and what it is fed; `note` is for the table in the docs."""

    title: str
    model: str
    settings: dict[str, Any]
    inputs: Callable[[], Inputs]
    config: str = ""
    part: str = ""
    note: str = ""

    @property
    def has_padding(self) -> bool:
        return "attention_mask" in self.inputs()

    def build(self) -> PreTrainedModel:
        name = self.config or self.model.removesuffix("Model") + "Config"
        torch.manual_seed(0)
        model = getattr(transformers, self.model)(getattr(transformers, name)(**self.settings))
        if self.part:
            model = getattr(model, self.part)()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    # Library defaults are so small that all keys would weigh the same.
                    parameter.normal_(0, 0.2)
        return model.eval()


@cache
def model_of(family: Family) -> PreTrainedModel:
    """One model a family for all tests; each sets the implementation it wants."""
    return family.build()


def family(title: str, model: str, inputs: Callable[[], Inputs], settings: dict[str, Any], **more: str) -> Family:
    return Family(title, model, settings, inputs, **more)


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

FIVE = [
    family("BERT", "BertModel", tokens, BERT),
    family("RoBERTa", "RobertaModel", tokens, BERT),
    family(
        "DistilBERT",
        "DistilBertModel",
        tokens,
        {
            "vocab_size": 50,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": 80,
            "attention_dropout": 0.0,
            "dropout": 0.0,
        },
    ),
    family(
        "ModernBERT",
        "ModernBertModel",
        tokens,
        {**MODERN, "layer_types": ["full_attention"] * 2},
        note='global layers; the local ones with `local_layers="sdpa"`',
    ),
    family("ViT", "ViTModel", pixels, PICTURE),
]

ENCODERS = [
    *FIVE,
    family("ELECTRA", "ElectraModel", tokens, {**BERT, "embedding_size": 16}),
    family("ALBERT", "AlbertModel", tokens, {**BERT, "embedding_size": 16}),
    family("XLM-RoBERTa", "XLMRobertaModel", tokens, BERT),
    family("XLM-RoBERTa-XL", "XLMRobertaXLModel", tokens, BERT),
    family("CamemBERT", "CamembertModel", tokens, BERT),
    family("RoBERTa-PreLayerNorm", "RobertaPreLayerNormModel", tokens, BERT),
    family("Data2VecText", "Data2VecTextModel", tokens, BERT),
    family("ERNIE", "ErnieModel", tokens, BERT),
    family("X-MOD", "XmodModel", tokens, {**BERT, "languages": ["en_XX"], "default_language": "en_XX"}),
    family("ESM", "EsmModel", tokens, {**BERT, "pad_token_id": 1, "mask_token_id": 3}),
    family("NomicBERT", "NomicBertModel", tokens, BERT),
    family("GTE", "GteModel", tokens, BERT),
    family("Jina embeddings v3", "JinaEmbeddingsV3Model", tokens, BERT),
    family("EuroBERT", "EuroBertModel", tokens, {**TEXT, **IDS, "mask_token_id": 3}),
    family("LayoutLM", "LayoutLMModel", tokens, BERT),
    family("MarkupLM", "MarkupLMModel", tokens, BERT),
    family("Splinter", "SplinterModel", tokens, BERT),
    family("SigLIP, text", "SiglipTextModel", tokens, {**TEXT, **IDS}),
    family("SigLIP, vision", "SiglipVisionModel", pixels, PICTURE),
    family("CLIP, vision", "CLIPVisionModel", pixels, PICTURE),
    family("DeiT", "DeiTModel", pixels, PICTURE),
    family("BEiT", "BeitModel", pixels, PICTURE, note="without relative position bias, as by default"),
    family("DINOv2", "Dinov2Model", pixels, PICTURE),
    family("I-JEPA", "IJepaModel", pixels, PICTURE),
    family(
        "VideoMAE",
        "VideoMAEModel",
        noise("pixel_values", 2, 4, 3, 24, 24),
        {**PICTURE, "patch_size": 8, "num_frames": 4},
    ),
    family(
        "AST",
        "ASTModel",
        noise("input_values", 2, 64, 16),
        {**SIZES, "patch_size": 8, "max_length": 64, "num_mel_bins": 16},
    ),
    family("Wav2Vec2", "Wav2Vec2Model", wave, SPEECH),
    family("HuBERT", "HubertModel", wave, SPEECH),
    family(
        "Whisper, encoder",
        "WhisperModel",
        noise("input_features", 2, 8, 60),
        {**BOTH, **IDS, "num_mel_bins": 8, "max_source_positions": 30, "decoder_start_token_id": 1},
        part="get_encoder",
    ),
]
"""Families that every attention serves."""

CAUSAL = [
    family("CLIP, text", "CLIPTextModel", tokens, {**TEXT, **IDS}),
    family("BERT as a decoder", "BertModel", left_padded, {**BERT, "is_decoder": True}),
    family(
        "GPT-2",
        "GPT2Model",
        left_padded,
        {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 80},
    ),
    family("Llama", "LlamaModel", left_padded, {**TEXT, "num_key_value_heads": 2}),
    family("Qwen2", "Qwen2Model", left_padded, {**TEXT, "num_key_value_heads": 2}),
    family(
        "Mistral",
        "MistralModel",
        left_padded,
        {**TEXT, "num_key_value_heads": 2, "sliding_window": None},
        note="without a window",
    ),
    family(
        "OPT",
        "OPTModel",
        left_padded,
        {
            "vocab_size": 50,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 80,
        },
    ),
    family("BART", "BartModel", two_texts, {**BOTH, "max_position_embeddings": 80}),
    family(
        "Marian", "MarianModel", two_texts, {**BOTH, **IDS, "max_position_embeddings": 80, "decoder_start_token_id": 1}
    ),
]
"""Decoders, which only exact Kernelized Attention serves."""

STRANGERS = {
    "BigBird": "BigBirdModel",
    "BLOOM": "BloomModel",
    "CANINE": "CanineModel",
    "ConvBERT": "ConvBertModel",
    "DeBERTa": "DebertaModel",
    "DeBERTa-v2 and v3": "DebertaV2Model",
    "FlauBERT": "FlaubertModel",
    "Funnel": "FunnelModel",
    "I-BERT": "IBertModel",
    "LayoutLMv3": "LayoutLMv3Model",
    "LED": "LEDModel",
    "Longformer": "LongformerModel",
    "LUKE": "LukeModel",
    "Megatron-BERT": "MegatronBertModel",
    "MPNet": "MPNetModel",
    "MRA": "MraModel",
    "Nystromformer": "NystromformerModel",
    "Perceiver": "PerceiverModel",
    "Reformer": "ReformerModel",
    "RemBERT": "RemBertModel",
    "RoFormer": "RoFormerModel",
    "SqueezeBERT": "SqueezeBertModel",
    "Swin v2": "Swinv2Model",
    "TAPAS": "TapasModel",
    "WavLM": "WavLMModel",
    "XLM": "XLMModel",
    "XLNet": "XLNetModel",
    "YOSO": "YosoModel",
}
"""Models that attend by code of their own."""

BIASED = {
    "T5": "T5Model",
    "mT5": "MT5Model",
    "UMT5": "UMT5Model",
    "LongT5": "LongT5Model",
    "Switch Transformers": "SwitchTransformersModel",
    "UDOP": "UdopModel",
    "Pix2Struct": "Pix2StructTextModel",
}
"""Models that use the interface but add a bias to the scores, which has no place in a kernel."""
