"""Right variants say the same in other words, and the record has no false alarm."""

import ast
import json
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import generated, variants
from benchmarks.slips import edited, slips

DRAWN = variants.drawn()
CODE = '''
def weighed(x, w, low, high):
    total = 2 * x * w + 3 + jnp.exp(x)
    parts = [part + low for part in (1, 2) if part < high]
    kept = jnp.einsum("BD,DF->BF", jnp.outer(x, w), jnp.outer(w, x))
    return total + sum(parts) + 0.5 * (kept.sum() if low < high else low)
'''


def value_of(code):
    known = {"jnp": jnp}
    exec(code, known)
    x = jnp.asarray([0.3, -1.2, 2.0], jnp.float32)
    return np.asarray(known["weighed"](x, x[::-1] + 1, 1, 2))


@pytest.mark.parametrize("operator, made", [
    ("exchanged operands", 7), ("regrouped", 3), ("turned comparison", 2), ("turned condition", 1),
    ("named value", 1), ("renamed variable", 1), ("reversed sum", 1), ("other letters", 1)])
def test_an_operator_writes_the_same_value_in_another_form(operator, made):
    found = [slip for slip in slips(CODE, variants.OPERATORS) if slip.operator == operator]
    assert len(found) == made
    for slip in found:
        other = edited(CODE, slip)
        assert ast.dump(ast.parse(other)) != ast.dump(ast.parse(CODE))
        np.testing.assert_allclose(value_of(other), value_of(CODE), rtol=1e-6)


def test_lists_and_paths_are_not_taken_for_numbers():
    code = "def joined(folder, name, these):\n    return folder / name + these, these + [1]\n"
    made = {slip.operator for slip in slips(code, variants.OPERATORS)}
    assert made == {"named value"}


def test_variants_are_drawn_from_every_folder_and_there_are_a_hundred():
    assert len(DRAWN) == len({each.name for each in DRAWN}) == variants.COUNT >= 100
    assert {each.file.partition("/")[0] for each in DRAWN} == {
        each.file.partition("/")[0] for each in generated.drawn()}
    drawn = Counter(each.slip.operator for each in DRAWN)
    assert drawn.keys() == variants.OPERATORS.keys() | {"other size"}
    assert variants.drawn() == DRAWN
    for each in DRAWN:
        text = each.path.read_text("utf8")
        assert ast.dump(ast.parse(edited(text, each.slip))) != ast.dump(ast.parse(text))


@pytest.mark.skipif(not variants.RECORD.exists(), reason="no run is recorded")
def test_the_record_has_no_false_alarm():
    record = json.loads(variants.RECORD.read_text("utf8"))
    rows = record["variants"]
    assert len(rows) >= 100 and len({each["name"] for each in rows}) == len(rows)
    assert {each["verdict"] for each in rows} == {"passed"} and record["alarms"] == 0
    assert all(each["ended"] for each in rows)
