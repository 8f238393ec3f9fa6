"""The paper's classifiers with any attention: embeddings, encoder, heads, and saving to a folder."""

from skyformer.errors import missing_extra

try:
    from skyformer.model.classifier import PairClassifier, SequenceClassifier
    from skyformer.model.config import ModelConfig
    from skyformer.model.encoder import SkyformerEncoder
except ModuleNotFoundError as error:
    raise missing_extra(error) or error from error

__all__ = ["ModelConfig", "PairClassifier", "SequenceClassifier", "SkyformerEncoder"]
