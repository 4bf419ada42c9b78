"""Batches of tokens: a stream of documents cut into rows, in an order that a seed decides.

Letters of the shapes: N tokens of the stream, R rows, B rows of a batch, T tokens of a row.
"""
import functools
import sys

import grain
import numpy as np
from jaxtyping import Int, Integer

from meshbook.data.order import Stream, epoch_order, process_share
from meshbook.data.token_files import Tokens, read_tokens, write_tokens

__all__ = ["Tokens", "batches", "cut", "evaluation_batches", "read_tokens", "row_shares",
           "without_row", "write_tokens"]


def cut(ids_N: Integer[np.ndarray, "N"], T: int):
    """Rows of T+1 tokens at stride T, a view (R, T+1): a row's last token begins the next row.

    So each token but the first is a target once, and a row has T inputs and T targets. The last
    (N - 1) mod T tokens fill no row. Raises ValueError if there is no row.
    """
    if not 0 < T < len(ids_N):
        raise ValueError(f"rows of T={T} tokens do not fit: expected 1 to "
                         f"{len(ids_N) - 1:,}, one less than there are tokens")
    windows = np.lib.stride_tricks.sliding_window_view
    return windows(np.asarray(ids_N), T + 1)[::T]


def without_row(tokens: int, T: int):
    """How many of a stream's tokens are never a target, in rows of T: the first and what is over.

    Raises ValueError as `cut` does.
    """
    return tokens - T * len(cut(np.broadcast_to(np.uint16(0), tokens), T))


def row_shares(lengths_N: Integer[np.ndarray, "N"], T: int):
    """What happens to documents of N lengths in rows of T tokens, as shares of 1.

    One document per row, END behind it: "padding" is the share of the positions whose target is no
    text, "truncated" that of the documents longer than a row. Packed by `cut`: "split" is the share
    of documents with a cut between two of their tokens, on average over where they start.
    """
    lengths_N = np.asarray(lengths_N)
    useful_N = np.minimum(lengths_N, T) - 1  # a row's last target is never text
    return {"padding": float(1 - (useful_N / T).mean()),
            "truncated": float((lengths_N > T).mean()),
            "split": float(np.minimum(1, (lengths_N - 1) / T).mean())}


def batches(
    tokens: Tokens, B: int, T: int, seed: int | np.integer,
    documents: bool = False, epochs: int | None = None,
    process_index: int | None = None, process_count: int | None = None
):
    """Shuffled training batches as a Stream: an iterator with get_state and set_state.

    Each is a dict of inputs and labels, int32 (B, T), where B is this process's contiguous share;
    with documents=True also segments and positions, see `apart`. Global batch k depends on seed
    and k alone. Every row comes once an epoch, also where an epoch ends within a batch;
    epochs=None never ends. The processes default to JAX's. Raises ValueError for sizes that do
    not fit.
    """
    rows_RT1 = cut(tokens.ids, T)
    if not 0 < B <= len(rows_RT1):
        raise ValueError(f"B={B} does not fit: expected 1 to {len(rows_RT1):,}, the rows of T={T} "
                         f"tokens")
    share = process_share(B, process_index, process_count)
    end = int(tokens.ids[0]) if documents else None
    make = functools.partial(nth_batch, rows_RT1, B, seed, share, end)
    count = sys.maxsize if epochs is None else epochs * len(rows_RT1) // B
    dataset = grain.MapDataset.range(count).map(make).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    return Stream(iter(dataset), tokens, B=B, T=T, seed=seed, documents=documents)


def nth_batch(
    rows_RT1: Integer[np.ndarray, "R T1"], B: int, seed: int | np.integer,
    share: slice, end: int | None, number: int | np.integer
):
    """The rows `share` of global batch `number`: the batch first, then the share."""
    # Rows are counted on from epoch to epoch: a batch may lie in two, or in more.
    epochs, places = np.divmod(np.arange(number * B, (number + 1) * B)[share], len(rows_RT1))
    rows = np.concatenate([epoch_order(len(rows_RT1), seed, epoch)[places[epochs == epoch]]
                           for epoch in range(epochs[0], epochs[-1] + 1)])
    return as_batch(rows_RT1[rows], end)


def as_batch(rows_BT1: Integer[np.ndarray, "B T1"], end: int | None = None):
    """Rows of T+1 tokens as inputs and labels; with the token END, its documents kept apart."""
    batch = {"inputs": rows_BT1[:, :-1].astype(np.int32),
             "labels": rows_BT1[:, 1:].astype(np.int32)}
    return batch if end is None else batch | apart(batch["inputs"], end)


def apart(inputs_BT: Int[np.ndarray, "B T"], end: int | np.integer):
    """Which document of its row a token belongs to, and its place in it: two int32 (B, T).

    segments count from 1, positions from 0 again at each document. The token `end` opens a
    document, so that as a label it still belongs to the one before: no target crosses. A document
    that is cut goes on in the next row as a new one, without what came before.
    """
    opens_BT = inputs_BT == end
    opens_BT[:, 0] = True
    at_T = np.arange(inputs_BT.shape[1], dtype=np.int32)
    since_BT = np.maximum.accumulate(np.where(opens_BT, at_T, 0), axis=1)
    return {"segments": np.cumsum(opens_BT, axis=1, dtype=np.int32),
            "positions": at_T - since_BT}


def evaluation_batches(
    tokens: Tokens, B: int, T: int, documents: bool = False,
    process_index: int | None = None, process_count: int | None = None
):
    """Every row exactly once, in order; the last batch is filled up.

    Yields dicts like those of `batches`, with one more array, weight float32 (B, T): 1 in a row,
    0 in filling.
    """
    rows_RT1, share = cut(tokens.ids, T), process_share(B, process_index, process_count)
    end = int(tokens.ids[0]) if documents else None
    for start in range(0, len(rows_RT1), B):
        rows = np.arange(start, start + B)[share]
        weight = np.repeat((rows < len(rows_RT1)).astype(np.float32)[:, None], T, axis=1)
        rows = np.minimum(rows, len(rows_RT1) - 1)
        yield as_batch(rows_RT1[rows], end) | {"weight": weight}
