"""A BERT of two layers with random weights and a tokenizer of a few words, as folders on the disk."""

from __future__ import annotations

from pathlib import Path

import torch

WORDS = ("the", "law", "of", "large", "numbers", "is", "a", "theorem", "about", "means", "##s", ".")


def write_tiny_bert(folder: Path, *, hidden_size: int = 16) -> Path:
    """A model of two layers and two heads, for up to 48 tokens."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    marks = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join([*marks, *WORDS]) + "\n")
    BertTokenizerFast(vocab=str(vocabulary)).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(marks) + len(WORDS),
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=48,
        initializer_range=0.8,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return folder


def write_text(file: Path, words: int) -> Path:
    """A text of so many words, which never repeat in the same order for long."""
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randint(len(WORDS) - 2, (words,), generator=generator)
    file.write_text(" ".join(WORDS[i] for i in chosen))
    return file
