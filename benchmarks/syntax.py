"""Nodes of a syntax tree: found by the shape of their code in a function, and edited in place.

A shape is code in which every name stands as `_` and every sentence as '…'. So a rename changes no
shape, and other code may move: the second of three `_ - 1` is found wherever these stand.
"""

import ast
import copy
import re
import textwrap
import threading
from collections.abc import Iterator

NAMED = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg",
         ast.FunctionDef: "name", ast.ClassDef: "name", ast.ExceptHandler: "name"}
MARK = re.compile(r"__(\d+)__")
PARSING = threading.Lock()
FILLED = re.compile(r"\$(\d+)")


def parsed(text: str):
    """The syntax tree of a text, in whatever thread: CPython 3.11 counts the depth of one parser."""
    with PARSING:
        return ast.parse(text)


def definitions(tree: ast.Module):
    """{qualified name: node} of what a module defines, "" for the module itself.

    These are functions, classes, their methods and fields, and constants.
    """
    found = {"": tree}

    def enter(node, names):
        for child in node.body:
            name = defined(child, node)
            if name:
                found[".".join([*names, name])] = child
            if isinstance(child, ast.ClassDef):
                enter(child, [*names, name])

    enter(tree, [])
    return found


def defined(node: ast.AST, parent: ast.AST):
    """The name that a node defines, or None: what a module computes in small letters has none."""
    if not isinstance(parent, (ast.Module, ast.ClassDef)):
        return None
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(targets[0], ast.Name):
        name = targets[0].id
        return None if isinstance(parent, ast.Module) and name.islower() else name
    return node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None


class Bare(ast.NodeTransformer):
    """The syntax tree without docstrings and annotations."""

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
            node.body = node.body[1:] or [ast.Pass()]
        if hasattr(node, "returns"):
            node.returns = None
        return node

    visit_ClassDef = visit_FunctionDef

    def visit_arg(self, node):
        node.annotation = None
        return node


def same(node: ast.AST, other: ast.AST):
    """Whether two nodes are the same code but for docstrings and annotations."""
    node, other = (ast.dump(Bare().visit(copy.deepcopy(each))) for each in (node, other))
    return node == other


def below(node: ast.AST) -> Iterator[ast.AST]:
    """What stands below a node, in the order of the text, without what has a name of its own."""
    for child in ast.iter_child_nodes(node):
        if defined(child, node):
            continue
        yield child
        if not isinstance(child, ast.JoinedStr):  # what is in a string has no place before 3.12
            yield from below(child)


def shape(node: ast.AST):
    """(shape, names) of a node: its code, names as `_`, and these names in the order of the text.

    Of a statement with statements in it, the shape has the first line.
    """
    node, names = copy.deepcopy(node), []
    for each in ast.walk(node):
        field = NAMED.get(type(each))
        if field and getattr(each, field):
            names.append(getattr(each, field))
            setattr(each, field, f"__{len(names) - 1}__")
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and " " in each.value:
            each.value = "…"
    code = ast.unparse(node)
    first, *more = code.splitlines() or [""]
    return (MARK.sub("_", first) + " ..." * bool(more),
            [names[int(number)] for number in MARK.findall(code)])


def located(node: ast.AST, wanted: str, which: int, of: int):
    """The node of this shape below another, the which-th of so many (from 1).

    Raises ValueError where there are not so many.
    """
    found = [each for each in places(node) if shape(each)[0] == wanted]
    if len(found) != of:
        raise ValueError(f"expected {of} of the shape {wanted}, found {len(found)}")
    return found[which - 1]


def places(node: ast.AST):
    """The nodes below another that have a place in the text; a call that is a statement, once."""
    found = [each for each in below(node) if hasattr(each, "lineno")]
    said = {id(each.value) for each in found if isinstance(each, ast.Expr)}
    return [each for each in found if id(each) not in said]


def replaced(text: str, node: ast.AST, becomes: str):
    """The text with other code in the place of a node.

    In it $1 stands for the node's first name, $2 for its second, and $0 for the whole node.
    """
    begin, end = span(text, node)
    said = [text.encode()[begin:end].decode(), *shape(node)[1]]
    code = FILLED.sub(lambda mark: said[int(mark[1])], becomes)
    if isinstance(node, ast.stmt):
        code = textwrap.indent(code, " " * node.col_offset).lstrip()
    return put(text, node, code)


def put(text: str, node: ast.AST, code: str):
    """The text with this code where a node stands."""
    (begin, end), whole = span(text, node), text.encode()
    return (whole[:begin] + code.encode() + whole[end:]).decode()


def span(text: str, node: ast.AST):
    """Where a node stands in the text: (first byte, first byte after it)."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    first = min([node, *getattr(node, "decorator_list", [])], key=lambda each: each.lineno)
    at = first.col_offset - (first is not node)  # a decorator's @
    return starts[first.lineno - 1] + at, starts[node.end_lineno - 1] + node.end_col_offset
