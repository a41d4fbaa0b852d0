"""docs/reference/api.md is what scripts/api_page.py makes of the docstrings."""

from __future__ import annotations

import subprocess
import sys
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
