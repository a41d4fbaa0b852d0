"""docs/reference/api.md is the page that scripts/api_page.py generates from the docstrings."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import emulated_kernel

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current() -> None:
    command = [sys.executable, "scripts/api_page.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_page_has_every_public_name_and_method() -> None:
    page = (ROOT / "docs/reference/api.md").read_text()
    for name in emulated_kernel.__all__:
        assert f"\n### {name}" in page
    for name in vars(emulated_kernel.Kernel):
        assert name.startswith("_") or f"\n- `{name}" in page


EXPLAINED = {"GuestAddr", "Path", "Regs", "RegsT"}
"""Names of types that the page's introduction explains, or that the standard library defines."""


def types_of(signature: str) -> Iterator[ast.expr]:
    """Yield the types in a method's or attribute's signature."""
    is_method = "(" in signature.partition(":")[0]
    for node in ast.walk(ast.parse(f"def {signature}: 0" if is_method else signature)):
        found = node.returns if isinstance(node, ast.FunctionDef) else getattr(node, "annotation", None)
        if isinstance(found, ast.expr):
            yield found


def test_every_type_in_a_signature_is_public() -> None:
    page = (ROOT / "docs/reference/api.md").read_text()
    known = {*emulated_kernel.__all__, *dir(builtins), *dir(typing), *collections.abc.__all__, *EXPLAINED}
    signatures = re.findall(r"^- `([^`=]+(?: = [^`]*)?)`", page, re.M)
    named = {
        name.id
        for signature in signatures
        if "TypeAlias" not in signature and not re.match(r"\w+ = ", signature)
        for annotation in types_of(signature)
        for name in ast.walk(annotation)
        if isinstance(name, ast.Name)
    }
    assert {"Mount", "PreHandler"} <= named
    assert named - known == set()
