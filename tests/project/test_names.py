"""Names: one class each, and nothing public that only tests would call."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY, PROGRAM, BENCHMARKS = "emulated_kernel", "kprobefs", "benchmarks"
PUBLIC_API = "emulated_kernel/kernel.py"
CALLED_FROM_OUTSIDE = {
    "may_probe": "the verdict's whole question, of which registering asks the halves at two points",
    "readinto": "io.RawIOBase calls it",
}


def parsed(*packages: str) -> Iterator[tuple[str, ast.Module]]:
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def classes(packages: tuple[str, ...]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for path, tree in parsed(*packages):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    return places


def mentions(tree: ast.Module) -> Iterator[str]:
    """Names that are read, called, or given by keyword; a definition or an import alone is none."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                yield name


def uncalled() -> dict[str, str]:
    mentioned = {name for _, tree in parsed(LIBRARY, PROGRAM, BENCHMARKS) for name in mentions(tree)}
    return {
        node.name: f"{path}:{node.lineno}"
        for path, tree in parsed(LIBRARY)
        if path != PUBLIC_API
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name not in mentioned
    }


def test_no_two_classes_share_a_name() -> None:
    found = classes((LIBRARY, PROGRAM))
    assert len(found) > 300
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_nothing_public_is_called_by_tests_alone() -> None:
    assert uncalled().keys() == CALLED_FROM_OUTSIDE.keys(), uncalled()


def documentation() -> Iterator[tuple[str, str]]:
    """Docstrings, those of attributes too: strings that stand alone."""
    for path, tree in parsed(LIBRARY, PROGRAM):
        for node in ast.walk(tree):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield f"{path}:{node.lineno}", " ".join(text.split())


REASON = r"(?: \((?:[^()]|\([^()]*\))*\))?"
RAISED = rf"(?:(?:[A-Z]\w+ )?E[A-Z0-9]+|[A-Z][A-Za-z]+|(?:as|what|whatever|others) (?:[^;,()]|\(\))+){REASON}"
RAISES = re.compile(rf"Raises: {RAISED}(?:, {RAISED})*\.(?: |$)")


def test_raises_has_one_form() -> None:
    """`Raises: KernelError EINVAL (why), EBUSY, OSError, as `other`.`: types, errnos, reasons in brackets."""
    found = [
        (place, text[start:])
        for place, text in documentation()
        for start in (match.start() for match in re.finditer(r"\bRaises\b|\bKernelError\(", text))
    ]
    assert len(found) > 600
    assert [each for each in found if not RAISES.match(each[1])] == []
