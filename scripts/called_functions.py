"""Find the function that a call in the source calls, where the names in the source determine it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Definition(NamedTuple):
    """A function or class: the path of its module and its qualified name. A module's name is ""."""

    path: str
    name: str


OS_ERROR = Definition("", "OSError.__init__")
"""The constructor of OSError. It is the only definition from other modules that called() may return."""


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield the qualified name and the node of the module, each class and each function."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield prefix + child.name, child
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)

    yield "", tree
    yield from walk(tree, "")


def own_calls(function: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in a function, but not those in functions and classes that it defines."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.ClassDef):
            if isinstance(child, ast.Call):
                yield child
            yield from own_calls(child)


class CalledFunctions:
    """The functions that calls in a set of modules call. `modules`: map path -> syntax tree."""

    def __init__(self, modules: Mapping[str, ast.Module]) -> None:
        self.nodes = {
            Definition(path, name): node for path, tree in modules.items() for name, node in functions(tree)
        }
        self._imported = {path: dict(self._imports(tree)) for path, tree in modules.items()}

    def called(self, caller: Definition, call: ast.Call) -> Definition | None:
        """Return the function that `call` in the function `caller` calls; None if the names leave it open.

        For a class, return its constructor. A method of `self` is looked up in the class around the caller,
        and in the bases of this class. A subclass may override the method that is found.
        """
        match call.func:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                owner = self._class_around(caller)
                return self._method(owner, name) if owner else None
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                owner = self._class_around(caller)
                return self._inherited(owner, name) if owner else None
        found = self._named(caller, call.func)
        if found is not None and (found == OS_ERROR or isinstance(self.nodes[found], ast.ClassDef)):
            return found if found == OS_ERROR else self._method(found, "__init__")
        return found if found is not None and not self._is_unbound(found) else None

    def _imports(self, tree: ast.Module) -> Iterator[tuple[str, Definition]]:
        """Yield the names that a module imports from the other modules."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for each in node.names:
                    yield each.asname or each.name, self._member(node.module, each.name)
            elif isinstance(node, ast.Import):
                for each in node.names:
                    if each.asname:
                        yield each.asname, Definition(self._path(each.name), "")

    def _member(self, module: str, name: str) -> Definition:
        submodule = Definition(self._path(f"{module}.{name}"), "")
        return submodule if submodule in self.nodes else Definition(self._path(module), name)

    def _path(self, module: str) -> str:
        path = module.replace(".", "/")
        package = f"{path}/__init__.py"
        return package if Definition(package, "") in self.nodes else f"{path}.py"

    def _named(self, scope: Definition, value: ast.expr) -> Definition | None:
        """Return the definition that an expression, such as `module.name`, means in the function `scope`.

        Return None if the names leave it open.
        """
        if isinstance(value, ast.Subscript):
            return self._named(scope, value.value)
        if isinstance(value, ast.Attribute):
            owner = self._named(scope, value.value)
            return (
                self._known(Definition(owner.path, f"{owner.name}.{value.attr}".lstrip(".")))
                if owner
                else None
            )
        if not isinstance(value, ast.Name):
            return None
        outer = scope.name
        while outer:
            node = self.nodes[scope.path, outer]
            if isinstance(node, ast.FunctionDef):
                if (found := Definition(scope.path, f"{outer}.{value.id}")) in self.nodes:
                    return found
                if value.id in _variables(node):
                    return None
            outer = outer.rpartition(".")[0]
        found = self._known(Definition(scope.path, value.id))
        return OS_ERROR if found is None and value.id == "OSError" else found

    def _known(self, found: Definition) -> Definition | None:
        """Return `found` if a module defines it; if it is an import, return the imported definition.

        Return None if `found` is neither.
        """
        if found in self.nodes:
            return found
        imported = self._imported.get(found.path, {}).get(found.name)
        return self._known(imported) if imported not in (None, found) else None

    def _class_around(self, function: Definition) -> Definition | None:
        outer = function.name
        while outer:
            if isinstance(self.nodes[function.path, outer], ast.ClassDef):
                return Definition(function.path, outer)
            outer = outer.rpartition(".")[0]
        return None

    def _method(self, owner: Definition, name: str) -> Definition | None:
        found = Definition(owner.path, f"{owner.name}.{name}")
        return found if found in self.nodes else self._inherited(owner, name)

    def _inherited(self, owner: Definition, name: str) -> Definition | None:
        node = self.nodes[owner]
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            above = self._named(owner, base)
            if above == OS_ERROR:
                return OS_ERROR if name == "__init__" else None
            if above is not None and (found := self._method(above, name)) is not None:
                return found
        return None

    def _is_unbound(self, function: Definition) -> bool:
        """Return True if `function` is a method: a call through its class passes `self` as an argument."""
        node = self.nodes[function]
        return isinstance(node, ast.FunctionDef) and [each.arg for each in node.args.args[:1]] == ["self"]


def assigned(function: ast.FunctionDef) -> set[str]:
    """Return the names that a function sets."""
    return {
        each.id
        for each in ast.walk(function)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }


def _variables(function: ast.FunctionDef) -> set[str]:
    """Return the names of a function's arguments and of the variables that it sets."""
    arguments = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    return arguments | assigned(function)
