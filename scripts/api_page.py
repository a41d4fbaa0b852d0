#!/usr/bin/env python3
"""Write docs/reference/api.md from the docstrings of the public classes; with --check, only compare.

The page is made from the source, not from imported objects. It thus has the annotations as they are written,
and the docstrings of fields, which are string expressions after the fields.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

WIDTH = 108
"""Maximum number of columns in a signature's lines."""
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "emulated_kernel"
PAGE = ROOT / "docs" / "reference" / "api.md"
INTRODUCTION = """\
# The Python API

    from emulated_kernel import Kernel, Kprobe

All names below are imported from `emulated_kernel`. [A first probe](../guide/first-probe.md) has an example.
[The library in a script](../guide/library.md) shows how they are used together.
[Handlers in assembly](../guide/assembly.md) describes `code`, `post_code` and `return_code`. Addresses are
virtual, sizes are in bytes. `Mirrors:` names the function of Linux that a method follows. In signatures,
`RegsT` is the type of the registers that handlers get, `Regs` is any such type, and `GuestAddr` is an int.

This page is generated from the docstrings by `scripts/api_page.py`.
"""
SECTIONS: dict[str, tuple[str, ...]] = {
    "The kernel": (
        "Kernel",
        "MachineConfig",
        "ARCHITECTURES",
        "ElfMachine",
        "Limits",
        "Limit",
        "Profile",
        "PROFILES",
        "Stepper",
        "RegisterSaving",
        "TrampolineForm",
        "QuiesceMethod",
    ),
    "Probes": (
        "Kprobe",
        "Kretprobe",
        "KretprobeInstance",
        "Fprobe",
        "FprobeRegs",
        "Jprobe",
        "Jprobes",
        "KprobeFlag",
        "PerCpuVars",
    ),
    "Types of handlers": (
        "PreHandler",
        "PostHandler",
        "FaultHandler",
        "BreakHandler",
        "KretprobeHandler",
        "FprobeHandler",
        "JprobeHandler",
    ),
    "Registers of handlers": ("X86Regs", "I386Regs", "RiscvRegs"),
    "Results": ("HitRing", "RingEntry", "Message", "ModuleInfo"),
    "Errors": ("KernelError", "MemoryFault"),
    "For front ends": (
        "RootLayout",
        "Owner",
        "Mount",
        "NodeTree",
        "Node",
        "Client",
        "ProcessWatch",
        "ControlLock",
    ),
}
"""Title -> public names, in their order on the page."""
SHORT = {
    "Client",
    "ControlLock",
    "ElfMachine",
    "Jprobes",
    "Mount",
    "Node",
    "NodeTree",
    "Owner",
    "ProcessWatch",
}
"""Classes for which the page shows only the docstring, because most users only pass their objects on."""
NO_CONSTRUCTOR = {
    "HitRing",
    "KretprobeInstance",
    "MemoryFault",
    "Message",
    "ModuleInfo",
    "PerCpuVars",
    "RingEntry",
}
"""Classes whose objects users do not create, because only the kernel creates them."""
INTERNAL = {"program", "return_program", "entry_program", "exit_program", "hook", "node", "raised"}
"""Names of fields that only kprobefs itself uses, and that the page omits."""
KNOWN_BASES = ("ABC", "Enum", "Exception", "Flag", "IntEnum", "OSError", "Protocol")
_GROUP = re.compile(r"^    # (?P<title>[^#]+)$")


def public_modules() -> dict[str, str]:
    """Return a map public name -> module, from the table in the package's __init__."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":
            return dict(ast.literal_eval(node.value))
    raise LookupError("emulated_kernel/__init__.py: it has no table _MODULES")


class Source:
    """The source of one module."""

    def __init__(self, module: str) -> None:
        """Read the source of the package's module `module`."""
        text = (PACKAGE / f"{module.replace('.', '/')}.py").read_text()
        self.lines = text.splitlines()
        self.body = ast.parse(text).body

    def find(self, name: str) -> ast.ClassDef | ast.AnnAssign:
        """Return the class or annotated constant called `name`; an alias `NAME = CLASS` is followed."""
        for node in self.body:
            match node:
                case ast.ClassDef(name=found) if found == name:
                    return node
                case ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                    return node
                case ast.Assign(targets=[ast.Name(id=found)], value=ast.Name(id=other)) if found == name:
                    return self.imported(other)
        raise LookupError(f"{name}: no class or annotated constant of this name")

    def imported(self, name: str) -> ast.ClassDef | ast.AnnAssign:
        """Return the class or annotated constant that the module imports under the name `name`."""
        for node in self.body:
            if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
                module = str(node.module).removeprefix(f"{PACKAGE.name}.")
                return Source(module).find(name)
        raise LookupError(f"{name}: it is not imported")

    def group(self, node: ast.stmt, after: int) -> str | None:
        """Return the comment that heads the group of methods of `node`; None if there is no such comment.

        The comment must be between the line `after` and the node.
        """
        for line in self.lines[after : node.lineno]:
            found = _GROUP.match(line)
            if found is not None:
                return found["title"]
        return None


def document(body: list[ast.stmt], number: int) -> str:
    """Return the docstring after the field or constant `body[number]`, or "" if there is no docstring."""
    match body[number + 1 : number + 2]:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return cleandoc(text)
    return ""


def fields(found: ast.ClassDef) -> Iterator[tuple[ast.AnnAssign, str]]:
    """Yield the annotated attributes of a class, with their docstrings."""
    for number, node in enumerate(found.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node, document(found.body, number)


def is_argument(node: ast.AnnAssign) -> bool:
    """Return True if a field of a dataclass is an argument of its constructor."""
    name = ast.unparse(node.target)
    return not name.startswith("_") and name not in INTERNAL and "init=False" not in default(node)


def is_public_field(node: ast.AnnAssign) -> bool:
    """Return True if users may read a field."""
    name = ast.unparse(node.target)
    return not name.startswith("_") and name not in INTERNAL


def constructor(name: str, source: Source, found: ast.ClassDef) -> str:
    """Return the call that creates an object of a class, as a code block; "" if users create no objects."""
    made = next((each for each in found.body if getattr(each, "name", "") == "__init__"), None)
    if isinstance(made, ast.FunctionDef):
        given = signature(made).removeprefix("__init__").removesuffix(" -> None")[1:-1]
        parts = re.split(r", (?=\w+:|\*)", given)
    elif any("dataclass" in ast.unparse(each) for each in found.decorator_list):
        parts = [
            f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{shown_default(node)}"
            for node in arguments(source, found)
        ]
    else:
        return ""
    lines = [f"    {name}("]
    for part in parts:
        if len(lines[-1]) + len(part) > WIDTH:
            lines.append("        ")
        lines[-1] += f"{part}, "
    return "\n".join(line.rstrip() for line in lines).rstrip(",") + ")"


def arguments(source: Source, found: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    """Yield the fields of a dataclass that its constructor takes; those of its base class come first."""
    for base in found.bases:
        if ast.unparse(base).partition("[")[0] == "Kprobe":
            parent = source.imported("Kprobe")
            assert isinstance(parent, ast.ClassDef)
            yield from arguments(source, parent)
    for node, _ in fields(found):
        if is_argument(node):
            yield node


def default(node: ast.AnnAssign) -> str:
    """Return the source of a field's default value, or "" if it has no default."""
    return "" if node.value is None else ast.unparse(node.value)


def shown_default(node: ast.AnnAssign) -> str:
    """Return ` = DEFAULT` for a field in the constructor's signature, or "" if it has no default.

    For a field(), only its default is shown.
    """
    value = node.value
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
        if "default_factory" in given:
            return f" = {given['default_factory']}()"
        return f" = {given['default']}" if "default" in given else ""
    return "" if value is None else f" = {ast.unparse(value)}"


def item(signature: str, text: str) -> str:
    """Return a list item: a signature, and a docstring in paragraphs."""
    paragraphs = text.split("\n\n") if text else []
    first = f"- `{signature}`" + (f": {' '.join(paragraphs[0].split())}" if paragraphs else "")
    return "\n\n".join([first, *(f"    {' '.join(each.split())}" for each in paragraphs[1:])])


def signature(node: ast.FunctionDef) -> str:
    """Return a method's name, arguments without self, and result."""
    arguments = ast.unparse(node.args)
    arguments = arguments.removeprefix("self").removeprefix(", ").removeprefix("/, ")
    arguments = re.sub(r"(?<=\S)=(?=\S)", " = ", arguments)
    result = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"{node.name}({arguments}){result}"


def is_property(node: ast.FunctionDef) -> bool:
    """Return True if a method is a property."""
    return any(ast.unparse(each).endswith("property") for each in node.decorator_list)


def is_setter(node: ast.FunctionDef) -> bool:
    """Return True if a method is the setter of a property."""
    return any(ast.unparse(each).endswith(".setter") for each in node.decorator_list)


def methods(source: Source, found: ast.ClassDef) -> Iterator[str]:
    """Yield headings and items of the public methods and properties."""
    after = found.lineno
    for node in found.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        heading = source.group(node, after)
        if heading is not None and any(public(each) for each in members_of_group(source, found, node)):
            yield f"**{heading}**"
        after = node.end_lineno or after
        if public(node):
            text = ast.get_docstring(node) or ""
            if is_property(node):
                result = "" if node.returns is None else f": {ast.unparse(node.returns)}"
                yield item(f"{node.name}{result}", text)
            else:
                yield item(signature(node), text)


def members_of_group(
    source: Source, found: ast.ClassDef, first: ast.FunctionDef
) -> Iterator[ast.FunctionDef]:
    """Yield the methods of a group: from its first method to the heading of the next group."""
    after = None
    for node in found.body:
        if not isinstance(node, ast.FunctionDef) or node.lineno < first.lineno:
            continue
        if after is not None and source.group(node, after) is not None:
            return
        after = node.end_lineno or node.lineno
        yield node


def public(node: ast.FunctionDef) -> bool:
    """Return True if a method belongs to the public API."""
    return not node.name.startswith("_") and not is_setter(node)


def class_entry(name: str, source: Source, found: ast.ClassDef) -> Iterator[str]:
    """Yield the parts of a class's entry: heading, docstring, fields, methods."""
    bases = [ast.unparse(each) for each in found.bases]
    is_registers = "Protocol" in bases
    is_enum = "Enum" in bases or "Flag" in bases
    shown = [
        each for each in bases if each.partition("[")[0] in ("Kprobe", "OSError", "Exception", "Enum", "Flag")
    ]
    yield f"### {name}" + (f" ({', '.join(shown)})" if shown else "")
    if name not in SHORT | NO_CONSTRUCTOR and not is_enum and not is_registers:
        yield constructor(name, source, found)
    yield ast.get_docstring(found) or ""
    if name in SHORT:
        return
    if is_registers:
        yield "Attributes: " + ", ".join(f"`{ast.unparse(node.target)}`" for node, _ in fields(found)) + "."
        return
    if is_enum:
        for number, node in enumerate(found.body):
            if isinstance(node, ast.Assign) and not ast.unparse(node.targets[0]).startswith("_"):
                yield item(ast.unparse(node.targets[0]), document(found.body, number))
        return
    if any("dataclass" in ast.unparse(each) for each in found.decorator_list) and name not in NO_CONSTRUCTOR:
        for node, text in fields(found):
            if not is_argument(node):
                continue
            yield item(
                f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{shown_default(node)}", text
            )
    for node, text in fields(found):
        if is_public_field(node) and (name in NO_CONSTRUCTOR or not is_argument(node)):
            yield item(f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}", text)
    yield from methods(source, found)
    yield from inherited(source, found)


def inherited(source: Source, found: ast.ClassDef) -> Iterator[str]:
    """Yield the properties that come from base classes without an entry of their own."""
    for base in found.bases:
        if isinstance(base, ast.Name) and base.id not in (*KNOWN_BASES, *public_modules()):
            parent = source.imported(base.id)
            assert isinstance(parent, ast.ClassDef)
            for node in parent.body:
                if isinstance(node, ast.FunctionDef) and public(node) and is_property(node):
                    result = "" if node.returns is None else f": {ast.unparse(node.returns)}"
                    yield item(f"{node.name}{result}", ast.get_docstring(node) or "")


def entry(name: str, module: str) -> Iterator[str]:
    """Yield the parts of the entry of one public name."""
    source = Source(module)
    found = source.find(name)
    if isinstance(found, ast.ClassDef):
        yield from class_entry(name, source, found)
        return
    yield f"### {name}"
    shown = f"{name}: {ast.unparse(found.annotation)}"
    if found.value is not None and ast.unparse(found.annotation) == "TypeAlias":
        shown = f"{name} = {ast.unparse(found.value)}".replace("'", "")
    yield item(shown, document(source.body, source.body.index(found)))


def page() -> str:
    """Return the text of the whole page."""
    modules = public_modules()
    named = {name for names in SECTIONS.values() for name in names}
    if named != modules.keys():
        raise LookupError(f"SECTIONS: it differs from the public names in {sorted(named ^ modules.keys())}")
    parts = [INTRODUCTION.rstrip()]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}")
        for name in names:
            parts += entry(name, modules[name])
    return "\n\n".join(part for part in parts if part) + "\n"


def main(arguments: list[str]) -> int:
    """Write the page, or compare it with the existing page; return the exit status."""
    text = page()
    if arguments == ["--check"]:
        if PAGE.is_file() and PAGE.read_text() == text:
            return 0
        print(f"{PAGE.relative_to(ROOT)}: not current; run scripts/api_page.py", file=sys.stderr)
        return 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
