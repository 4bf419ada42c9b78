"""A mesh on a torus: every chip is drawn, with its place along the axes."""
from meshbook.costs.places import placed
from meshbook.drawing.mesh_places import draw_places


def test_every_chip_has_its_place_and_ends_are_not_linked():
    axes = {"batch": 8, "stage": 2, "model": 2}
    picture = draw_places(placed((2, 4, 4), axes), axes)._repr_html_()
    assert picture.count("<circle") == 32
    assert picture.count("<line") == 2 * (4 * 3 + 3 * 4)
    assert all(f">{b},{s},{m}<" in picture for b in range(8) for s in range(2) for m in range(2))
    assert "its place along batch, stage, model" in picture


def test_axes_of_one_chip_are_not_named():
    axes = {"batch": 32, "model": 1}
    picture = draw_places(placed((2, 4, 4), axes), axes)._repr_html_()
    assert "its place along batch<" in picture and ">31<" in picture


def test_of_neighbouring_planes_is_spoken_where_there_are_several():
    for torus, several in (((2, 2, 2), True), ((1, 2, 4), False)):
        axes = {"batch": 8}
        picture = draw_places(placed(torus, axes), axes)._repr_html_()
        assert ("neighbouring planes" in picture) is several
