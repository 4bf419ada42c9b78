"""Where the parts of a picture lie: the box of every rectangle, circle, line and text in it."""
import math
import re
from typing import NamedTuple
from xml.etree import ElementTree

from meshbook.drawing import svg

POINTS = re.compile(r"(-?[\d.]+)[ ,](-?[\d.]+)")


class Box(NamedTuple):
    """A part of a picture, in the pixels of its viewBox; node: the element."""

    tag: str
    left: float
    top: float
    right: float
    bottom: float
    node: ElementTree.Element

    def overlaps(self, other, by=0.5):
        """Whether two boxes share more than half a pixel in both directions."""
        return (min(self.right, other.right) - max(self.left, other.left) > by
                and min(self.bottom, other.bottom) - max(self.top, other.top) > by)


def drawings(picture):
    """[(width, height, its boxes)] of every <svg> in a picture."""
    tree = ElementTree.fromstring(f"<div>{picture.html.replace('<br>', '<br/>')}</div>")
    return [(*map(float, node.get("viewBox").split()[2:]), list(boxes(node)))
            for node in tree.iter() if node.tag.endswith("svg")]


def boxes(node, place=lambda x, y: (x, y)):
    """The boxes of all that is drawn below a node; place: where its own points are."""
    for each in node:
        where = moved(each.get("transform", ""), place)
        if corners := corners_of(each):
            xs, ys = zip(*(where(x, y) for x, y in corners))
            yield Box(each.tag.rpartition("}")[2], min(xs), min(ys), max(xs), max(ys), each)
        yield from boxes(each, where)


def moved(transform, place):
    """`place` of what a transform of translations and turns makes of a point."""
    for name, words in re.findall(r"(\w+)\(([^)]*)\)", transform):
        numbers = [float(word) for word in words.split()]
        place = translated(place, *numbers) if name == "translate" else turned(place, *numbers)
    return place


def translated(place, right, down):
    return lambda x, y: place(x + right, y + down)


def turned(place, degrees, x0=0.0, y0=0.0):
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return lambda x, y: place(x0 + cos * (x - x0) - sin * (y - y0),
                              y0 + sin * (x - x0) + cos * (y - y0))


def corners_of(node):
    """The corners of what an element draws; an element that draws nothing has none."""
    of = lambda *names: [float(node.get(name, 0)) for name in names]
    tag = node.tag.rpartition("}")[2]
    if tag in ("polyline", "polygon"):
        return [(float(x), float(y)) for x, y in POINTS.findall(node.get("points"))]
    if tag == "text":
        (x, y, size), words = of("x", "y", "font-size"), "".join(node.itertext())
        wide = svg.text_width(words, size) * 0.9  # `text_width` is generous
        x -= wide * {"start": 0, "middle": 0.5, "end": 1}[node.get("text-anchor")]
        left, top, right, bottom = x, y - 0.7 * size, x + wide, y + 0.15 * size
    elif tag == "rect":
        x, y, wide, high = of("x", "y", "width", "height")
        left, top, right, bottom = x, y, x + wide, y + high
    elif tag == "circle":
        x, y, radius = of("cx", "cy", "r")
        left, top, right, bottom = x - radius, y - radius, x + radius, y + radius
    elif tag == "line":
        return [tuple(of("x1", "y1")), tuple(of("x2", "y2"))]
    else:
        return []
    return [(x, y) for x in (left, right) for y in (top, bottom)]
