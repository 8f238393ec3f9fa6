"""A pretrained BERT-like model with Skyformer inside: as it is, fine-tuned, and beyond 512 tokens.

    python examples/convert_minilm.py embeddings --model MODEL --text FILE
    python examples/convert_minilm.py finetune --model MODEL --imdb REVIEWS
    python examples/convert_minilm.py long --model MODEL --imdb REVIEWS

MODEL is a folder or a name on the hub (sentence-transformers/all-MiniLM-L6-v2), or `tiny`, a small random model to try
the script with. FILE is any long text, such as WikiText-2's. REVIEWS is IMDb's archive or its unpacked folder.

embeddings: how close mean-pooled embeddings with the approximated softmax come to the exact ones, by number of
    landmarks and sampler, without retraining.
finetune: the same few training steps on reviews with softmax, Kernelized Attention and Skyformer, and the accuracy
    they reach.
long: collections of reviews of 4,096 tokens, with positions stretched to that length; peak memory, each attention in a
    process of its own.

embeddings and finetune go on where they stopped. finetune and long take --time-only, for an idle machine: seconds of a
step, the attentions taking turns.
Figures go to results/huggingface. Needs skyformer[hf,lra].
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedModel
from transformers.utils import logging

import skyformer.hf
from skyformer.environment import describe_environment
from skyformer.landmarks import QuerySampler
from skyformer.lra import text as imdb
from skyformer.lra.tasks import Split

SAMPLERS = ("queries", "stratified", "uniform", "probe", "leverage", "segment_means")
SHARED = "queries, shared by the heads"
FINETUNED = ("softmax", "skyformer", "kernelized", "skyformer-softmax")
LONG = ("softmax, materialised", "softmax", "kernelized", "skyformer", "skyformer-softmax")
IMPLEMENTATIONS = {"softmax": "sdpa", "softmax, materialised": "eager"}
"""What transformers calls the attentions that it brings along."""


INPUTS = {"model": "MODEL", "text": "FILE", "imdb": "REVIEWS"}
"""What the recorded command calls the inputs, wherever they lie."""


Batch: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Tokens (B, n), mask (B, n), labels (B,)."""

Turns: TypeAlias = Mapping[str, Callable[[], object]]
"""What is to be timed, by name."""


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
    config = BertConfig(
        vocab_size=260,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        # The default is so small that all tokens would weigh the same.
        initializer_range=0.3,
        attention_probs_dropout_prob=0.0,
        attn_implementation=implementation,
    )
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
    inner, rest = length - 2, []
    rows: list[list[int]] = []
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
    parts = [examples for part, examples in imdb.read(path) if part == split]
    labels = torch.cat([torch.from_numpy(examples.labels) for examples in parts]).long()
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for label in (0, 1):
        rows = (labels == label).nonzero().squeeze(1)
        chosen.append(rows[torch.randperm(len(rows), generator=generator)[: count // 2]])
    order = torch.cat(chosen)
    order = order[torch.randperm(len(order), generator=generator)]
    reviews = [review for examples in parts for review in examples.tokens.rows()]
    texts = [bytes(reviews[row]).decode(errors="replace").replace("<br />", " ") for row in order.tolist()]
    return texts, labels[order]


def command(arguments: argparse.Namespace) -> str:
    """What was typed, with the names of the usage above in place of where the inputs lie on this machine."""
    inputs = {str(getattr(arguments, option, None)): name for option, name in INPUTS.items()}
    # Split at "=", for --model=FOLDER is as good as --model FOLDER.
    words = [part for word in sys.argv[1:] for part in (word.split("=", 1) if word.startswith("--") else [word])]
    written = [inputs.get(word, word) for word in words]
    if "--output" in written:
        place = written.index("--output")
        del written[place : place + 2]
    return shlex.join(["python", "examples/convert_minilm.py", *written])


def save(arguments: argparse.Namespace, name: str, results: object) -> None:
    """With all that is needed to read the figures, in one step."""
    record = {
        "command": command(arguments),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(describe_environment(arguments.threads)),
        "seed": arguments.seed,
        "results": results,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    partial = arguments.output / f".{name}.partial"
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(arguments.output / name)


def is_done(file: Path, settings: dict[str, Any]) -> bool:
    """Whether an earlier run left its figures; an error if they are of other settings."""
    if not file.exists():
        return False
    results = json.loads(file.read_text())["results"]
    for name, value in settings.items():
        if results[name] != value:
            raise SystemExit(f"{file} was made with {name} = {results[name]}, not {value}; delete it to make it anew")
    return True


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
    settings = {name: getattr(arguments, name) for name in ("passages", "length", "seed")}
    file = arguments.output / "embeddings.json"
    cases = json.loads(file.read_text())["results"]["cases"] if is_done(file, settings) else []
    done = [(case["kernel"], case["landmarks"], case["num_landmarks"]) for case in cases]
    lacking = [case for case in embedding_cases(arguments.landmarks) if case not in done]
    if lacking:
        tokenizer, text = load_tokenizer(arguments.model), arguments.text.read_text()
        tokens = passages(tokenizer, iter(text.splitlines()), arguments.length, arguments.passages)
        model = load_model(arguments.model, "softmax")
        exact = embed(model, tokens)
        apart = similarity_of_different(exact)
    for case in lacking:
        cases.append(approximated(arguments, model, tokens, exact, *case))
        save(arguments, "embeddings.json", {**settings, "between_different_passages": apart, "cases": cases})
    show_embeddings(json.loads(file.read_text())["results"], arguments.landmarks)


def similarity_of_different(exact: Tensor) -> float:
    return float((exact @ exact.mT)[~torch.eye(len(exact), dtype=torch.bool)].mean())


def approximated(
    arguments: argparse.Namespace,
    model: PreTrainedModel,
    tokens: Tensor,
    exact: Tensor,
    kernel: str,
    landmarks: str,
    count: int,
) -> dict[str, Any]:
    """How close the embeddings come with one kernel, sampler and number of landmarks."""
    sampler = QuerySampler() if landmarks == SHARED else landmarks
    skyformer.hf.register("tried", kernel=kernel, num_landmarks=count, landmarks=sampler, seed=arguments.seed)
    model.set_attn_implementation("tried")
    cosine = (embed(model, tokens) * exact).sum(-1)
    print(f"{kernel}, {landmarks}, d={count}: {float(cosine.mean()):.4f}", flush=True)
    return {
        "kernel": kernel,
        "landmarks": landmarks,
        "num_landmarks": count,
        "mean": float(cosine.mean()),
        "least": float(cosine.min()),
        "each": cosine.tolist(),
    }


def embedding_cases(counts: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    """Kernel, sampler and number of landmarks; the Gaussian kernel once, to show that it needs retraining."""
    for landmarks in (*SAMPLERS, SHARED):
        for count in counts:
            yield "softmax", landmarks, count
    yield "gaussian", "stratified", max(counts)


def show_embeddings(results: dict[str, Any], counts: Sequence[int]) -> None:
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for case in results["cases"]:
        row = rows.setdefault((case["kernel"], case["landmarks"]), {})
        row[case["num_landmarks"]] = f"{case['mean']:.4f} ({case['least']:.4f})"
    show(
        f"cosine similarity to the exact embeddings, mean (least): {results['passages']} passages of "
        f"{results['length']} tokens; different passages: {results['between_different_passages']:.2f}",
        ["kernel, landmarks", *(f"d={count}" for count in counts)],
        [[", ".join(name), *(row.get(d, "") for d in counts)] for name, row in rows.items()],
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


def batches(tokenizer: Tokenizer, texts: list[str], labels: Tensor, length: int, size: int) -> list[Batch]:
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


def review_batches(arguments: argparse.Namespace, split: Split, count: int) -> list[Batch]:
    texts, labels = read_reviews(arguments.imdb, split, count, arguments.seed)
    return batches(load_tokenizer(arguments.model), texts, labels, arguments.length, arguments.batch)


def finetune(arguments: argparse.Namespace) -> None:
    skyformer.hf.register()
    settings = {name: getattr(arguments, name) for name in ("steps", "batch", "length", "lr", "test_reviews", "seed")}
    lacking = [name for name in arguments.attention if not is_done(arguments.output / finetune_file(name), settings)]
    if lacking:
        data = review_batches(arguments, Split.TRAIN, arguments.steps * arguments.batch)
        test = review_batches(arguments, Split.TEST, arguments.test_reviews)
    for name in lacking:
        save(arguments, finetune_file(name), {**settings, **finetune_one(arguments, name, data, test)})
    show_finetune(arguments)


def finetune_file(attention: str) -> str:
    return f"finetune-{attention}.json"


class Trainer:
    """A classifier on top of the model, with AdamW and a learning rate that rises and falls."""

    def __init__(self, arguments: argparse.Namespace, attention: str) -> None:
        encoder = load_model(arguments.model, attention)
        torch.manual_seed(arguments.seed)
        self.model = Classifier(encoder).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=arguments.lr, weight_decay=0.01)
        steps, warm = arguments.steps, max(1, arguments.steps // 10)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
        )

    def step(self, batch: Batch) -> float:
        """The loss before the step."""
        tokens, mask, labels = batch
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(tokens, mask), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


def finetune_one(arguments: argparse.Namespace, attention: str, data: list[Batch], test: list[Batch]) -> dict[str, Any]:
    trainer = Trainer(arguments, attention)
    losses: list[float] = []
    for number, batch in enumerate(data):
        losses.append(trainer.step(batch))
        if number % 10 == 0:
            print(f"{attention}: step {number}, loss {losses[-1]:.3f}", flush=True)
    reached = accuracy(trainer.model, test)
    return {
        "attention": attention,
        "accuracy": reached,
        "standard_error": (reached * (1 - reached) / arguments.test_reviews) ** 0.5,
        "losses": losses,
    }


@torch.no_grad()
def accuracy(model: nn.Module, data: list[Batch]) -> float:
    model.eval()
    right = sum(int((model(tokens, mask).argmax(-1) == labels).sum()) for tokens, mask, labels in data)
    return right / sum(len(labels) for *_, labels in data)


def show_finetune(arguments: argparse.Namespace) -> None:
    rows = []
    for name in arguments.attention:
        done = json.loads((arguments.output / finetune_file(name)).read_text())["results"]
        reached = f"{100 * done['accuracy']:.1f} ± {100 * done['standard_error']:.1f} %"
        rows.append([name, reached, f"{statistics.mean(done['losses'][-10:]):.3f}"])
    show(
        f"fine-tuned: {arguments.steps} steps of {arguments.batch} reviews of at most {arguments.length} tokens",
        ["attention", "test accuracy", "mean of the last losses"],
        rows,
    )


def time_finetune(arguments: argparse.Namespace) -> None:
    """Training steps on the same batch, the attentions taking turns."""
    skyformer.hf.register()
    batch, *_ = review_batches(arguments, Split.TRAIN, arguments.batch)
    trainers = {name: Trainer(arguments, name) for name in arguments.attention}
    turns = {name: partial(trainer.step, batch) for name, trainer in trainers.items()}
    sizes = {"batch": arguments.batch, "length": batch[0].shape[1]}
    taken = time_in_turns(turns, turns, arguments.repeats)
    save(arguments, "finetune-times.json", {**sizes, "seconds": taken})
    rows = [[name, f"{statistics.median(seconds):.2f} s"] for name, seconds in taken.items()]
    show(f"a training step on {sizes['batch']} x {sizes['length']} tokens", ["attention", "median"], rows)


def time_in_turns(warm_up: Turns, turns: Turns, repeats: int) -> dict[str, list[float]]:
    """Seconds of each; one process and in turns, so that all meet the same machine."""
    for run in warm_up.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(repeats):
        for name, run in turns.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    return taken


def long(arguments: argparse.Namespace) -> None:
    """Each attention in a process of its own, for memory once taken is not given back."""
    results = [in_fresh_process(name, training) for name in arguments.attention for training in (False, True)]
    compare_with_softmax(results)
    sizes = {name: getattr(arguments, name) for name in ("collections", "length", "limit_gb")}
    save(arguments, "long.json", {**sizes, "runs": results})
    show_long(results, arguments)


def in_fresh_process(attention: str, training: bool) -> dict[str, Any]:
    """The figures of `long_one`, or that there was too little memory."""
    typed = [sys.executable, __file__, *sys.argv[1:], "--one", attention, *(["--training"] if training else [])]
    done = subprocess.run(typed, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        figures: dict[str, Any] = json.loads(last_line(done.stdout))
        return figures
    reason = last_line(done.stderr)
    if "memory" not in reason.lower():
        raise SystemExit(f"{attention} failed: {reason or f'exit code {done.returncode}'}")
    return {"attention": attention, "training": training, "failed": reason}


def compare_with_softmax(results: list[dict[str, Any]]) -> None:
    """The embeddings give way to how close they are to those of softmax attention."""
    found = [run.pop("embeddings", None) for run in results]
    exact = next((e for e, run in zip(found, results, strict=True) if e and run["attention"] == "softmax"), None)
    for embedded, run in zip(found, results, strict=True):
        if embedded and exact:
            run["cosine_to_softmax"] = cosine(embedded, exact)


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def long_inputs(arguments: argparse.Namespace, collections: int) -> Tensor:
    """Reviews joined end to end, (collections, length)."""
    texts, _ = read_reviews(arguments.imdb, Split.TEST, arguments.reviews, arguments.seed)
    return passages(load_tokenizer(arguments.model), iter(texts), arguments.length, collections)


def long_model(arguments: argparse.Namespace, attention: str) -> PreTrainedModel:
    return skyformer.hf.extend_positions(load_model(arguments.model, attention), arguments.length)


def long_one(arguments: argparse.Namespace) -> None:
    """One attention, forward or forward and backward, on every collection; prints its figures as JSON."""
    skyformer.hf.register()
    tokens = long_inputs(arguments, arguments.collections)
    model = long_model(arguments, arguments.one)
    run = train_on if arguments.training else embed
    # Libraries and thread pools are loaded before the measurement begins.
    run(model, tokens[:1, :256])
    model.zero_grad(set_to_none=True)
    before = peak_bytes()
    limit_memory(arguments.limit_gb)
    outputs = [run(model, collection) for collection in tokens.split(1)]
    figures = {
        "attention": arguments.one,
        "training": arguments.training,
        "added_bytes": peak_bytes() - before,
        "embeddings": [] if arguments.training else torch.cat(outputs).tolist(),
    }
    print(json.dumps(figures))


def time_long(arguments: argparse.Namespace) -> None:
    """Whatever fitted into memory, on one collection, in turns."""
    measured = arguments.output / "long.json"
    if not measured.exists():
        raise SystemExit(f"{measured} is missing, which says what fits into memory; first run long without --time-only")
    skyformer.hf.register()
    tokens = long_inputs(arguments, 1)
    model = long_model(arguments, "softmax")
    runs = json.loads(measured.read_text())["results"]["runs"]
    fitting = [run for run in runs if "failed" not in run and run["attention"] in arguments.attention]
    warm_up, turns = (long_turns(model, fitting, part) for part in (tokens[:, :256], tokens))
    taken = time_in_turns(warm_up, turns, arguments.repeats)
    save(arguments, "long-times.json", {"length": arguments.length, "seconds": taken})
    rows = [[name, f"{statistics.median(seconds):.2f} s"] for name, seconds in taken.items()]
    show(f"one collection of {arguments.length} tokens", ["attention", "median"], rows)


def long_turns(model: PreTrainedModel, runs: list[dict[str, Any]], tokens: Tensor) -> Turns:
    """By attention and kind of pass."""
    kinds = {False: ("forward", embed), True: ("training", train_on)}
    return {
        f"{run['attention']}, {kind}": partial(run_long, model, run["attention"], function, tokens)
        for run in runs
        for kind, function in [kinds[run["training"]]]
    }


def run_long(model: PreTrainedModel, attention: str, run: Callable[..., object], tokens: Tensor) -> None:
    model.set_attn_implementation(IMPLEMENTATIONS.get(attention, attention))
    model.eval().zero_grad(set_to_none=True)
    run(model, tokens)


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
    rows = []
    for name in arguments.attention:
        forward, training = (run for run in results if run["attention"] == name)
        close = f"{forward['cosine_to_softmax']:.3f}" if "cosine_to_softmax" in forward else ""
        rows.append([name, added(forward, arguments.limit_gb), added(training, arguments.limit_gb), close])
    show(
        f"{arguments.collections} collections of reviews of {arguments.length} tokens, one at a time",
        ["attention", "forward adds", "forward and backward add", "cosine to softmax"],
        rows,
    )


def added(figures: dict[str, Any], limit: float) -> str:
    if "failed" in figures:
        return f"over {limit:g} GB: {figures['failed'][:30]}"
    return f"{figures['added_bytes'] / 1e9:.2f} GB"


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
    for part, names, repeats in ((b, FINETUNED, 5), (c, LONG, 3)):
        part.add_argument("--imdb", type=Path, required=True, help="aclImdb, its archive or its folder")
        part.add_argument("--attention", nargs="+", choices=names, default=names)
        part.add_argument("--time-only", action="store_true", help="only seconds, of all attentions in turns")
        part.add_argument("--repeats", type=int, default=repeats, help="rounds of --time-only")
    for part, length in ((a, 512), (b, 128), (c, 4096)):
        part.add_argument("--length", type=int, default=length, help="tokens")
    b.add_argument("--steps", type=int, default=100)
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
    chosen_run(arguments)(arguments)


def chosen_run(arguments: argparse.Namespace) -> Callable[[argparse.Namespace], None]:
    if arguments.part == "embeddings":
        return embeddings
    if arguments.part == "finetune":
        return time_finetune if arguments.time_only else finetune
    if arguments.one:
        return long_one
    return time_long if arguments.time_only else long


if __name__ == "__main__":
    main()
