"""Imported once by the server that the processes are forked from: the first solve loads seconds of libraries."""

import torch

import skyformer

torch.set_num_threads(1)
with torch.no_grad():
    skyformer.skyformer_attention(*torch.zeros(3, 1, 1, 4, 2).unbind(), num_landmarks=2)
