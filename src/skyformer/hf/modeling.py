"""Skyformer models for Hugging Face: the encoder alone, and with heads for classes of texts and of tokens, for answers
in a text, and for masked tokens.

The annotations stay objects (no `from __future__ import annotations`), because transformers reads from the type of
`kwargs` whether a model can return attention weights.
"""

import abc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from skyformer.attention import Attention
from skyformer.checks import check_at_least, check_mask
from skyformer.errors import InputError, ShapeError, UnknownNameError
from skyformer.hf.card import write_card
from skyformer.hf.configuration import CONFIG_ATTENTION, SkyformerConfig
from skyformer.hf.encoder import SkyformerEmbeddings, SkyformerLayer, SkyformerSelfAttention, mlp
from skyformer.hf.positions import refuse_fixed_lengths
from skyformer.model.classifier import masked_mean
from skyformer.model.encoder import forked_random_stream

_ARGUMENTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "labels")


class Extras(TypedDict, total=False):
    """Other arguments of the library that have an effect here, or on the loss."""

    output_hidden_states: bool | None
    output_attentions: bool | None
    num_items_in_batch: Tensor | int | None


class SkyformerPreTrainedModel(PreTrainedModel):
    """What the Skyformer models share: their config, their initial weights, and the attentions they can run with."""

    config: SkyformerConfig
    config_class = SkyformerConfig
    base_model_prefix = "skyformer"
    supports_gradient_checkpointing = True
    _input_embed_layer = "word_embeddings"
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ["SkyformerEmbeddings", "SkyformerLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": SkyformerLayer, "attentions": SkyformerSelfAttention}  # noqa: RUF012

    def __init__(self, config: SkyformerConfig, *inputs: Any, **kwargs: Any) -> None:
        if isinstance(config, SkyformerConfig):
            config.validate()
        super().__init__(config, *inputs, **kwargs)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """The config's own attention unless another implementation is requested."""
        if requested_attention in (None, CONFIG_ATTENTION):
            return CONFIG_ATTENTION
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    def get_position_embeddings(self) -> nn.Embedding:
        embeddings: nn.Embedding = self.base_model.embeddings.position_embeddings  # type: ignore[assignment, union-attr]
        return embeddings

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Cut the positions, or append new ones with initial weights; `extend_positions` interpolates instead."""
        check_at_least("new_num_position_embeddings", new_num_position_embeddings, 1)
        refuse_fixed_lengths(self)
        old = self.get_position_embeddings()
        new = nn.Embedding(
            new_num_position_embeddings, old.embedding_dim, device=old.weight.device, dtype=old.weight.dtype
        )
        self._init_weights(new)
        kept = min(old.num_embeddings, new.num_embeddings)
        with torch.no_grad():
            new.weight[:kept] = old.weight[:kept]
        self.base_model.embeddings.position_embeddings = new.requires_grad_(old.weight.requires_grad)  # type: ignore[union-attr]
        self.config.max_position_embeddings = new_num_position_embeddings

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As in transformers, with a model card (README.md) unless the folder has one."""
        super().save_pretrained(save_directory, *args, **kwargs)
        write_card(self, Path(save_directory))

    def _upload_modified_files(self, working_dir: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        # The library replaces the card by an empty template just before it uploads the folder.
        write_card(self, Path(working_dir))
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Attention):
            # The library skips modules without parameters, so the generator is restored after every attention.
            with torch.random.fork_rng(devices=range(torch.cuda.device_count())), forked_random_stream():
                getattr(module, "reset_parameters", lambda: None)()


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

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Unpack[Extras],
    ) -> BaseModelOutputWithPooling:
        """input_ids int64 (B, n), or inputs_embeds (B, n, hidden_size), to last_hidden_state (B, n, hidden_size).

        attention_mask (B, n) is bool or 0 and 1, 1 = a real token; padding may be on either side, and the output at
        masked positions has no meaning. Positions count from the first real token unless position_ids are given.
        """
        self._check_extras(kwargs)
        shape = _check_one_input(input_ids, inputs_embeds)
        mask = check_mask("attention_mask", attention_mask, *shape, floating=True)
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

    def _check_extras(self, extras: Mapping[str, object]) -> None:
        """Refuses unknown arguments, which the attentions of this package would ignore, such as a misspelt mask.

        Arguments that are None or False, such as `use_cache=False`, are accepted.
        """
        if self.config._attn_implementation != CONFIG_ATTENTION:
            return
        for extra, given in extras.items():
            if extra not in Extras.__annotations__ and given is not None and given is not False:
                raise UnknownNameError("argument of a Skyformer model:", extra, [*_ARGUMENTS, *Extras.__annotations__])


class SkyformerModelWithHead(SkyformerPreTrainedModel):
    """The encoder with a head. Subclasses write `logits_of` and `loss_of`."""

    output_type: ClassVar[type[SequenceClassifierOutput] | type[MaskedLMOutput] | type[TokenClassifierOutput]]
    skyformer: SkyformerModel

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[Extras],
    ) -> SequenceClassifierOutput | MaskedLMOutput | TokenClassifierOutput:
        """To the logits, and to the loss if there are labels; the other arguments are those of `SkyformerModel`."""
        outputs = self.skyformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.logits_of(outputs)
        loss: Any = None if labels is None else self.loss_of(logits, labels, **kwargs)
        return self.output_type(loss, logits, outputs.hidden_states, outputs.attentions)  # type: ignore[arg-type]

    @abc.abstractmethod
    def logits_of(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        """The scores that the head computes from the encoder's outputs."""

    @abc.abstractmethod
    def loss_of(self, logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        """The loss, a scalar."""


class SkyformerForSequenceClassification(SkyformerModelWithHead):
    """The encoder, the mean over the real tokens, and an MLP to logits (B, num_labels), as the paper's classifier.

    The labels decide the loss, as everywhere in transformers: regression for one label, classification for integer
    labels (B,), multi-label classification for float labels (B, num_labels); `problem_type` overrides this.
    """

    output_type = SequenceClassifierOutput
    accepts_loss_kwargs = False
    """The loss is the mean over the batch, so the Trainer must divide by the number of accumulation steps."""

    def __init__(self, config: SkyformerConfig) -> None:
        super().__init__(config)
        self.num_labels = int(config.num_labels or 0)
        self.skyformer = SkyformerModel(config)
        self.classifier = mlp(config, self.num_labels, config.head_activation)
        self.post_init()

    def logits_of(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        logits: Tensor = self.classifier(outputs.pooler_output)
        return logits

    def loss_of(self, logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        loss: Tensor = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return loss


class SkyformerForTokenClassification(SkyformerModelWithHead):
    """The encoder and logits (B, n, num_labels); the loss is the mean over tokens whose label (B, n) is not -100."""

    output_type = TokenClassifierOutput

    def __init__(self, config: SkyformerConfig) -> None:
        super().__init__(config)
        self.num_labels = int(config.num_labels or 0)
        self.skyformer = SkyformerModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def logits_of(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        logits: Tensor = self.classifier(outputs.last_hidden_state)
        return logits

    def loss_of(self, logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        loss: Tensor = self.loss_function(logits, labels, self.config, **kwargs)
        return loss


class SkyformerForQuestionAnswering(SkyformerPreTrainedModel):
    """The encoder and, for every token, logits (B, n) of being the first and the last token of the answer."""

    def __init__(self, config: SkyformerConfig) -> None:
        super().__init__(config)
        self.skyformer = SkyformerModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Unpack[Extras],
    ) -> QuestionAnsweringModelOutput:
        """To the logits, and to the loss if both positions (B,) are given; the rest is as in `SkyformerModel`."""
        outputs = self.skyformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        start, end = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss: Any = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(loss, start, end, outputs.hidden_states, outputs.attentions)


class SkyformerForMaskedLM(SkyformerModelWithHead):
    """The encoder and logits (B, n, vocab_size), scored with the word embeddings.

    The loss is the mean over the positions whose label (B, n) is not -100.
    """

    output_type = MaskedLMOutput
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

    def logits_of(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        logits: Tensor = self.decoder(self.transform(outputs.last_hidden_state))
        return logits

    def loss_of(self, logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        loss: Tensor = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return loss


def _check_one_input(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[int, int]:
    """(B, n) of the one that is given."""
    if (input_ids is None) == (inputs_embeds is None):
        raise InputError(f"give input_ids or inputs_embeds; got {'neither' if input_ids is None else 'both'}")
    given, name, rank = (input_ids, "input_ids", 2) if inputs_embeds is None else (inputs_embeds, "inputs_embeds", 3)
    if not isinstance(given, Tensor) or given.dim() != rank:
        raise ShapeError(f"{name} must be a tensor of {rank} dimensions, batch and tokens first; got {_kind(given)}")
    if rank == 2 and given.is_floating_point():
        raise ShapeError(f"input_ids must be a tensor (B, n) of integers; got {given.dtype}")
    return given.shape[0], given.shape[1]


def _kind(x: object) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def register_models() -> None:
    """Makes the models known to `AutoConfig` and the `AutoModel` classes; a second call has no effect."""
    AutoConfig.register(SkyformerConfig.model_type, SkyformerConfig, exist_ok=True)
    AutoModel.register(SkyformerConfig, SkyformerModel, exist_ok=True)
    AutoModelForSequenceClassification.register(SkyformerConfig, SkyformerForSequenceClassification, exist_ok=True)
    AutoModelForMaskedLM.register(SkyformerConfig, SkyformerForMaskedLM, exist_ok=True)
    AutoModelForTokenClassification.register(SkyformerConfig, SkyformerForTokenClassification, exist_ok=True)
    AutoModelForQuestionAnswering.register(SkyformerConfig, SkyformerForQuestionAnswering, exist_ok=True)
