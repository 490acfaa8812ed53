"""Signatures on the API page, as they are written in the source.

Sphinx would spell out every name for a type: ``Sampler`` would be a ``Callable`` of a
``Callable``. This extension gives it the text of the source instead. The space that
keeps linters from taking the shape " dim" for a name is left out.
"""

import ast
import inspect
import textwrap
from typing import Any


def field(node: ast.AnnAssign) -> str:
    """A field of a named tuple, as an argument."""
    default = f" = {ast.unparse(node.value)}" if node.value else ""
    return f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{default}"


def written(source: str, bound: bool = False) -> tuple[str, str | None]:
    """Arguments and return type of a function, or the fields of a class.

    ``bound`` leaves out the first argument, which a method gets by itself.
    """
    node = ast.parse(textwrap.dedent(source)).body[0]
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            part.value = part.value.strip()
    if isinstance(node, ast.ClassDef):
        fields = [field(part) for part in node.body if isinstance(part, ast.AnnAssign)]
        return f"({', '.join(fields)})" if fields else "", None
    assert isinstance(node, ast.FunctionDef)
    if bound:
        del node.args.args[0]
    returns = ast.unparse(node.returns) if node.returns else None
    return f"({ast.unparse(node.args)})", returns


def replace(
    app: Any, what: str, name: str, item: Any, *_: Any
) -> tuple[str, str | None] | None:
    """Answer autodoc's question for a signature; None leaves it as it is."""
    if what not in ("class", "function", "method"):
        return None
    return written(inspect.getsource(item), bound=what == "method")


def setup(app: Any) -> dict[str, bool]:
    """What Sphinx calls."""
    app.connect("autodoc-process-signature", replace)
    return {"parallel_read_safe": True}
