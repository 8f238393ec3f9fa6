"""skyformer.MultiheadAttention instead of nn.MultiheadAttention: same weights and masks, another attention.

python examples/drop_in.py
"""

import torch
from torch import nn

from skyformer import MultiheadAttention, list_attentions


def main() -> None:
    torch.manual_seed(0)
    pretrained = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    tokens = torch.randn(2, 300, 64)
    padding = torch.zeros(2, 300, dtype=torch.bool)
    padding[1, 200:] = True  # True = ignore, as in torch

    same = MultiheadAttention(64, 4, batch_first=True, attention="softmax").eval()
    same.load_state_dict(pretrained.state_dict())
    expected, _ = pretrained(tokens, tokens, tokens, key_padding_mask=padding)
    actual, _ = same(tokens, tokens, tokens, key_padding_mask=padding)
    print(f"softmax differs from nn.MultiheadAttention by {(actual - expected).abs().max():.1e}")

    layer = nn.TransformerEncoderLayer(64, 4, dropout=0.0, batch_first=True)
    layer.self_attn = MultiheadAttention(64, 4, batch_first=True, attention="skyformer", num_landmarks=64)
    loss = layer(tokens, src_key_padding_mask=padding).square().mean()
    loss.backward()
    print(f"a transformer layer with skyformer attention: loss {loss:.3f}")
    print("attentions to choose from:", ", ".join(list_attentions()))


if __name__ == "__main__":
    main()
