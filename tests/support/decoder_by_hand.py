"""A decoder's loss and gradients in NumPy alone, float64, the backward pass written by hand.

Each function returns its result and `back`, which takes the gradient of the result to those of
what went in, and adds those of parameters to a dict. Nothing of JAX or of the package is here.
"""
import numpy as np

MASKED = -1e9  # far below every score


class Gradients(dict):
    """Sums of gradients by the parameter's path."""

    def add(self, path, x):
        self[path] = self.get(path, 0) + x


def product(equation, x, p, path, name, grads, bias=None):
    """einsum of x and a parameter, plus a bias where the parameters have it."""
    inputs, letters, out = equation.replace("->", ",").split(",")
    y = np.einsum(equation, x, p[name])
    if bias in p:
        y = y + p[bias]

    def back(dy):
        grads.add((*path, name), np.einsum(f"{inputs},{out}->{letters}", x, dy))
        if bias in p:
            grads.add((*path, bias), dy.sum((0, 1)))
        return np.einsum(f"{out},{letters}->{inputs}", dy, p[name])

    return y, back


def norm(x, p, path, grads):
    """x over its root mean square, times a scale, plus a shift where there is one."""
    root = np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    y = x / root
    out = y * p["scale_D"] + p.get("shift_D", 0)

    def back(dout):
        grads.add((*path, "scale_D"), (dout * y).sum((0, 1)))
        if "shift_D" in p:
            grads.add((*path, "shift_D"), dout.sum((0, 1)))
        dy = dout * p["scale_D"]
        return (dy - y * (dy * y).mean(-1, keepdims=True)) / root

    return out, back


def turn(x, at, sign=1):
    """x (B, T, heads, K), numbers i and i + K/2 turned by at·10000^(-2i/K); back: sign -1."""
    half = x.shape[-1] // 2
    angle = at[:, :, None, None] / 10_000.0 ** (np.arange(half) / half)
    one, two, cos, sin = x[..., :half], x[..., half:], np.cos(angle), sign * np.sin(angle)
    return np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def attend(q, k, v, sees):
    """Softmax of q·k / √K over what is seen, of v; all (B, T, H, K)."""
    size = q.shape[-1] ** -0.5
    scores = np.where(sees[:, None], np.einsum("bthk,bshk->bhts", q, k) * size, -np.inf)
    w = np.exp(scores - scores.max(-1, keepdims=True))
    w /= w.sum(-1, keepdims=True)

    def back(dy):
        dw = np.einsum("bthk,bshk->bhts", dy, v)
        dscores = w * (dw - (dw * w).sum(-1, keepdims=True)) * size
        return (np.einsum("bhts,bshk->bthk", dscores, k),
                np.einsum("bhts,bthk->bshk", dscores, q), np.einsum("bhts,bthk->bshk", w, dy))

    return np.einsum("bhts,bshk->bthk", w, v), back


def grouped(x, p, path, grads, at, sees):
    """Attention of groups of heads."""
    q, back_q = product("btd,dhk->bthk", x, p, path, "w_query_DHK", grads, "b_query_HK")
    kv, back_kv = product("btd,dsgk->btsgk", x, p, path, "w_kept_DSGK", grads, "b_kept_SGK")
    G, times = kv.shape[3], q.shape[2] // kv.shape[3]
    k, v = (np.repeat(kv[:, :, s], times, 2) for s in (0, 1))
    y, back_y = attend(turn(q, at), turn(k, at), v, sees)
    out, back_out = product("bthk,hkd->btd", y, p, path, "w_out_HKD", grads, "b_out_D")

    def back(dout):
        dq, dk, dv = back_y(back_out(dout))
        dk = turn(dk, at, -1)
        dkv = np.stack([dk, dv], 2)  # of every head; those of a group are summed
        dkv = dkv.reshape(*dkv.shape[:3], G, times, -1).sum(4)
        return back_q(turn(dq, at, -1)) + back_kv(dkv)

    return out, back


def latent(x, p, path, grads, at, sees):
    """Attention whose keys and values are made of a latent; positions in a part of their own."""
    c, back_c = product("btd,dsr->btsr", x, p, path, "w_latent_DSR", grads, "b_latent_SR")
    q, back_q = product("btr,rhk->bthk", c[:, :, 1], p, path, "w_query_RHK", grads, "b_query_HK")
    kv, back_kv = product("btr,rshk->btshk", c[:, :, 0], p, path, "w_kept_RSHK", grads,
                          "b_kept_SHK")
    k, v, K, turned = kv[:, :, 0], kv[:, :, 1], q.shape[-1], "w_turned_SRP" in p
    if turned:
        qt, back_qt = product("btsr,srhp->bthp", c, p, path, "w_turned_query_SRHP", grads,
                              "b_turned_query_HP")
        kt, back_kt = product("btsr,srp->btp", c, p, path, "w_turned_SRP", grads, "b_turned_P")
        shared = np.repeat(turn(kt[:, :, None], at), q.shape[2], 2)
        q, k = np.concatenate([q, turn(qt, at)], -1), np.concatenate([k, shared], -1)
    y, back_y = attend(q, k, v, sees)
    out, back_out = product("bthk,hkd->btd", y, p, path, "w_out_HKD", grads, "b_out_D")

    def back(dout):
        dq, dk, dv = back_y(back_out(dout))
        dc = np.zeros_like(c)
        if turned:
            dc += back_qt(turn(dq[..., K:], at, -1))
            dc += back_kt(turn(dk[..., K:].sum(2, keepdims=True), at, -1)[:, :, 0])
        dc[:, :, 1] += back_q(dq[..., :K])
        dc[:, :, 0] += back_kv(np.stack([dk[..., :K], dv], 2))
        return back_c(dc)

    return out, back


def feed_forward(x, p, path, grads):
    """GELU by tanh, or SwiGLU where there are two matrices in front."""
    h, back_h = product("btd,dsf->btsf", x, p, path, "w_in_DSF", grads, "b_in_SF")
    one = h[:, :, 0]
    if h.shape[2] == 2:
        share = 1 / (1 + np.exp(-one))
        y = one * share * h[:, :, 1]
        slopes = [share * (1 + one * (1 - share)) * h[:, :, 1], one * share]
    else:
        root = (2 / np.pi) ** 0.5
        bent = np.tanh(root * (one + 0.044715 * one**3))
        y = one * (1 + bent) / 2
        slopes = [(1 + bent) / 2
                  + one / 2 * (1 - bent**2) * root * (1 + 3 * 0.044715 * one**2)]
    out, back_out = product("btf,fd->btd", y, p, path, "w_out_FD", grads, "b_out_D")

    def back(dout):
        dy = back_out(dout)
        return back_h(np.stack([dy * slope for slope in slopes], 2))

    return out, back


def loss_and_gradients(params, batch, vocabulary):
    """Mean cross-entropy (nats) of labels by weight, and the gradients in the params' nesting.

    params: nested dicts as the model names them, layers stacked; batch: inputs, labels, and
    optionally segments, positions, weight, all (B, T).
    """
    params, tokens = as_float64(params), batch["inputs"]
    (B, T), table, grads, backs = tokens.shape, params["token_VD"], Gradients(), []
    at = batch.get("positions", np.arange(T) + np.zeros((B, 1)))
    sees = np.tril(np.ones((T, T), bool))[None]
    if "segments" in batch:
        sees = sees & (batch["segments"][:, :, None] == batch["segments"][:, None])
    x, period = table[tokens], len(params["layers"])
    count = len(params["layers"]["0"]["norm1"]["scale_D"])
    for number in range(count * period):
        path = ("layers", str(number % period))
        p = one_of(params["layers"][path[1]], number // period)
        own = Gradients()  # of one layer
        has_positions = period == 1 or number % period < period - 1
        look = latent if "w_latent_DSR" in p["attention"] else grouped
        n, back_1 = norm(x, p["norm1"], (*path, "norm1"), own)
        y, back_2 = look(n, p["attention"], (*path, "attention"), own,
                         at if has_positions else 0 * at, sees)
        x = x + y
        n, back_3 = norm(x, p["norm2"], (*path, "norm2"), own)
        y, back_4 = feed_forward(n, p["mlp"], (*path, "mlp"), own)
        x = x + y
        backs.append((number // period, own, back_1, back_2, back_3, back_4))
    x, back_norm = norm(x, params["norm"], ("norm",), grads)
    scores = x @ table.T
    scores[..., vocabulary:] = MASKED
    share = np.exp(scores - scores.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    right = np.eye(len(table))[batch["labels"]]
    weight = batch.get("weight", np.ones((B, T)))
    weight = weight / weight.sum()
    loss = -(np.log((share * right).sum(-1)) * weight).sum()

    errors = (share - right) * weight[..., None]
    grads.add(("token_VD",), np.einsum("btv,btd->vd", errors, x))
    dx = back_norm(errors @ table)
    for place, own, back_1, back_2, back_3, back_4 in reversed(backs):
        dx = dx + back_3(back_4(dx))
        dx = dx + back_1(back_2(dx))
        for path, each in own.items():
            whole = np.zeros((count, *each.shape))
            whole[place] = each
            grads.add(path, whole)
    np.add.at(grads[("token_VD",)], tokens, dx)
    return loss, nested(grads)


def as_float64(tree):
    if isinstance(tree, dict):
        return {name: as_float64(each) for name, each in tree.items()}
    return np.asarray(tree, np.float64)


def one_of(tree, place):
    """One layer of stacked ones."""
    if isinstance(tree, dict):
        return {name: one_of(each, place) for name, each in tree.items()}
    return tree[place]


def nested(flat):
    """Nested dicts of a dict by path."""
    tree = {}
    for path, x in flat.items():
        inner = tree
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = x
    return tree
