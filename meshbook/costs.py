"""What a training step must cost, by formula: parameters, FLOPs, bytes that move.

Nothing here looks at a program: these are the predictions that programs are held to.
"""
from __future__ import annotations


def vit_parameters(config, ways=1):
    """How many parameters one of `ways` devices along "model" holds.

    Column- and row-split matrices are divided, and so are the biases of split
    units; embeddings, norms, the head and the biases after a sum are not.
    """
    X, D, F = config.patch**2 * 3, config.embed, config.hidden
    split = 4 * D * D + 3 * D + 2 * D * F + F
    whole = 2 * D + D + 2 * D + D
    embed = X * D + D + D + config.tokens * D
    head = 2 * D + D * config.classes + config.classes
    return embed + config.layers * (split // ways + whole) + head


def vit_step_flops(config, images, ways=1):
    """FLOPs of the products of one training step, and how often they are done.

    Returns (useful FLOPs of all devices together, factor). A product costs 2 FLOPs
    a pair forward and twice that backward; the first has no gradient to its input.
    Each of `ways` devices along "model" does the patches and the head again.
    """
    X, T, D, F = config.patch**2 * 3, config.tokens, config.embed, config.hidden
    block = T * (8 * D * D + 4 * D * F) + 4 * T * T * D
    blocks = 3 * config.layers * block
    whole = 2 * (T - 1) * 2 * X * D + 3 * 2 * D * config.classes
    factor = (blocks + ways * whole) / (blocks + whole)
    return images * (blocks + whole), factor


def vit_step_traffic(config, mesh, images, number=4):
    """Bytes that one device receives along each mesh axis in a tensor-parallel step.

    Along "model" four sums of activations a block (two forward, two backward);
    along "batch" the local gradients, loss and accuracy. The class token's gradient
    is the first row of the positions' and travels with it. number: bytes of one.
    """
    rows, ways = mesh.shape["batch"], mesh.shape["model"]
    activations = images // rows * config.tokens * config.embed
    gradients = vit_parameters(config, ways) - config.embed + 2
    moved = {
        "model": number * 4 * config.layers * activations,
        "batch": number * gradients,
    }
    return {axis: size for axis, size in moved.items() if mesh.shape[axis] > 1}


def gpt_parameters(config, ways=1):
    """How many parameters of a MiniGPT each of `ways` devices holds.

    Everything over the padded vocabulary is divided, like heads and hidden
    units; positions, norms and the biases after a sum are not.
    """
    D, F, V = config.embed, config.hidden, config.padded
    split = 4 * D * D + 3 * D + 2 * D * F + F
    whole = D + D + 4 * D
    blocks = config.layers * (split // ways + whole)
    return config.tokens * D + blocks + (V * D + D * V + V) // ways


def gpt_step_flops(config, rows):
    """FLOPs of the products of one training step, and how often they are done.

    Returns (useful FLOPs of all devices together, factor). rows: B, of T
    tokens each. Useful is the head over tokens that exist; the factor is that
    of the padding. Attention counts whole, though the mask throws half of it
    away.
    """
    T, D, F = config.tokens, config.embed, config.hidden
    block = T * (8 * D * D + 4 * D * F) + 4 * T * T * D
    blocks, head = config.layers * block, 2 * T * D * config.vocabulary
    done = blocks + 2 * T * D * config.padded
    return 3 * rows * (blocks + head), done / (blocks + head)


def gpt_step_traffic(config, mesh, rows, clipped=True, number=4):
    """Bytes that one device receives along each axis in a step of MiniGPT.

    Tensor-parallel. Along "model": the tokens' embeddings, four sums of
    activations a block, the hidden gradient, three numbers a token for the
    loss, and where gradients are clipped the squared norm of each split leaf.
    Along "batch": the local gradients, loss, accuracy. rows: B, of T tokens
    each; number: bytes of one.
    """
    tokens = rows // mesh.shape["batch"] * config.tokens
    activations = tokens * config.embed * (1 + 4 * config.layers + 1)
    norms = 6 * config.layers + 3
    moved = {
        "model": number * (activations + 3 * tokens + clipped * norms),
        "batch": number * (gpt_parameters(config, mesh.shape["model"]) + 2),
    }
    return {axis: size for axis, size in moved.items() if mesh.shape[axis] > 1}
