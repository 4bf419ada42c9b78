"""The book's ViT in PyTorch: the same shapes, the same mathematics, for comparison."""

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """One encoder block: attention, then MLP, each added to what came in."""

    def __init__(self, config):
        super().__init__()
        D, F = config.embed, config.hidden
        self.norm1, self.norm2 = nn.LayerNorm(D, eps=1e-6), nn.LayerNorm(D, eps=1e-6)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.first, self.second = nn.Linear(D, F), nn.Linear(F, D)
        self.heads, self.rate = config.heads, config.dropout

    def forward(self, x_BTD):
        B, T, D = x_BTD.shape
        qkv = self.qkv(self.norm1(x_BTD)).view(B, T, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y_BHTK = functional.scaled_dot_product_attention(q, k, v)
        x_BTD = x_BTD + self.out(y_BHTK.transpose(1, 2).reshape(B, T, D))
        h_BTF = functional.gelu(self.first(self.norm2(x_BTD)), approximate="tanh")
        h_BTF = functional.dropout(h_BTF, self.rate, self.training)
        y_BTD = functional.dropout(self.second(h_BTF), self.rate, self.training)
        return x_BTD + y_BTD


class ViT(nn.Module):
    """A vision transformer: images (B, 32, 32, 3) to logits (B, C)."""

    def __init__(self, config):
        super().__init__()
        D, self.patch = config.embed, config.patch
        self.patches = nn.Linear(config.patch**2 * 3, D)
        self.class_token = nn.Parameter(torch.zeros(D))
        self.position = nn.Parameter(torch.rand(config.tokens, D) - 0.5)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm, self.head = nn.LayerNorm(D, eps=1e-6), nn.Linear(D, config.classes)

    def forward(self, images_BHWC):
        B, n, p = len(images_BHWC), images_BHWC.shape[1] // self.patch, self.patch
        x = images_BHWC.view(B, n, p, n, p, 3).transpose(2, 3).reshape(B, n * n, -1)
        x_BTD = torch.cat([self.class_token.expand(B, 1, -1), self.patches(x)], dim=1)
        x_BTD = self.blocks(x_BTD + self.position)
        return self.head(self.norm(x_BTD[:, 0]))
