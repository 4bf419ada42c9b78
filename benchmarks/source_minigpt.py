"""The source's MiniGPT as it writes it, mended just enough to run with today's Flax.

Mended: `nnx.List` for the list of blocks, keys for dropout, no partitioning notes (ranks
that today's Flax refuses), sizes as arguments instead of globals. The architecture, the
order of operations and the way of writing are the source's: the JAX AI stack's
"Train a miniGPT language model with JAX", June 2025.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class TransformerBlock(nnx.Module):
    """Attention and feed-forward network, a norm behind each sum."""

    def __init__(self, config, rngs):
        D, F, given = config.embed, config.hidden, {"dtype": config.dtype, "rngs": rngs}
        xavier = nnx.initializers.xavier_uniform()
        self.mha = nnx.MultiHeadAttention(
            num_heads=config.heads, in_features=D, kernel_init=xavier, decode=False, **given)
        self.dropout1 = nnx.Dropout(config.dropout, rngs=rngs)
        self.layer_norm1 = nnx.LayerNorm(D, epsilon=1e-6, **given)
        self.linear1 = nnx.Linear(D, F, kernel_init=xavier, **given)
        self.linear2 = nnx.Linear(F, D, kernel_init=xavier, **given)
        self.dropout2 = nnx.Dropout(config.dropout, rngs=rngs)
        self.layer_norm2 = nnx.LayerNorm(D, epsilon=1e-6, **given)

    def __call__(self, inputs, training=False):
        mask = jnp.tril(jnp.ones((inputs.shape[1],) * 2))
        attended = self.mha(inputs_q=inputs, mask=mask, decode=False)
        attended = self.dropout1(attended, deterministic=not training)
        first = self.layer_norm1(inputs + attended)
        second = self.linear2(nnx.relu(self.linear1(first)))
        second = self.dropout2(second, deterministic=not training)
        return self.layer_norm2(first + second)


class SourceMiniGPT(nnx.Module):
    """The source's model and how it writes; config: sizes, as MiniGPTConfig names them."""

    def __init__(self, config, rngs):
        V, T, D = config.vocabulary, config.tokens, config.embed
        given = {"dtype": config.dtype, "rngs": rngs}
        self.token_emb, self.pos_emb = nnx.Embed(V, D, **given), nnx.Embed(T, D, **given)
        self.blocks = nnx.List([TransformerBlock(config, rngs) for _ in range(config.layers)])
        self.output_layer = nnx.Linear(
            D, V, kernel_init=nnx.initializers.xavier_uniform(), **given)
        self.maxlen = T

    def __call__(self, inputs, training=False):
        positions = jnp.arange(0, inputs.shape[1])[None, :]
        x = self.token_emb(inputs) + self.pos_emb(positions)
        for block in self.blocks:
            x = block(x, training=training)
        return self.output_layer(x)

    def generate(self, max_tokens, start_tokens, top_k=10):
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


def parameters(source, padded):
    """The weights of a SourceMiniGPT under this book's names, its vocabulary filled up."""
    def fill(x, axis):
        widths = [(0, 0)] * x.ndim
        widths[axis] = 0, padded - x.shape[axis]
        return np.pad(x, widths)

    def norm(layer):
        return {"scale_D": array(layer.scale), "bias_D": array(layer.bias)}

    def block(b):
        three = b.mha.query, b.mha.key, b.mha.value
        return {
            "attention": {
                "w_qkv_DSHK": np.stack([array(part.kernel) for part in three], 1),
                "b_qkv_SHK": np.stack([array(part.bias) for part in three]),
                "w_out_HKD": array(b.mha.out.kernel), "b_out_D": array(b.mha.out.bias)},
            "mlp": {
                "w_in_DF": array(b.linear1.kernel), "b_in_F": array(b.linear1.bias),
                "w_out_FD": array(b.linear2.kernel), "b_out_D": array(b.linear2.bias)},
            "norm1": norm(b.layer_norm1), "norm2": norm(b.layer_norm2)}

    array = lambda variable: np.asarray(variable[...])
    return {
        "token_VD": fill(array(source.token_emb.embedding), 0),
        "position_TD": array(source.pos_emb.embedding),
        "blocks": {str(at): block(b) for at, b in enumerate(source.blocks)},
        "w_head_DV": fill(array(source.output_layer.kernel), 1),
        "b_head_V": fill(array(source.output_layer.bias), 0),
    }
