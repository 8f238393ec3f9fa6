"""Attention over a million tokens, forward and backward, in the memory of a laptop.

python examples/million_tokens.py [--tokens 1048576]
"""

import argparse
import time

import torch

from skyformer import skyformer_attention
from skyformer.processes import peak_bytes
from skyformer.studies.benchmarks.inputs import make_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**20)
    tokens = parser.parse_args().tokens
    shape = (1, 2, tokens, 32)
    query, key, value = (x.requires_grad_() for x in make_tokens("walk", shape, torch.Generator().manual_seed(0)))

    start = time.perf_counter()
    out = skyformer_attention(query, key, value, num_landmarks=128)
    out.square().mean().backward()
    seconds = time.perf_counter() - start

    matrix = 2 * tokens**2 * 4 / 2**40
    print(f"{tokens:,} tokens, forward and backward: {seconds:.1f} s, peak memory {peak_bytes() / 2**30:.1f} GiB")
    print(f"the attention matrices alone would take {matrix:,.3f} TiB")


if __name__ == "__main__":
    main()
