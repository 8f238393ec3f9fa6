"""Skyformer models for Hugging Face: the encoder, and with heads for classification and for masked tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling, MaskedLMOutput, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from skyformer.attention import Attention
from skyformer.errors import InputError, MaskError, ShapeError, UnknownNameError
from skyformer.hf.configuration import CONFIG_ATTENTION, SkyformerConfig, check_weights_exist
from skyformer.hf.encoder import SkyformerEmbeddings, SkyformerLayer, SkyformerSelfAttention, mlp
from skyformer.model.classifier import masked_mean
from skyformer.model.encoder import random_numbers_of_its_own

_ARGUMENTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "labels")
_EXTRAS = ("output_hidden_states", "output_attentions", "num_items_in_batch")
"""Of what the library may pass besides, that which has a meaning here, or is for the loss."""


class SkyformerPreTrainedModel(PreTrainedModel):
    """What the Skyformer models share: their config, their first weights, and which attentions they can run with."""

    config: SkyformerConfig
    config_class = SkyformerConfig
    base_model_prefix = "skyformer"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ["SkyformerEmbeddings", "SkyformerLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": SkyformerLayer, "attentions": SkyformerSelfAttention}  # noqa: RUF012

    def __init__(self, config: SkyformerConfig, *inputs: Any, **kwargs: Any) -> None:
        if isinstance(config, SkyformerConfig):
            config.validate()
        super().__init__(config, *inputs, **kwargs)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """The config's own attention unless another implementation is asked for."""
        if requested_attention in (None, CONFIG_ATTENTION):
            return CONFIG_ATTENTION
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Attention):
            # Forked as well, for the library skips modules that have nothing to draw.
            with torch.random.fork_rng(devices=range(torch.cuda.device_count())), random_numbers_of_its_own():
                getattr(module, "reset_parameters", _nothing_to_reset)()


class SkyformerModel(SkyformerPreTrainedModel):
    """Embeddings, pre-norm layers around the attention that the config names, and a final norm.

    Args:
        config: a `SkyformerConfig`. add_pooling_layer: also return the mean over the real tokens as `pooler_output`.
    """

    def __init__(self, config: SkyformerConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.add_pooling_layer = add_pooling_layer
        self.embeddings = SkyformerEmbeddings(config)
        self.layers = nn.ModuleList(SkyformerLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.word_embeddings = value  # type: ignore[assignment]

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """input_ids int64 (B, n), or inputs_embeds (B, n, hidden_size), to last_hidden_state (B, n, hidden_size).

        attention_mask (B, n) is bool or 0 and 1, 1 = a real token; padding may be on either side, and what comes out at
        masked positions has no meaning. Positions count from the first real token unless position_ids are given.
        """
        self._check_extras(kwargs)
        shape = _check_one_input(input_ids, inputs_embeds)
        mask = as_bool_mask(attention_mask, shape)
        x: Tensor = self.embeddings(input_ids, inputs_embeds, mask, position_ids, token_type_ids)
        for_attention = self._mask_for_attention(x, mask)
        for layer in self.layers:
            x = layer(x, for_attention, **kwargs)
        x = self.norm(x)
        pooled = masked_mean(x, mask) if self.add_pooling_layer else None
        return BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=pooled)  # type: ignore[arg-type]

    def _mask_for_attention(self, x: Tensor, mask: Tensor | None) -> Any:
        if self.config._attn_implementation == CONFIG_ATTENTION:
            return mask
        return create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=mask)

    def _check_extras(self, extras: dict[str, Any]) -> None:
        """Whatever else a call brings goes to the attention function, and those of the zoo make nothing of it: a
        misspelt mask would have no effect. What is off, `use_cache=False` say, may come."""
        name = self.config._attn_implementation
        check_weights_exist(extras.get("output_attentions", self.config.output_attentions), name)
        if name != CONFIG_ATTENTION:
            return
        for extra, given in extras.items():
            if extra not in _EXTRAS and given is not None and given is not False:
                raise UnknownNameError("argument of a Skyformer model:", extra, [*_ARGUMENTS, *_EXTRAS])


class SkyformerForSequenceClassification(SkyformerPreTrainedModel):
    """The mean over the real tokens of what the encoder makes of them, and an MLP, as the paper's classifier.

    Labels decide the loss, as everywhere in transformers: one label is a regression, several with integer labels (B,) a
    choice among them, several with float labels (B, num_labels) a decision about each; `problem_type` overrides.
    """

    accepts_loss_kwargs = False
    """The loss is the mean over the batch, so the Trainer is to divide by the steps it accumulates over."""

    def __init__(self, config: SkyformerConfig) -> None:
        super().__init__(config)
        self.num_labels = int(config.num_labels or 0)
        self.skyformer = SkyformerModel(config)
        self.classifier = mlp(config, self.num_labels)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """To logits (B, num_labels), and the loss when there are labels; the rest is as in `SkyformerModel`."""
        outputs = self.skyformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits: Tensor = self.classifier(outputs.pooler_output)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)  # type: ignore[arg-type]


class SkyformerForMaskedLM(SkyformerPreTrainedModel):
    """Scores for every token of the vocabulary at every position, with the word embeddings as the last weights."""

    _tied_weights_keys = {"decoder.weight": "skyformer.embeddings.word_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: SkyformerConfig) -> None:
        super().__init__(config)
        self.skyformer = SkyformerModel(config, add_pooling_layer=False)
        self.transform = nn.Sequential(
            nn.Linear(config.hidden_size, config.hidden_size),
            nn.GELU(),
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps),
        )
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.decoder = new_embeddings  # type: ignore[assignment]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """To logits (B, n, vocab_size), and the loss at positions whose label (B, n) is not -100."""
        outputs = self.skyformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits: Tensor = self.decoder(self.transform(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss, logits, outputs.hidden_states, outputs.attentions)  # type: ignore[arg-type]


def as_bool_mask(attention_mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """The mask (B, n) as bool, True = a real token."""
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != shape:
        came = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise MaskError(f"attention_mask must be a tensor of shape {shape}, 1 = a real token; got {came}")
    if attention_mask.dtype == torch.bool:
        return attention_mask
    # A look at the data makes other devices wait, and tracing has none to look at.
    if attention_mask.device.type == "cpu" and not torch.compiler.is_compiling():
        strange = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
        if strange.numel():
            raise MaskError(
                f"attention_mask must be bool, or 0 and 1, 1 = a real token; got {strange[0].item()}. Convert an "
                "additive mask (0 / -inf) with attention_mask == 0"
            )
    return attention_mask != 0


def _check_one_input(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[int, int]:
    """(B, n) of whichever is there."""
    if (input_ids is None) == (inputs_embeds is None):
        raise InputError(f"give input_ids or inputs_embeds; got {'neither' if input_ids is None else 'both'}")
    given, name, rank = (input_ids, "input_ids", 2) if inputs_embeds is None else (inputs_embeds, "inputs_embeds", 3)
    if not isinstance(given, Tensor) or given.dim() != rank:
        came = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ShapeError(f"{name} must be a tensor of {rank} dimensions, batch and tokens first; got {came}")
    return given.shape[0], given.shape[1]


def _nothing_to_reset() -> None:
    """For attentions without parameters and buffers."""


def register_models() -> None:
    """Makes the models known to `AutoConfig` and the `AutoModel` classes; a second time changes nothing."""
    AutoConfig.register(SkyformerConfig.model_type, SkyformerConfig, exist_ok=True)
    AutoModel.register(SkyformerConfig, SkyformerModel, exist_ok=True)
    AutoModelForSequenceClassification.register(SkyformerConfig, SkyformerForSequenceClassification, exist_ok=True)
    AutoModelForMaskedLM.register(SkyformerConfig, SkyformerForMaskedLM, exist_ok=True)
