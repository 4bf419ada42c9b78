"""Every argument of a public function carries its type, and in the tests the types are checked."""
import ast
import importlib.util
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from meshbook.costs.work import step_work
from meshbook.models.reference import cross_entropy
from meshbook.models.vit import ViTConfig

PACKAGE = Path(__file__).resolve().parents[2] / "meshbook"
checked = pytest.mark.skipif(not importlib.util.find_spec("beartype"),
                             reason="beartype is not installed")


def untyped(text):
    """"function(argument)" of public functions and methods whose arguments have no type."""
    found, waiting = [], [ast.parse(text)]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                waiting.append(node)
            elif isinstance(node, ast.FunctionDef) and public(node.name):
                a = node.args
                every = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
                found += [f"{node.name}({each.arg})" for each in every
                          if each and not each.annotation and each.arg not in ("self", "cls")]
    return found


def public(name):
    return not name.startswith("_") or name in ("__init__", "__call__")


def test_untyped_arguments_are_seen():
    text = "class A:\n def __call__(self, x, *, y=1, **z: int): ...\ndef _own(a): ...\ndef f(b): ..."
    assert sorted(untyped(text)) == ["__call__(x)", "__call__(y)", "f(b)"]


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("**/*.py")),
                         ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_argument_of_a_public_function_has_a_type(path):
    assert untyped(path.read_text("utf8")) == []


@checked
@pytest.mark.parametrize("call", [
    lambda: step_work("a step"),
    lambda: ViTConfig(embed="wide"),
    lambda: cross_entropy(jnp.zeros((4, 3, 10)), jnp.zeros((3, 4), int)),
    lambda: cross_entropy(jnp.zeros((4, 10)), np.zeros(4)),
], ids=["a class", "a field", "sizes that disagree", "a dtype"])
def test_a_wrong_type_or_shape_stops_a_test(call):
    with pytest.raises(TypeCheckError):
        call()
