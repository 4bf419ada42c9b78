"""The book's decoder in PyTorch: the same shapes, the same mathematics, the same parameters."""

import torch
from torch import nn
from torch.nn import functional

EPSILON = 1e-6  # of the norms
BETAS, DECAY = (0.9, 0.99), 0.05  # of AdamW, as `meshbook.training.recipe` has them


def rotations(tokens, size):
    """(cos, sin) of the angles by which positions turn pairs of numbers, (T, size / 2) each."""
    rates = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(tokens)[:, None] * rates
    return angles.cos(), angles.sin()


def rotate(x_BHTK, cos, sin):
    """x with numbers i and i + K/2 turned as a pair."""
    one, two = x_BHTK.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class Attention(nn.Module):
    """Causal attention of heads in groups, with rotary positions."""

    def __init__(self, config):
        super().__init__()
        D, K, bias = config.embed, config.head_size, config.bias
        self.size, groups = K, config.groups or config.heads
        self.query, self.kept = nn.Linear(D, D, bias), nn.Linear(D, 2 * groups * K, bias)
        self.out, self.shared = nn.Linear(D, D, bias), groups < config.heads

    def forward(self, x_BTD, cos, sin):
        B, T, _ = x_BTD.shape
        q = self.query(x_BTD).view(B, T, -1, self.size).transpose(1, 2)
        k, v = self.kept(x_BTD).view(B, T, 2, -1, self.size).permute(2, 0, 3, 1, 4)
        q, k = (rotate(x, cos, sin) for x in (q, k))
        y_BHTK = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.shared)
        return self.out(y_BHTK.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    """D to F to D; between them GELU, or SwiGLU."""

    def __init__(self, config):
        super().__init__()
        D, F, bias = config.embed, config.hidden, config.bias
        self.gated = config.gated
        self.first, self.second = nn.Linear(D, F * (1 + config.gated), bias), nn.Linear(F, D, bias)

    def forward(self, x_BTD):
        h = self.first(x_BTD)
        if not self.gated:
            return self.second(functional.gelu(h, approximate="tanh"))
        gate, h = h.chunk(2, -1)
        return self.second(functional.silu(gate) * h)


class Norm(nn.RMSNorm):
    """RMSNorm, with a shift if any."""

    def __init__(self, config):
        super().__init__(config.embed, eps=EPSILON)
        self.shift = nn.Parameter(torch.zeros(config.embed)) if config.bias else None

    def forward(self, x_BTD):
        y_BTD = super().forward(x_BTD)
        return y_BTD if self.shift is None else y_BTD + self.shift


class Layer(nn.Module):
    """Attention, then MLP, each of what was normalised, and added to what came in."""

    def __init__(self, config):
        super().__init__()
        self.norm1, self.norm2 = Norm(config), Norm(config)
        self.attention, self.mlp = Attention(config), FeedForward(config)

    def forward(self, x_BTD, cos, sin):
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD), cos, sin)
        return x_BTD + self.mlp(self.norm2(x_BTD))


class Decoder(nn.Module):
    """Tokens (B, T) to logits (B, T, V) of the next; V is the vocabulary, without padding.

    Of the book's kinds of attention it has plain and grouped; layers have positions, and nothing
    is dropped.
    """

    def __init__(self, config):
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.embed)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = Norm(config)
        cos, sin = rotations(config.tokens, config.head_size)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, tokens_BT):
        x_BTD = self.token(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, self.cos, self.sin)
        return functional.linear(self.norm(x_BTD), self.token.weight)


NAMES = {  # of the book's parameters of a layer: this module's, and how many dimensions go in
    "norm1/scale_D": ("norm1.weight", 0), "norm1/shift_D": ("norm1.shift", 0),
    "norm2/scale_D": ("norm2.weight", 0), "norm2/shift_D": ("norm2.shift", 0),
    "attention/w_query_DHK": ("attention.query.weight", 1),
    "attention/b_query_HK": ("attention.query.bias", 0),
    "attention/w_kept_DSGK": ("attention.kept.weight", 1),
    "attention/b_kept_SGK": ("attention.kept.bias", 0),
    "attention/w_out_HKD": ("attention.out.weight", 2),
    "attention/b_out_D": ("attention.out.bias", 0),
    "mlp/w_in_DSF": ("mlp.first.weight", 1), "mlp/b_in_SF": ("mlp.first.bias", 0),
    "mlp/w_out_FD": ("mlp.second.weight", 1), "mlp/b_out_D": ("mlp.second.bias", 0),
}


def copy_parameters(model, params):
    """Give a model the parameters of the book's decoder, nested dicts of NumPy arrays."""
    own, tensor = dict(model.named_parameters()), lambda x: torch.from_numpy(x.copy())
    left = set(own)

    def put(name, x):
        with torch.no_grad():
            own[name].copy_(tensor(x))
        left.remove(name)

    put("token.weight", params["token_VD"][:len(own["token.weight"])])
    for name, x in params["norm"].items():
        put(NAMES[f"norm1/{name}"][0].replace("norm1", "norm"), x)
    (stacked,) = params["layers"].values()
    for path, (name, inputs) in NAMES.items():
        part, leaf = path.split("/")
        for number, x in enumerate(stacked[part].get(leaf, ())):
            rows = x.size if not inputs else int(x[(...,) + (0,) * (x.ndim - inputs)].size)
            put(f"layers.{number}.{name}", x.reshape(rows, -1).T if inputs else x.ravel())
    if left:
        raise ValueError(f"not in the book's parameters: {', '.join(sorted(left))}")


def adamw(model, rate, fused=False):
    """AdamW with a rate that stays, by `recipe`'s numbers: matrices decay, and nothing else."""
    params = list(model.parameters())
    groups = [{"params": [x for x in params if x.ndim > 1], "weight_decay": DECAY},
              {"params": [x for x in params if x.ndim == 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, rate, BETAS, eps=1e-8, fused=fused)


def training_steps(config, params, inputs, labels, rate, compiled=False):
    """A function that runs one step after another on this batch: run(count) -> losses.

    params: those of the book's decoder; inputs and labels (B, T) are NumPy arrays.
    """
    model = Decoder(config)
    copy_parameters(model, params)
    optimizer = adamw(model, rate, fused=True)
    inputs, labels = (torch.from_numpy(x).long() for x in (inputs, labels))

    def loss_of(inputs, labels):
        return functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())

    forward = torch.compile(loss_of) if compiled else loss_of

    def run(count):
        losses = []
        for _ in range(count):
            optimizer.zero_grad()
            loss = forward(inputs, labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [loss.item() for loss in losses]

    return run
