"""Sequences over many devices: each rank of a `torch.distributed` group holds a contiguous piece of the sequence.

- `skyformer_attention`: what travels does not grow with the length of the sequence.
- `kernelized_attention`: keys and values travel once around a ring, and the parts are added.
- `parallelize`: the encoder and the classifiers over pieces.
- `piece_of`: this rank's piece of a tensor.

docs/distributed.md says what travels, and what was measured.
"""

from skyformer.distributed.collectives import Group, piece_of
from skyformer.distributed.model import parallelize
from skyformer.distributed.ring import kernelized_attention
from skyformer.distributed.skyformer import skyformer_attention

__all__ = ["Group", "kernelized_attention", "parallelize", "piece_of", "skyformer_attention"]
