"""The sources' two models, written anew with their layers, initialisers and annotations.

Their layers, their order of operations and their labels: every kernel is split over "model" on its
second axis, every bias on its first. They say nothing of activations, so they are for Auto meshes,
where the compiler decides what is not said. Under `nnx.use_eager_sharding(False)` the labels are
notes without effect, as they were in Flax 0.10 and 0.11.

Flax 0.12 requires `nnx.List` for lists of blocks. What else is changed is our choice: labels by
axis names instead of a NamedSharding of a global mesh, so that the mesh can be chosen when a model
is built, and none on norms, whose two-entry specs do not fit their vectors; sizes as arguments
instead of globals; MiniGPT's dropout is given keys. The ViT has no positions, as in the source.

Sources: Alshammari 2025, "Parallel Vision Transformer using JAX Device Mesh"; the JAX AI stack's
"Train a miniGPT language model with JAX", June 2025.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Num

from meshbook.models.minigpt import MiniGPTConfig
from meshbook.models.vit import ViTConfig

XAVIER, ZEROS = nnx.initializers.xavier_uniform(), nnx.initializers.zeros_init()


def labelled(rngs: nnx.Rngs):
    """What a layer with a kernel and a bias is given, written once: labels, and keys."""
    return {"kernel_init": nnx.with_partitioning(XAVIER, (None, "model")),
            "bias_init": nnx.with_partitioning(ZEROS, ("model",)), "rngs": rngs}


# The ViT ------------------------------------------------------------------------------------------

class PublishedMLP(nnx.Module):
    """Linear, gelu, dropout, linear, dropout."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        self.fc1 = nnx.Linear(
            config.embed, config.hidden, dtype=config.dtype, rngs=rngs,
            kernel_init=nnx.with_partitioning(XAVIER, (None, "model")),
            bias_init=nnx.with_partitioning(ZEROS, ("model",)))
        self.fc2 = nnx.Linear(
            config.hidden, config.embed, dtype=config.dtype, rngs=rngs,
            kernel_init=nnx.with_partitioning(XAVIER, (None, "model")),
            bias_init=nnx.with_partitioning(ZEROS, ("model",)))
        self.dropout1 = nnx.Dropout(config.dropout, rngs=rngs)
        self.dropout2 = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]):
        x = self.dropout1(nnx.gelu(self.fc1(x)))
        return self.dropout2(self.fc2(x))


class PublishedEncoder(nnx.Module):
    """Attention and MLP, a norm ahead of each; the type of attention and norms is not said."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        D = config.embed
        self.norm1 = nnx.LayerNorm(D, epsilon=1e-6, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(config.heads, D, decode=False, **labelled(rngs))
        self.norm2 = nnx.LayerNorm(D, epsilon=1e-6, rngs=rngs)
        self.mlp = PublishedMLP(config, rngs)

    def __call__(self, x: Float[Array, "B T D"]):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PublishedViT(nnx.Module):
    """The source's vision transformer: images (B, 32, 32, 3) to logits (B, C).

    config: a ViTConfig. Dropout is on unless `eval()` was called. Raises ValueError under a mesh
    whose axis "model" does not divide the classes, heads and widths that carry its label.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        D, side, given = config.embed, (config.patch,) * 2, {"dtype": config.dtype} | labelled(rngs)
        self.conv_proj = nnx.Conv(3, D, side, side, padding="VALID", **given)
        self.cls_token = nnx.Param(jnp.zeros((1, 1, D)))
        self.encoder_blocks = nnx.List(
            [PublishedEncoder(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(D, epsilon=1e-6, rngs=rngs)
        self.head = nnx.Linear(D, config.classes, **given)
        self.dtype = config.dtype

    def __call__(self, x: Num[Array | np.ndarray, "B H W C"]):
        x = self.conv_proj(x.astype(self.dtype))
        x = jnp.reshape(x, (len(x), -1, x.shape[-1]))
        x = jnp.concatenate([jnp.tile(self.cls_token[...], (len(x), 1, 1)), x], axis=1)
        for block in self.encoder_blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


# MiniGPT ------------------------------------------------------------------------------------------

class PublishedBlock(nnx.Module):
    """Attention and feed-forward network, a norm behind each sum."""

    def __init__(self, config: MiniGPTConfig, rngs: nnx.Rngs):
        D, F, given = config.embed, config.hidden, {"dtype": config.dtype} | labelled(rngs)
        self.mha = nnx.MultiHeadAttention(config.heads, D, decode=False, **given)
        self.dropout1 = nnx.Dropout(config.dropout, rngs=rngs)
        self.dropout2 = nnx.Dropout(config.dropout, rngs=rngs)
        self.layer_norm1 = nnx.LayerNorm(D, epsilon=1e-6, dtype=config.dtype, rngs=rngs)
        self.linear1, self.linear2 = nnx.Linear(D, F, **given), nnx.Linear(F, D, **given)
        self.layer_norm2 = nnx.LayerNorm(D, epsilon=1e-6, dtype=config.dtype, rngs=rngs)

    def __call__(self, inputs: Float[Array, "B T D"], training: bool = False):
        mask = jnp.tril(jnp.ones((inputs.shape[1],) * 2))
        attended = self.mha(inputs_q=inputs, mask=mask, decode=False)
        attended = self.dropout1(attended, deterministic=not training)
        first = self.layer_norm1(inputs + attended)
        second = self.linear2(nnx.relu(self.linear1(first)))
        return self.layer_norm2(first + self.dropout2(second, deterministic=not training))


class PublishedMiniGPT(nnx.Module):
    """The source's language model: tokens (B, T) to logits (B, T, V), and how it writes.

    config: a MiniGPTConfig; its vocabulary is not padded. training: dropout is on.
    """

    def __init__(self, config: MiniGPTConfig, *, rngs: nnx.Rngs):
        V, T, D = config.vocabulary, config.tokens, config.embed
        given = {"dtype": config.dtype, "rngs": rngs}
        self.token_emb, self.pos_emb = nnx.Embed(V, D, **given), nnx.Embed(T, D, **given)
        self.blocks = nnx.List([PublishedBlock(config, rngs) for _ in range(config.layers)])
        self.output_layer = nnx.Linear(D, V, dtype=config.dtype, **labelled(rngs))
        self.maxlen = T

    def __call__(self, inputs: Int[Array | np.ndarray, "B T"], training: bool = False):
        positions = jnp.arange(0, inputs.shape[1])[None, :]
        x = self.token_emb(inputs) + self.pos_emb(positions)
        for block in self.blocks:
            x = block(x, training=training)
        return self.output_layer(x)

    def generate(self, max_tokens: int, start_tokens: list[int], top_k: int = 10):
        """Up to max_tokens new tokens: a whole eager forward pass for each."""
        generated = []
        for _ in range(max_tokens):
            tokens = start_tokens + generated
            at = min(len(tokens), self.maxlen) - 1
            padded = tokens[:self.maxlen] + [0] * (self.maxlen - len(tokens))
            logits, indices = jax.lax.top_k(self(jnp.array(padded)[None])[0][at], k=top_k)
            chosen = jax.random.choice(jax.random.PRNGKey(0), indices, p=nnx.softmax(logits))
            generated.append(int(chosen))
        return generated


# Their training -----------------------------------------------------------------------------------

@nnx.jit
def published_step(model: nnx.Module, optimizer: nnx.Optimizer, inputs: Array | np.ndarray,
                   labels: Int[Array | np.ndarray, "..."]):
    """One step of either model, as the sources take it: its loss; model and optimizer change."""
    def loss(model):
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(model(inputs), labels).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


# Their weights under this book's names ------------------------------------------------------------

def vit_weights(published: PublishedViT):
    """The parameters of this book's ViT with a PublishedViT's weights; its positions are 0."""
    def block(b):
        return {"attention": attention_weights(b.attn), "mlp": mlp_weights(b.mlp.fc1, b.mlp.fc2),
                "norm1": norm_weights(b.norm1), "norm2": norm_weights(b.norm2)}

    kernel, D = array(published.conv_proj.kernel), published.cls_token.shape[-1]
    tokens = 1 + (32 // kernel.shape[0]) ** 2
    return {
        "w_patch_XD": kernel.reshape(-1, D), "b_patch_D": array(published.conv_proj.bias),
        "class_D": array(published.cls_token).ravel(),
        "position_TD": np.zeros((tokens, D), kernel.dtype),
        "blocks": {str(at): block(b) for at, b in enumerate(published.encoder_blocks)},
        "norm": norm_weights(published.norm),
        "w_head_DC": array(published.head.kernel), "b_head_C": array(published.head.bias),
    }


def gpt_weights(published: PublishedMiniGPT, padded: int):
    """The parameters of this book's MiniGPT with a PublishedMiniGPT's weights, V filled up."""
    def fill(x, axis):
        widths = [(0, 0)] * x.ndim
        widths[axis] = 0, padded - x.shape[axis]
        return np.pad(x, widths)

    def block(b):
        return {"attention": attention_weights(b.mha), "mlp": mlp_weights(b.linear1, b.linear2),
                "norm1": norm_weights(b.layer_norm1), "norm2": norm_weights(b.layer_norm2)}

    return {
        "token_VD": fill(array(published.token_emb.embedding), 0),
        "position_TD": array(published.pos_emb.embedding),
        "blocks": {str(at): block(b) for at, b in enumerate(published.blocks)},
        "w_head_DV": fill(array(published.output_layer.kernel), 1),
        "b_head_V": fill(array(published.output_layer.bias), 0),
    }


def array(variable: nnx.Variable):
    """A variable's numbers on the host."""
    return np.asarray(variable[...])


def norm_weights(layer: nnx.LayerNorm):
    return {"scale_D": array(layer.scale), "bias_D": array(layer.bias)}


def mlp_weights(first: nnx.Linear, second: nnx.Linear):
    return {"w_in_DF": array(first.kernel), "b_in_F": array(first.bias),
            "w_out_FD": array(second.kernel), "b_out_D": array(second.bias)}


def attention_weights(layer: nnx.MultiHeadAttention):
    three = layer.query, layer.key, layer.value
    return {"w_qkv_DSHK": np.stack([array(part.kernel) for part in three], 1),
            "b_qkv_SHK": np.stack([array(part.bias) for part in three]),
            "w_out_HKD": array(layer.out.kernel), "b_out_D": array(layer.out.bias)}
