"""A pretrained BERT-like model with Skyformer inside: as it is, fine-tuned, and beyond 512 tokens.

    python examples/convert_minilm.py embeddings --model MODEL --text FILE
    python examples/convert_minilm.py finetune --model MODEL --imdb REVIEWS
    python examples/convert_minilm.py long --model MODEL --imdb REVIEWS

MODEL is a folder or a name on the hub (sentence-transformers/all-MiniLM-L6-v2), or `tiny`, a small random model to try
the script with. FILE is any long text, such as WikiText-2's. REVIEWS is IMDb's archive or its unpacked folder.

embeddings: how close mean-pooled embeddings with the approximated softmax come to the exact ones, by number of
    landmarks and sampler, without retraining.
finetune: the same few training steps on reviews with softmax, Kernelized Attention and Skyformer; accuracy and time. It
    goes on where it stopped, attention by attention.
long: collections of reviews of 4,096 tokens, with positions stretched to that length; peak memory and time, each
    attention in a process of its own.

Figures go to results/huggingface. Needs skyformer[hf,lra].
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedModel
from transformers.utils import logging

import skyformer.hf
from skyformer.bench.measure import describe_machine
from skyformer.landmarks import QuerySampler
from skyformer.lra import text as imdb
from skyformer.lra.tasks import Split

SAMPLERS = ("queries", "stratified", "uniform", "probe", "leverage", "segment_means")
SHARED = "queries, shared by the heads"
FINETUNED = ("softmax", "kernelized", "skyformer", "skyformer-softmax")
LONG = ("softmax, materialised", "softmax", "kernelized", "skyformer", "skyformer-softmax")
IMPLEMENTATIONS = {"softmax": "sdpa", "softmax, materialised": "eager"}
"""What transformers calls the attentions that it brings along."""


class Tokenizer(Protocol):
    cls_token_id: int
    sep_token_id: int
    pad_token_id: int

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...


class Letters:
    """For the tiny model: a token a byte."""

    pad_token_id, cls_token_id, sep_token_id = 0, 1, 2

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [3 + byte for byte in text.encode()]


def load_tokenizer(name: str) -> Tokenizer:
    return Letters() if name == "tiny" else AutoTokenizer.from_pretrained(name)


def load_model(name: str, attention: str) -> PreTrainedModel:
    """In eval mode, and without attention dropout, which only some of the attentions could honour."""
    torch.manual_seed(0)
    implementation = IMPLEMENTATIONS.get(attention, attention)
    if name != "tiny":
        return AutoModel.from_pretrained(
            name, attn_implementation=implementation, attention_probs_dropout_prob=0.0
        ).eval()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(vocab_size=260, **sizes, attention_probs_dropout_prob=0.0, attn_implementation=implementation)
    return BertModel(config).eval()


def mean_pooled(model: PreTrainedModel, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B, n) to (B, E): the mean over the tokens that are no padding."""
    hidden = model(tokens, attention_mask=mask).last_hidden_state
    if mask is None:
        return hidden.mean(1)
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1)


def passages(tokenizer: Tokenizer, texts: Iterator[str], length: int, count: int) -> Tensor:
    """`count` rows of exactly `length` tokens, from texts joined end to end: (count, length)."""
    inner, rows, rest = length - 2, [], []
    for piece in texts:
        rest += tokenizer.encode(piece, add_special_tokens=False)
        while len(rest) >= inner and len(rows) < count:
            rows.append([tokenizer.cls_token_id, *rest[:inner], tokenizer.sep_token_id])
            rest = rest[inner:]
        if len(rows) == count:
            return torch.tensor(rows)
    raise SystemExit(f"the text is too short for {count} passages of {length} tokens; it gives {len(rows)}")


def read_reviews(path: Path, split: Split, count: int, seed: int) -> tuple[list[str], Tensor]:
    """`count` reviews, as many good as bad ones, in random order, with labels (count,)."""
    examples = imdb.read(path)[split]
    labels = torch.from_numpy(examples.labels).long()
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for label in (0, 1):
        rows = (labels == label).nonzero().squeeze(1)
        chosen.append(rows[torch.randperm(len(rows), generator=generator)[: count // 2]])
    order = torch.cat(chosen)
    order = order[torch.randperm(len(order), generator=generator)]
    rows = list(examples.tokens.rows())
    texts = [bytes(rows[row]).decode(errors="replace").replace("<br />", " ") for row in order.tolist()]
    return texts, labels[order]


def save(arguments: argparse.Namespace, name: str, results: object) -> None:
    """With all that is needed to read the figures, in one step."""
    record = {
        "command": "python examples/convert_minilm.py " + " ".join(sys.argv[1:]),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(arguments.threads),
        "seed": arguments.seed,
        "results": results,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    partial = arguments.output / f".{name}.partial"
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(arguments.output / name)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)


@torch.no_grad()
def embed(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Unit vectors (count, E), a few passages at a time."""
    return F.normalize(torch.cat([mean_pooled(model, batch) for batch in tokens.split(8)]), dim=-1)


def embeddings(arguments: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(arguments.model)
    text = arguments.text.read_text()
    tokens = passages(tokenizer, iter(text.splitlines()), arguments.length, arguments.passages)
    model = load_model(arguments.model, "softmax")
    exact = embed(model, tokens)
    results = []
    for kernel, landmarks, count in embedding_cases(arguments.landmarks):
        sampler = QuerySampler() if landmarks == SHARED else landmarks
        skyformer.hf.register("tried", kernel=kernel, num_landmarks=count, landmarks=sampler, seed=arguments.seed)
        model.set_attn_implementation("tried")
        cosine = (embed(model, tokens) * exact).sum(-1)
        print(f"{kernel}, {landmarks}, d={count}: {float(cosine.mean()):.4f}", flush=True)
        results.append(
            {
                "kernel": kernel,
                "landmarks": landmarks,
                "num_landmarks": count,
                "mean": float(cosine.mean()),
                "least": float(cosine.min()),
                "each": cosine.tolist(),
            }
        )
    similarity = exact @ exact.mT
    apart = float(similarity[~torch.eye(len(exact), dtype=torch.bool)].mean())
    save(arguments, "embeddings.json", {"between_different_passages": apart, "cases": results})
    show_embeddings(results, apart, arguments)


def embedding_cases(counts: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    """Kernel, sampler and number of landmarks; the Gaussian kernel once, to show that it needs retraining."""
    for landmarks in (*SAMPLERS, SHARED):
        for count in counts:
            yield "softmax", landmarks, count
    yield "gaussian", "stratified", max(counts)


def show_embeddings(results: list[dict[str, Any]], apart: float, arguments: argparse.Namespace) -> None:
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for case in results:
        row = rows.setdefault((case["kernel"], case["landmarks"]), {})
        row[case["num_landmarks"]] = f"{case['mean']:.4f} ({case['least']:.4f})"
    show(
        f"cosine similarity to the exact embeddings, mean (least): {arguments.passages} passages of "
        f"{arguments.length} tokens; different passages: {apart:.2f}",
        ["kernel, landmarks", *(f"d={count}" for count in arguments.landmarks)],
        [[", ".join(name), *(row.get(d, "") for d in arguments.landmarks)] for name, row in rows.items()],
    )


class Classifier(nn.Module):
    """The model, a mean over tokens, and a linear head."""

    def __init__(self, encoder: PreTrainedModel) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.head(mean_pooled(self.encoder, tokens, mask))
        return logits


def batches(tokenizer: Tokenizer, texts: list[str], labels: Tensor, length: int, size: int) -> list[tuple[Tensor, ...]]:
    """Tokens (B, n), mask (B, n) and labels (B,), cut at `length` and padded to the longest."""
    made = []
    for start in range(0, len(texts), size):
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts[start : start + size]]
        rows = [[tokenizer.cls_token_id, *row[: length - 2], tokenizer.sep_token_id] for row in ids]
        longest = max(len(row) for row in rows)
        padded = [row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows]
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        made.append((torch.tensor(padded), mask, labels[start : start + size]))
    return made


def finetune(arguments: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(arguments.model)
    lacking = [name for name in arguments.attention if not (arguments.output / finetune_file(name)).exists()]
    if lacking:
        sizes = {Split.TRAIN: arguments.steps * arguments.batch, Split.TEST: arguments.test_reviews}
        data = {
            split: batches(
                tokenizer,
                *read_reviews(arguments.imdb, split, count, arguments.seed),
                arguments.length,
                arguments.batch,
            )
            for split, count in sizes.items()
        }
    for name in lacking:
        skyformer.hf.register()
        save(arguments, finetune_file(name), finetune_one(arguments, name, data))
    show_finetune(arguments)


def finetune_file(attention: str) -> str:
    return f"finetune-{attention}.json"


def finetune_one(arguments: argparse.Namespace, attention: str, data: dict[Split, list[Any]]) -> dict[str, Any]:
    encoder = load_model(arguments.model, attention)
    torch.manual_seed(arguments.seed)
    model = Classifier(encoder)
    before = accuracy(model, data[Split.TEST][:1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01)
    warm = max(1, arguments.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (arguments.steps - step) / max(1, arguments.steps - warm))
    )
    losses, seconds = [], []
    model.train()
    for step, (tokens, mask, labels) in enumerate(data[Split.TRAIN]):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(tokens, mask), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        if step % 10 == 0:
            print(f"{attention}: step {step}, loss {losses[-1]:.3f}, {seconds[-1]:.1f} s", flush=True)
    start = time.perf_counter()
    reached = accuracy(model, data[Split.TEST])
    count = sum(len(labels) for *_, labels in data[Split.TEST])
    return {
        "attention": attention,
        "steps": arguments.steps,
        "batch": arguments.batch,
        "length": arguments.length,
        "lr": arguments.lr,
        "untrained_accuracy_of_one_batch": before,
        "accuracy": reached,
        "standard_error": (reached * (1 - reached) / count) ** 0.5,
        "test_reviews": count,
        "seconds_a_step": statistics.median(seconds),
        "seconds_of_training": sum(seconds),
        "seconds_of_test": time.perf_counter() - start,
        "losses": losses,
    }


@torch.no_grad()
def accuracy(model: nn.Module, data: list[Any]) -> float:
    was_training = model.training
    model.eval()
    right = sum(int((model(tokens, mask).argmax(-1) == labels).sum()) for tokens, mask, labels in data)
    model.train(was_training)
    return right / sum(len(labels) for *_, labels in data)


def show_finetune(arguments: argparse.Namespace) -> None:
    rows = []
    for name in arguments.attention:
        done = json.loads((arguments.output / finetune_file(name)).read_text())["results"]
        rows.append(
            [
                name,
                f"{100 * done['accuracy']:.1f} ± {100 * done['standard_error']:.1f} %",
                f"{statistics.mean(done['losses'][-10:]):.3f}",
                f"{done['seconds_a_step']:.2f} s",
                f"{done['seconds_of_training']:.0f} s",
            ]
        )
    show(
        f"fine-tuned: {arguments.steps} steps of {arguments.batch} reviews of at most {arguments.length} tokens",
        ["attention", "test accuracy", "last losses", "a step", "training"],
        rows,
    )


def long(arguments: argparse.Namespace) -> None:
    """Each attention in a process of its own, for memory once taken is not given back."""
    results = []
    for name in arguments.attention:
        for training in (False, True):
            command = [sys.executable, __file__, *sys.argv[1:], "--one", name, *(["--training"] if training else [])]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            failed = {"attention": name, "training": training, "failed": last_line(done.stderr)}
            results.append(json.loads(last_line(done.stdout)) if done.returncode == 0 else failed)
    save(arguments, "long.json", results)
    show_long(results, arguments)


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def long_one(arguments: argparse.Namespace) -> None:
    """One attention, forward or a training step, on every collection; prints its figures as JSON."""
    skyformer.hf.register()
    tokenizer = load_tokenizer(arguments.model)
    texts, _ = read_reviews(arguments.imdb, Split.TEST, arguments.reviews, arguments.seed)
    tokens = passages(tokenizer, iter(texts), arguments.length, arguments.collections)
    model = skyformer.hf.extend_positions(load_model(arguments.model, arguments.one), arguments.length)
    run = train_on if arguments.training else embed
    # Libraries and thread pools are loaded before the measurement begins.
    run(model, tokens[:1, :256])
    model.zero_grad(set_to_none=True)
    before = peak_bytes()
    limit_memory(arguments.limit_gb)
    seconds, outputs = [], []
    for collection in tokens.split(1):
        start = time.perf_counter()
        outputs.append(run(model, collection))
        seconds.append(time.perf_counter() - start)
    figures = {
        "attention": arguments.one,
        "training": arguments.training,
        "added_bytes": peak_bytes() - before,
        "seconds": statistics.median(seconds),
        "embeddings": [] if arguments.training else torch.cat(outputs).tolist(),
    }
    print(json.dumps(figures))


def train_on(model: PreTrainedModel, tokens: Tensor) -> None:
    model.train()
    mean_pooled(model, tokens).square().sum().backward()


def peak_bytes() -> int:
    """The most this process has held so far; macOS counts in bytes, Linux in KiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def limit_memory(gigabytes: float) -> None:
    """Let this process take so much more and then fail, rather than bring down the machine; Linux only."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        held = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + int(gigabytes * 1e9), resource.RLIM_INFINITY))


def show_long(results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    exact = next((r["embeddings"] for r in results if r["attention"] == "softmax" and r.get("embeddings")), None)
    rows = []
    for name in arguments.attention:
        forward, training = (r for r in results if r["attention"] == name)
        close = "" if exact is None or not forward.get("embeddings") else f"{cosine(forward['embeddings'], exact):.3f}"
        rows.append([name, *cells(forward, arguments.limit_gb), *cells(training, arguments.limit_gb), close])
    show(
        f"{arguments.collections} collections of reviews of {arguments.length} tokens, one at a time",
        ["attention", "forward adds", "takes", "training step adds", "takes", "cosine to softmax"],
        rows,
    )


def cells(figures: dict[str, Any], limit: float) -> tuple[str, str]:
    if "failed" in figures:
        return f"over {limit:g} GB", figures["failed"][:20]
    return f"{figures['added_bytes'] / 1e9:.2f} GB", f"{figures['seconds']:.2f} s"


def cosine(left: list[list[float]], right: list[list[float]]) -> float:
    return float((torch.tensor(left) * torch.tensor(right)).sum(-1).mean())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    a, b, c = (parts.add_parser(name) for name in ("embeddings", "finetune", "long"))
    for part in (a, b, c):
        part.add_argument("--model", required=True, help="a folder, a name on the hub, or tiny")
        part.add_argument("--output", type=Path, default=Path("results/huggingface"))
        part.add_argument("--threads", type=int, default=2)
        part.add_argument("--seed", type=int, default=0)
    a.add_argument("--text", type=Path, required=True, help="a long text")
    a.add_argument("--passages", type=int, default=32)
    a.add_argument("--landmarks", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    for part, names in ((b, FINETUNED), (c, LONG)):
        part.add_argument("--imdb", type=Path, required=True, help="aclImdb, its archive or its folder")
        part.add_argument("--attention", nargs="+", choices=names, default=names)
    for part, length in ((a, 512), (b, 256), (c, 4096)):
        part.add_argument("--length", type=int, default=length, help="tokens")
    b.add_argument("--steps", type=int, default=80)
    b.add_argument("--batch", type=int, default=16)
    b.add_argument("--lr", type=float, default=2e-4)
    b.add_argument("--test-reviews", type=int, default=400)
    c.add_argument("--collections", type=int, default=4)
    c.add_argument("--reviews", type=int, default=400, help="as many as the collections are made of")
    c.add_argument("--limit-gb", type=float, default=4.0, help="memory that an attention may take at most")
    c.add_argument("--one", help=argparse.SUPPRESS)
    c.add_argument("--training", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    if arguments.part == "long":
        (long_one if arguments.one else long)(arguments)
    else:
        {"embeddings": embeddings, "finetune": finetune}[arguments.part](arguments)


if __name__ == "__main__":
    main()
