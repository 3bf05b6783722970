"""Types of the kernels' package: only what Triton compiles may go without; mypy has to be told to let it."""

import ast
from pathlib import Path

import pytest

import kernels

PACKAGE = Path(kernels.__file__).parent


def decorated_with_jit(function):
    """``@triton.jit``, ``@gluon.jit``, called or not."""
    names = (ast.unparse(x.func if isinstance(x, ast.Call) else x) for x in function.decorator_list)
    return any(name in ("triton.jit", "gluon.jit") for name in names)


def unannotated(source):
    """Names of functions with a parameter or result that has no type, those that Triton compiles left out."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or decorated_with_jit(node):
            continue
        a = node.args
        given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
        untyped = [x for x in given if x.annotation is None and x.arg not in ("self", "cls")]
        if untyped or node.returns is None:
            found.append(node.name)
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda x: str(x.relative_to(PACKAGE)))
def test_everything_but_jit_functions_is_annotated(path):
    assert unannotated(path.read_text()) == []


SOURCE = """
def f(x): ...
def g(x: int): ...
def h(*, y) -> int: ...
@triton.jit
def k(x): ...
@triton.jit(debug=True)
def m(x): ...
@cache
def n(x) -> int: ...
def o(self, x: int) -> int: ...
"""


def test_what_is_not_annotated_is_found():
    assert unannotated(SOURCE) == ["f", "g", "h", "n"]
