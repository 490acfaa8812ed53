"""The public names, which are those on the API page: documented, typed, with shapes."""

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import jaxtyping
import numpy as np
import pytest
import signatures
from jaxtyping import Float

Number = int | float
PAGE = Path(__file__).parents[1] / "book" / "api.md"
LINE = re.compile(r"^\.\. (currentmodule|autoclass|autofunction):: (\S+)$", re.M)


def public(page: str) -> list[tuple[str, str]]:
    """Every name on the page, with its module."""
    found, module = [], ""
    for kind, name in LINE.findall(page):
        if kind == "currentmodule":
            module = name
        else:
            found.append((module, name))
    return found


NAMES = public(PAGE.read_text(encoding="utf-8"))
each_name = pytest.mark.parametrize(("module", "name"), NAMES)


def syntax(item) -> ast.FunctionDef | ast.ClassDef:
    return ast.parse(textwrap.dedent(inspect.getsource(item))).body[0]


def functions(node) -> list[ast.FunctionDef]:
    """The function, or the methods of the class."""
    parts = [node] if isinstance(node, ast.FunctionDef) else node.body
    return [part for part in parts if isinstance(part, ast.FunctionDef)]


def missing_types(node) -> list[str]:
    """Arguments and returns without an annotation."""
    found = []
    for function in functions(node):
        arguments = function.args
        every = arguments.posonlyargs + arguments.args + arguments.kwonlyargs
        every += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
        found += [a.arg for a in every if a.annotation is None and a.arg != "self"]
        found += [f"{function.name}()"] if function.returns is None else []
    return found


def annotations(node) -> list[ast.expr]:
    """All annotations of a function, of its arguments, or of fields and methods."""
    found = []
    if isinstance(node, ast.ClassDef):
        found += [p.annotation for p in node.body if isinstance(p, ast.AnnAssign)]
    for function in functions(node):
        arguments = [a for a in ast.walk(function.args) if isinstance(a, ast.arg)]
        found += [function.returns, *(a.annotation for a in arguments)]
    return [annotation for annotation in found if annotation is not None]


def shapeless(node: ast.AST) -> list[str]:
    """Arrays in an annotation that have no shape. What a Callable takes is its own."""
    if isinstance(node, ast.Subscript):
        name = ast.unparse(node.value)
        if name == "Callable":
            return []
        if hasattr(jaxtyping, name):
            _, shape = node.slice.elts
            return [] if isinstance(shape.value, str) else [name]
    if isinstance(node, ast.Name | ast.Attribute):
        return [n for n in [ast.unparse(node)] if n.split(".")[-1] in ARRAYS]
    return [name for part in ast.iter_child_nodes(node) for name in shapeless(part)]


ARRAYS = {"Array", "ndarray"}


def test_page_lists_each_name_once_where_it_is_defined():
    assert len(NAMES) > 60 and len(set(NAMES)) == len(NAMES)
    assert len({module for module, _ in NAMES}) >= 11
    for module, name in NAMES:
        item = getattr(importlib.import_module(module), name)
        assert item.__module__ == module, name


def test_page_has_the_right_directive():
    for kind, name in LINE.findall(PAGE.read_text(encoding="utf-8")):
        if kind != "currentmodule":
            assert kind == ("autoclass" if name[0].isupper() else "autofunction"), name


@each_name
def test_example(module, name):
    doc = inspect.getdoc(getattr(importlib.import_module(module), name))
    *_, examples = doc.partition("\nExamples\n--------\n")
    assert ">>> " in examples


@each_name
def test_everything_is_annotated(module, name):
    assert missing_types(syntax(getattr(importlib.import_module(module), name))) == []


@each_name
def test_arrays_have_shapes(module, name):
    node = syntax(getattr(importlib.import_module(module), name))
    found = [array for each in annotations(node) for array in shapeless(each)]
    assert found == []


@pytest.mark.parametrize(
    ("source", "arrays"),
    [
        ("def f(x: Array, *y: np.ndarray, **z: Array | None) -> list[Array]: ...", 4),
        ("class A:\n    x: Array\n    def f(self, y: Array) -> int: ...", 2),
        ('def f(x: Float[Array, "a b"], y: ArrayLike) -> Key[Array, ""]: ...', 0),
        ("def f(x: Callable[[Array], Array]) -> Density: ...", 0),
        ('def f(x: Float[Array, "a"] | Array) -> tuple[int, np.ndarray]: ...', 2),
    ],
)
def test_shapeless_arrays_are_found(source, arrays):
    node = ast.parse(source).body[0]
    found = [array for each in annotations(node) for array in shapeless(each)]
    assert len(found) == arrays


def test_missing_types_are_found():
    source = "class A:\n    def f(self, x, *y, z: int, **more): ..."
    assert missing_types(ast.parse(source).body[0]) == ["x", "y", "more", "f()"]


class Pair(NamedTuple):
    first: Number
    second: Number = 0

    def double(self, both: bool = True) -> Float[np.ndarray, " two"]:
        return np.full(2, 2 * self.first)


def test_signatures_are_those_of_the_source():
    def signature(what, item):
        return signatures.replace(None, what, "name", item, None, "", "")

    assert signature("class", Pair) == ("(first: Number, second: Number = 0)", None)
    assert signature("method", Pair.double) == (
        "(both: bool=True)",
        "Float[np.ndarray, 'two']",
    )
    assert signature("function", Pair.double)[0] == "(self, both: bool=True)"
    assert signature("property", Pair.double) is None
