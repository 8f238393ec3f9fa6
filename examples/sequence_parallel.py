"""A sequence over several processes: attention that agrees with one process, a long sequence, and a model in training.

torchrun --nproc-per-node 2 examples/sequence_parallel.py [--tokens 1048576]

On GPUs, use init_process_group("cpu:gloo,cuda:nccl") and move the tensors. Without torchrun it runs as one process.
"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

import skyformer
from skyformer.distributed import parallelize, piece_of, skyformer_attention
from skyformer.processes import peak_bytes


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def compare() -> None:
    """Each rank computes its piece of the output, which one process computes as a whole."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 1000, 32).unbind()
    torch.manual_seed(1)
    whole = skyformer.skyformer_attention(query, key, value)
    torch.manual_seed(1)
    piece = skyformer_attention(*(piece_of(x, dim=2) for x in (query, key, value)))
    error = float((piece - piece_of(whole, dim=2)).abs().max())
    say(f"over {dist.get_world_size()} ranks, the output differs from that of one process by at most {error:.0e}")


def attend(tokens: int) -> None:
    """A long sequence, forward and backward; no process ever holds more than its piece."""
    length = tokens // dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    query, key, value = (torch.randn(1, 2, length, 32, generator=generator).requires_grad_() for _ in range(3))
    torch.manual_seed(0)  # the same landmarks on all ranks
    start = time.perf_counter()
    skyformer_attention(query, key, value, num_landmarks=128).square().mean().backward()
    seconds = time.perf_counter() - start
    memory = f"peak memory {peak_bytes() / 2**30:.1f} GiB per process"
    say(f"{tokens:,} tokens, forward and backward: {seconds:.1f} s, {memory}")


def train(steps: int = 3) -> None:
    """All ranks hold the same weights and labels; each gives the model its piece of the tokens."""
    torch.manual_seed(0)
    model = parallelize(skyformer.SequenceClassifier(vocab_size=256, max_length=1024))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, labels = torch.randint(256, (8, 1000)), torch.randint(2, (8,))
    for step in range(steps):
        loss = F.cross_entropy(model(piece_of(tokens)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(f"step {step + 1}: loss {loss.item():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**20)
    tokens = parser.parse_args().tokens
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        compare()
        attend(tokens)
        train()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
