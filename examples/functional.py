"""Exact Kernelized Attention and Skyformer as functions, instead of F.scaled_dot_product_attention.

python examples/functional.py

The tokens are a random walk, in which neighbours are similar, so evenly spread landmarks are best here. On the heads of
trained models `probe` is best, see docs/reproduction.md.
"""

import torch
import torch.nn.functional as F

from skyformer import kernelized_attention, skyformer_attention
from skyformer.studies.benchmarks.inputs import make_tokens


def main() -> None:
    query, key, value = make_tokens("walk", (2, 4, 2048, 32), torch.Generator().manual_seed(0))
    lengths = torch.tensor([2048, 1500])
    key_mask = torch.arange(2048) < lengths[:, None]  # True = attend

    softmax = F.scaled_dot_product_attention(query, key, value)
    exact = kernelized_attention(query, key, value, key_mask=key_mask)
    print(f"softmax {tuple(softmax.shape)}, kernelized {tuple(exact.shape)}")

    for sampler in ("uniform", "stratified", "probe"):
        for d in (32, 128, 512):
            generator = torch.Generator().manual_seed(0)
            approximate = skyformer_attention(
                query, key, value, key_mask=key_mask, num_landmarks=d, landmarks=sampler, generator=generator
            )
            error = (approximate - exact)[:, :, :1500].norm() / exact[:, :, :1500].norm()
            print(f"{sampler:>10} landmarks, d = {d:3}: relative error {error:.4f}")


if __name__ == "__main__":
    main()
