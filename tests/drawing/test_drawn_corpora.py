"""Pictures of a corpus have every token once, and every row where it comes from."""
import re

import numpy as np

from meshbook.drawing.corpora import draw_origins, draw_way

PIECES = [[5, 9, 3], [20], [4, 4, 4]]


def test_every_row_of_the_picture_has_all_tokens():
    drawn = draw_way(PIECES, 16)
    tokens = [int(each) for each in re.findall(r'data-tokens="(\d+)"', drawn.html)]
    assert sum(tokens) == 3 * sum(map(sum, PIECES))
    assert len(tokens) > 3 * 7  # shards cut documents
    assert drawn.html.count(">shard ") == 4
    assert "a stream of 50 tokens, cut into 4 shards of 16 tokens, the last with 2" in drawn.alt
    assert "piece 0 has documents of 5, 9, 3 tokens" in drawn.alt


def test_every_end_is_marked():
    drawn = draw_way(PIECES, 16)
    assert drawn.html.count('stroke-width="1.5"') == 3 * (7 + 1)


def test_every_row_of_a_batch_is_a_point():
    places = np.random.default_rng(0).random((12, 5))
    drawn = draw_origins({"one": places * 0.5, "all": places})
    assert drawn.html.count("<circle") == 2 * 60
    spread = np.mean(np.ptp(places, axis=1))
    assert f"all: rows of a batch lie in {spread:.0%} of the corpus" in drawn.alt
    heights = [float(each) for each in re.findall(r'cy="([\d.]+)"', drawn.html)]
    assert max(heights[:60]) - min(heights[:60]) < max(heights[60:]) - min(heights[60:])
