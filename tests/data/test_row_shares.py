"""Shares of padding, cuts and splits: those of rows that are really made."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from meshbook.data import tokens


def test_shares_are_those_of_rows_that_are_made():
    lengths, T = np.array([1, 3, 4, 5, 9]), 4
    rows = np.full((len(lengths), T + 1), -1)
    for row, n in zip(rows, lengths):
        row[:min(n, T)] = 7  # cut, and -1 where there is no text
    targets = np.concatenate([rows[:, 1:T], np.full((len(rows), 1), -1)], axis=1)
    shares = tokens.row_shares(lengths, T)
    assert shares["padding"] == pytest.approx((targets < 0).mean())
    assert shares["truncated"] == pytest.approx(2 / 5)


@examples(100)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(2, 8))
def test_the_share_of_split_documents_is_the_mean_over_where_they_start(lengths, T):
    split = [start // T != (start + n - 1) // T for n in lengths for start in range(T)]
    assert tokens.row_shares(np.array(lengths), T)["split"] == pytest.approx(np.mean(split))


@pytest.mark.parametrize("count, T", [(5, 4), (9, 4), (10, 4), (12, 4), (100_000_000, 1024)])
def test_what_no_row_has_as_a_target(count, T):
    assert tokens.without_row(count, T) == 1 + (count - 1) % T
