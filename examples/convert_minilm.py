"""A pretrained model with Skyformer in place of softmax attention: how close its embeddings stay without retraining.

    python examples/convert_minilm.py --model sentence-transformers/all-MiniLM-L6-v2 --text FILE

MODEL is a BERT-like model: a folder, a name on the hub, or `tiny`, a small random model that needs no download. FILE is
any long text. The script embeds passages of it with the model's exact attention, then with approximations of it by
different landmarks, and prints the cosine similarity of the two.

`skyformer bench conversion` measures more: fine-tuning, long texts, memory and time. Needs skyformer[hf].
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich import print
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

import skyformer.hf
from skyformer.report.tables import Table, for_terminal

SAMPLERS = ("queries", "stratified", "uniform", "probe", "leverage")


def load(name: str, text: str) -> tuple[Any, list[int]]:
    """The model, and the tokens of the text."""
    if name != "tiny":
        tokens = AutoTokenizer.from_pretrained(name)(text, add_special_tokens=False, verbose=False)["input_ids"]
        return AutoModel.from_pretrained(name).eval(), tokens
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    # With the default initializer_range every token would have the same weight.
    return BertModel(BertConfig(vocab_size=256, initializer_range=0.3, **sizes)).eval(), list(text.encode())


@torch.no_grad()
def embed(model: Any, passages: Tensor) -> Tensor:
    """Mean-pooled embeddings (count, E) of length 1."""
    hidden = torch.cat([model(batch).last_hidden_state for batch in passages.split(8)])
    return F.normalize(hidden.mean(1), dim=-1)


def similarity(model: Any, passages: Tensor, exact: Tensor, sampler: str, num_landmarks: int) -> str:
    """Mean and lowest cosine similarity to the exact embeddings."""
    name = f"{sampler}-{num_landmarks}"
    skyformer.hf.register(name, kernel="softmax", landmarks=sampler, num_landmarks=num_landmarks)
    model.set_attn_implementation(name)
    cosines = (embed(model, passages) * exact).sum(-1).tolist()
    return f"{statistics.mean(cosines):.4f} ({min(cosines):.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2", help="folder, hub name, or tiny")
    parser.add_argument("--text", type=Path, required=True, help="a long text")
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="tokens of a passage")
    parser.add_argument("--landmarks", type=int, nargs="+", default=[64, 128, 256])
    options = parser.parse_args()

    model, tokens = load(options.model, options.text.read_text())
    size = options.passages * options.length
    if len(tokens) < size:
        parser.error(f"the text must have at least {size} tokens; it has {len(tokens)}")
    passages = torch.tensor(tokens[:size]).view(options.passages, options.length)
    exact = embed(model, passages)
    rows = [
        [sampler, *(similarity(model, passages, exact, sampler, count) for count in options.landmarks)]
        for sampler in SAMPLERS
    ]
    print("cosine similarity to the exact embeddings, mean (lowest):")
    print(for_terminal(Table("", ["landmarks", *(f"d = {count}" for count in options.landmarks)], rows)))


if __name__ == "__main__":
    main()
