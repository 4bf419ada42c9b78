"""The book's MiniGPT in PyTorch: the same shapes, the same mathematics, for comparison."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.torch_vit import Block


class DecoderBlock(Block):
    """One decoder block: attention, then MLP, each added to what came in and normalised."""

    def forward(self, x_BTD):
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y_BHTK = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y_BTD = self.out(y_BHTK.transpose(1, 2).reshape(B, T, D))
        drop = lambda x: functional.dropout(x, self.rate, self.training)
        x_BTD = self.norm1(x_BTD + drop(y_BTD))
        return self.norm2(x_BTD + drop(self.second(functional.relu(self.first(x_BTD)))))


class MiniGPT(nn.Module):
    """A small language model: tokens (B, T) to logits (B, T, V) of the next."""

    def __init__(self, config):
        super().__init__()
        T, D, V = config.tokens, config.embed, config.padded
        self.token, self.position = nn.Embedding(V, D), nn.Parameter(torch.randn(T, D) / D**0.5)
        self.blocks = nn.Sequential(*(DecoderBlock(config) for _ in range(config.layers)))
        self.head = nn.Linear(D, V)

    def forward(self, tokens_BT):
        return self.head(self.blocks(self.token(tokens_BT) + self.position))
