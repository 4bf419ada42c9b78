"""Rewrite the package where it is right, one expression at a time: nothing may fail then.

    python -m benchmarks.variants              all that are drawn (make right-variants)
    python -m benchmarks.variants 2/7          every seventh of them, from the second one on

A check that fails for code which does the same is a false alarm. So the operators here give an
expression another form of the same value: operands of a product or a sum in another order (floats
then differ in their last bits), a comparison or a condition turned round, a value that gets a name,
other letters in an einsum, another size of the blocks that are computed one after the other.
Variants are drawn, planted and run as faults are in `benchmarks.generated`. A run of all of them
writes the record results/variants.json. It fails where one has raised an alarm.
"""

import ast
import copy
import json
import re
import sys

from benchmarks import generated, syntax
from benchmarks.__main__ import ROOT, machine, provenance
from benchmarks.generated import Generated
from benchmarks.slips import BOUNDS, Slip, called, source

SEED, COUNT = 45, 120
RECORD = ROOT / "results" / "variants.json"
TURNED = {ast.Lt: ">", ast.LtE: ">=", ast.Gt: "<", ast.GtE: "<="}
SIZE = re.compile(r"BLOCK|CHUNK")
SPELLED = re.compile(r"[A-Za-z, .]+->[A-Za-z .]*")


def is_number(node: ast.expr):
    """Whether an expression is a number or an array of numbers, by its form alone."""
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Pow)):
        return not isinstance(node.left, ast.Name)  # a path / a name
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult, ast.Sub)):
        return is_number(node.left) or is_number(node.right)
    return called(node) in ("sum", "mean", "len", "exp", "log", "sqrt", "einsum", "prod", "arange")


def is_product(node: ast.AST):
    """Of numbers: a list times a number counts, too, but not what is regrouped with a list."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def is_sum(node: ast.AST):
    return (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
            and (is_number(node.left) or is_number(node.right)))


def exchanged_operands(node: ast.AST):
    if (is_product(node) or is_sum(node)) and source(node.left) != source(node.right):
        sign = "*" if is_product(node) else "+"
        yield f"({source(node.right)} {sign} {source(node.left)})"


def regrouped(node: ast.AST):
    for sign, applies in (("*", is_product), ("+", is_sum)):
        if applies(node) and applies(node.left):
            first, second = source(node.left.left), source(node.left.right)
            yield f"({first} {sign} ({second} {sign} {source(node.right)}))"


def turned_comparison(node: ast.AST):
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in BOUNDS:
        yield (f"({source(node.comparators[0])} {TURNED[type(node.ops[0])]} "
               f"{source(node.left)})")


def turned_condition(node: ast.AST):
    if isinstance(node, ast.IfExp):
        yield f"({source(node.orelse)} if not {source(node.test)} else {source(node.body)})"


def named_value(node: ast.AST):
    if isinstance(node, ast.Return) and node.value is not None:
        yield f"the_value = {ast.unparse(node.value)}; return the_value"


def renamed_variable(node: ast.AST):
    if not isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)):
        return
    target = node.generators[0].target
    inside = [each for each in ast.walk(node) if isinstance(each, (ast.Lambda, ast.comprehension))]
    if isinstance(target, ast.Name) and len(inside) == 1:
        renamed = copy.deepcopy(node)
        for each in ast.walk(renamed):
            if isinstance(each, ast.Name) and each.id == target.id:
                each.id = f"the_{target.id}"
        if ast.dump(renamed.generators[0].iter) == ast.dump(node.generators[0].iter):
            yield ast.unparse(renamed)


def reversed_sum(node: ast.AST):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id == "sum" and len(node.args) == 1:
            yield f"sum(reversed(list({ast.unparse(node.args[0])})))"


def other_letters(node: ast.AST):
    """Of an einsum: each letter becomes the one that has its place from the end of the alphabet."""
    if called(node) != "einsum" or not isinstance(node.args[0], ast.Constant):
        return
    spelled = node.args[0].value
    if SPELLED.fullmatch(spelled):
        letters = sorted(set(filter(str.isalpha, spelled)))
        other = str.maketrans(dict(zip(letters, "zyxwvutsrqponmlkjihg")))
        rest = [ast.unparse(each) for each in (*node.args[1:], *node.keywords)]
        yield f"{ast.unparse(node.func)}({', '.join([repr(spelled.translate(other)), *rest])})"


OPERATORS = {each.__name__.replace("_", " "): each for each in (
    exchanged_operands, regrouped, turned_comparison, turned_condition, named_value,
    renamed_variable, reversed_sum, other_letters)}


def other_sizes():
    """Each constant such as BLOCK, twice as large: the result is computed in other pieces."""
    for path in sorted((ROOT / "meshbook").glob("*/*.py")):
        file = f"{path.parent.name}/{path.stem}"
        for name, node in syntax.definitions(ast.parse(path.read_text("utf8"))).items():
            if SIZE.fullmatch(name):
                was = ast.unparse(node.value)
                yield Generated(file, Slip(name, ("value",), "other size", was, f"2 * ({was})"))


def drawn():
    """The variants of the record's seed: folders take turns, and in each folder operators do."""
    sizes = list(other_sizes())
    return sizes + generated.drawn(SEED, COUNT - len(sizes), OPERATORS)


def main(words):
    part, _, parts = (words or ["1/1"])[0].partition("/")
    rows = generated.rows_of(drawn()[int(part) - 1::int(parts)], generated.FIRST)
    for row in rows:
        row["verdict"] = {"survived": "passed", "caught": "alarm"}.get(row["verdict"], "killed")
    alarms = [row["name"] for row in rows if row["verdict"] == "alarm"]
    print(json.dumps({"variants": len(rows), "alarms": len(alarms)}))
    if not words:
        source = {"machine": machine(), **provenance("python -m benchmarks.variants")}
        record = {"provenance": source, "seed": SEED, "alarms": len(alarms), "variants": rows}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf8")
    if alarms:
        sys.exit(f"false alarms: {'; '.join(alarms)}")


if __name__ == "__main__":
    main(sys.argv[1:])
