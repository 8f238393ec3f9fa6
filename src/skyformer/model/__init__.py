"""The paper's classifier around any attention of the registry: embeddings, encoder, heads, and their storage."""

from skyformer.model.classifier import PairClassifier, SequenceClassifier
from skyformer.model.config import ModelConfig
from skyformer.model.encoder import SkyformerEncoder

__all__ = ["ModelConfig", "PairClassifier", "SequenceClassifier", "SkyformerEncoder"]
