"""Slips: small edits of a syntax tree, of the kinds that people make; other text stays as it is.

An operator is a function of a node: it yields the sources that may stand in the node's place.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks import syntax

AXES = {"batch": "model", "model": "batch", "stage": "batch", "expert": "model",
        "context": "model"}
NUMBERED = {"axis", "split_axis", "concat_axis", "scatter_dimension", "all_gather_dimension"}
TYPES = {"float32": "bfloat16", "bfloat16": "float32", "uint32": "uint16", "int32": "int16",
         "float64": "float32", "int64": "int32"}
REDUCTIONS = {"sum": "mean", "mean": "sum", "psum": "pmean", "pmean": "psum"}
EXCHANGES = {"psum", "pmean", "pmax", "ppermute"}
BOUNDS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
ORDERED = {ast.Sub: "-", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.MatMult: "@",
           ast.Pow: "**"}


def source(node: ast.expr):
    """The node's source, in parentheses where its neighbours could tear it apart."""
    text = ast.unparse(node)
    return text if isinstance(node, (ast.Name, ast.Constant, ast.Attribute, ast.Call,
                                     ast.Subscript)) else f"({text})"


def called(node: ast.AST):
    """The last name of the function that is called, or None."""
    func = node.func if isinstance(node, ast.Call) else None
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", None)


def off_by_one(node: ast.AST):
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield str(node.value + 1)
        if node.value > 0:
            yield str(node.value - 1)


def dropped_term(node: ast.AST):
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div,
                                                            ast.FloorDiv)):
        yield source(node.left)
        if isinstance(node.op, (ast.Add, ast.Mult)):
            yield source(node.right)


def swapped_operands(node: ast.AST):
    if isinstance(node, ast.BinOp) and type(node.op) in ORDERED:
        yield f"({source(node.right)} {ORDERED[type(node.op)]} {source(node.left)})"
    if called(node) == "where" and len(node.args) == 3:
        test, yes, no = map(ast.unparse, node.args)
        yield f"{ast.unparse(node.func)}({test}, {no}, {yes})"


def swapped_axis(node: ast.AST):
    if isinstance(node, ast.Constant) and node.value in AXES:
        yield repr(AXES[node.value])
    if isinstance(node, ast.keyword) and node.arg in NUMBERED:
        value = node.value.operand if isinstance(node.value, ast.UnaryOp) else node.value
        if isinstance(value, ast.Constant) and type(value.value) is int:
            yield f"{node.arg}={1 if ast.unparse(node.value) == '0' else 0}"


def wrong_dtype(node: ast.AST):
    if isinstance(node, ast.Attribute) and node.attr in TYPES:
        yield f"{ast.unparse(node.value)}.{TYPES[node.attr]}"
    if called(node) == "astype" and isinstance(node.func, ast.Attribute):
        yield source(node.func.value)


def mean_for_sum(node: ast.AST):
    if isinstance(node, ast.Attribute) and node.attr in REDUCTIONS:
        yield f"{source(node.value)}.{REDUCTIONS[node.attr]}"


def moved_bound(node: ast.AST):
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in BOUNDS:
        yield (f"({source(node.left)} {BOUNDS[type(node.ops[0])]} "
               f"{source(node.comparators[0])})")


def stale_variable(node: ast.AST):
    """The statement that gives a name its new value is not there."""
    if isinstance(node, ast.AugAssign):
        yield "pass"
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        names = {each.id for each in ast.walk(node.targets[0]) if isinstance(each, ast.Name)}
        read = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
        if isinstance(node.targets[0], ast.Name) and names & read:
            yield "pass"


def dropped_exchange(node: ast.AST):
    if called(node) in EXCHANGES and node.args:
        yield source(node.args[0])


def skipped_branch(node: ast.AST):
    """Of an expression; `slips` skips statements."""
    if isinstance(node, ast.IfExp):
        yield source(node.orelse)
        yield source(node.body)


OPERATORS = {each.__name__.replace("_", " "): each for each in (
    off_by_one, dropped_term, swapped_operands, swapped_axis, wrong_dtype, mean_for_sum,
    moved_bound, stale_variable, dropped_exchange, skipped_branch)}


@dataclass(frozen=True)
class Slip:
    """One edit: its function, the path of a node below that, the operator, what it finds and writes.

    function: a qualified name of `syntax.definitions`.
    path: names of fields and places in them, from the function's node to the edited one.
    """

    function: str
    path: tuple
    operator: str
    was: str
    becomes: str

    def __str__(self):
        path = ".".join(map(str, self.path))
        return f"{self.function or 'the module'}: {self.operator} at {path}"


def slips(text: str, operators: dict = OPERATORS):
    """All slips of a module by these operators, in the order of its text."""
    for function, node in _definitions(text).items():
        for path, each in below(node):
            for name, operator in operators.items():
                yield from (Slip(function, path, name, ast.unparse(each), becomes)
                            for becomes in operator(each))
            if isinstance(each, ast.If) and "skipped branch" in operators:
                yield Slip(function, (*path, "test"), "skipped branch",
                           ast.unparse(each.test), "False")


def _definitions(text: str):
    """{qualified name: node} without docstrings: a page may show a function without its own."""
    return syntax.definitions(syntax.Bare().visit(syntax.parsed(text)))


def below(node: ast.AST, path: tuple = ()) -> Iterator[tuple[tuple, ast.AST]]:
    """(path, node) of what a program executes below a node; what has a name of its own is not."""
    for field, value in ast.iter_fields(node):
        several = isinstance(value, list)
        for place, child in enumerate(value if several else [value]):
            if not isinstance(child, ast.AST) or is_said(node, field, child):
                continue
            if syntax.defined(child, node):
                continue
            here = (*path, field, place) if several else (*path, field)
            yield here, child
            yield from below(child, here)


def is_said(node: ast.AST, field: str, child: ast.AST):
    """Whether this is text for people, a type, or a name: no value that is computed with."""
    return (field in ("annotation", "returns", "decorator_list", "msg", "type_params")
            or isinstance(child, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom))
            or isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            or isinstance(node, ast.Call) and str(called(node)).endswith("Error"))


def reached(node: ast.AST, path: tuple):
    """The node at the end of a path."""
    for step in path:
        node = node[step] if isinstance(node, list) else getattr(node, step)
    return node


def edited(text: str, slip: Slip):
    """The text with a slip in it. Raises ValueError where something else stands at its place."""
    try:
        node = reached(_definitions(text)[slip.function], slip.path)
    except (KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"{slip}: expected {slip.was} there, found nothing") from error
    if ast.unparse(node) != slip.was:
        raise ValueError(f"{slip}: expected {slip.was} there, found {ast.unparse(node)}")
    return syntax.put(text, node, slip.becomes)
