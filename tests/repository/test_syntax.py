"""Nodes are found by the shape of their code, and edited where they stand, the rest as it was."""
import ast

import pytest

from benchmarks import syntax

CODE = '''"""Words."""
LEAST = 3


class Box:
    sides: int = 4

    @property
    def size(self):
        """Of 2."""
        for side in self.sides:
            side = side - 1  # a remark
            log(side, "one of – them")
        return f"{side - 1}" if side > LEAST else side - 1
'''
TREE = ast.parse(CODE)
DEFINED = syntax.definitions(TREE)


def test_what_a_module_defines_has_a_qualified_name():
    assert list(DEFINED) == ["", "LEAST", "Box", "Box.sides", "Box.size"]
    assert [ast.unparse(node) for node in syntax.below(DEFINED[""])] == ["'Words.'"] * 2


@pytest.mark.parametrize("code, shape, names", [
    ("a.b(c, d=-1) @ e", "_._(_, _=-1) @ _", ["a", "b", "c", "d", "e"]),
    ("lambda x, *y: {'B': x, 'a b': y}", "lambda _, *_: {'B': _, '…': _}", ["x", "y", "x", "y"]),
    ("if a:\n    b = a", "if _: ...", ["a", "b", "a"]),
    ("def f(a: int = 2): pass", "def _(_: _=2): ...", ["f", "a", "int"]),
    ("[x for x in y if x is None]", "[_ for _ in _ if _ is None]", ["x", "x", "y", "x"]),
    ("True", "True", []),
])
def test_a_shape_is_the_code_without_its_names(code, shape, names):
    node = ast.parse(code).body[0]
    assert syntax.shape(node) == (shape, names)


@pytest.mark.parametrize("shape, which, of, becomes, before, after", [
    ("_ - 1", 1, 2, "$1 + 1", "side = side - 1  #", "side = side + 1  #"),
    ("_ - 1", 2, 2, "$1", "else side - 1", "else side"),
    ("_ = _ - 1", 1, 1, "pass", "side = side - 1  # a", "pass  # a"),
    ("_ = _ - 1", 1, 1, "$0\n$0", "            side = side - 1 ",
     "            side = side - 1\n            side = side - 1 "),
    ("_(_, '…')", 1, 1, "$1(LEAST)", 'log(side, "one of – them")', "log(LEAST)"),
    ("_ > _", 1, 1, "$1 >= $2", "side > LEAST", "side >= LEAST"),
])
def test_an_edit_changes_one_place(shape, which, of, becomes, before, after):
    node = syntax.located(DEFINED["Box.size"], shape, which, of)
    assert CODE.count(before) == 1
    assert syntax.replaced(CODE, node, becomes) == CODE.replace(before, after)


def test_another_number_of_nodes_is_refused():
    with pytest.raises(ValueError, match="expected 1 of the shape _ - 1, found 2"):
        syntax.located(DEFINED["Box.size"], "_ - 1", 1, 1)


def test_code_is_the_same_but_for_words_and_types():
    sound, *others = (ast.parse(f"def f(a{kind}): {code}") for kind, code in (
        ("", "return a"), (": int", "return a"), ("", "'Words.'; return a"), ("", "return -a")))
    assert [syntax.same(sound, other) for other in others] == [True, True, False]
