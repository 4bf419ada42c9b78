"""Arrays on a TPU take whole tiles, of 8 rows by 128 columns."""
import math


def tiled(*shape: int):
    """Elements that an array (..., rows, columns) takes on a TPU: tiles of 8 rows by 128 columns.

    Source: https://openxla.org/xla/tiled_layout
    """
    *others, rows, columns = shape
    return math.prod(others) * -(-rows // 8) * 8 * -(-columns // 128) * 128


def token_rows(batch: int, tokens: int, width: int):
    """Elements that an array (B, T, width) of hidden units or of the residual stream takes.

    The rows of its tiles are tokens or images, of which there are more. So it is in the texts of
    programs compiled for v2 (65 tokens with 64, 96 and 128 images, 17 with 32) and v5e (65 with 16
    and 32). Not so with 257 tokens and 128 images, where images are the rows: 3% less than this.
    """
    return min(batch, tokens) * tiled(max(batch, tokens), width)
