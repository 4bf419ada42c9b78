"""A tree from left to right: what is made from what."""

from collections.abc import Mapping, Sequence

from meshbook.drawing import svg

LEAF, HIGH, GAP = 24.0, 18.0, 14.0  # from leaf to leaf, of a box, between levels: pixels


def draw_tree(tree: Mapping, headings: Sequence[str], alt: str):
    """Draw {name: {name: ...}} with a box for each name; a leaf is words that stand behind it.

    headings: one for each level, above its column. The column of the words has none. Raises
    ValueError for a tree without leaves or of more levels than headings.
    """
    levels = _levels(tree)
    if not levels or len(levels) > len(headings):
        raise ValueError(f"expected a tree of 1 to {len(headings)} levels, found {len(levels)}")
    wide = [12 + svg.text_width(max([*names, head], key=len), 8.8)
            for names, head in zip(levels, headings)]
    left = [sum(wide[:level]) + GAP * level for level in range(len(wide) + 1)]
    body = [svg.text(x + width / 2, 10, words, 10) for x, width, words in zip(left, wide, headings)]
    drawn, _, bottom = _branches(tree, 0, 20.0, left, wide)
    width = left[-1] + 40
    return svg.picture("".join(body) + drawn, width, bottom, alt, shown=1.35 * width)


def _levels(tree):
    """The names at each level of a tree."""
    if not isinstance(tree, Mapping) or not tree:
        return []
    below = [_levels(child) for child in tree.values()]
    deep = max(map(len, below))
    return [list(tree)] + [[name for each in below if level < len(each) for name in each[level]]
                           for level in range(deep)]


def _branches(tree, level, top, left, wide):
    """(SVG, the middles of the boxes, the bottom) of one level of a tree and all below it."""
    body, middles = "", []
    for name, child in tree.items():
        end = left[level] + wide[level]
        if isinstance(child, Mapping):
            drawn, below, bottom = _branches(child, level + 1, top, left, wide)
            middle = (below[0] + below[-1]) / 2
            body += drawn + "".join(
                svg.element("path", d=f"M{svg.number(end)} {svg.number(middle)}"
                            f"L{svg.number(left[level + 1])} {svg.number(y)}", fill="none",
                            stroke="currentColor", stroke_opacity=0.7) for y in below)
        else:
            bottom, middle = top + LEAF, top + HIGH / 2
            body += svg.text(end + 6, middle + 4, child, 10, "start", font_family="monospace")
        body += svg.frame(left[level], middle - HIGH / 2, wide[level], HIGH)
        body += svg.text(left[level] + wide[level] / 2, middle + 4, name, 10, data_node=name)
        middles.append(middle)
        top = bottom
    return body, middles, top
