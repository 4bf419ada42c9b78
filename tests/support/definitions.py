"""What some code defines, as syntax trees that can be compared."""
import ast
import functools

from benchmarks.syntax import Bare


@functools.cache
def definitions(code):
    """{name: syntax tree} of the functions, classes and constants at the top of some code."""
    found = {}
    for node in ast.parse(code).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = ast.dump(Bare().visit(node))
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "a").isupper():
            found[node.targets[0].id] = ast.dump(node)
    return found


@functools.cache
def members(code):
    """{class: {method or field: syntax tree}} of the classes at the top of some code."""
    named = lambda node: getattr(node, "name", None) or getattr(
        getattr(node, "target", None), "id", "")
    return {node.name: {named(each): ast.dump(each) for each in Bare().visit(node).body}
            for node in ast.parse(code).body if isinstance(node, ast.ClassDef)}
