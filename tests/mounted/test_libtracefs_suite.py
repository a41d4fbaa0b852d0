"""libtracefs's own unit tests on a mount, if the library's sources are available."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuse.harness import ROOT, needs_fuse

pytestmark = [
    pytest.mark.mounted,
    needs_fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting at the system's places needs root"),
]

SCRIPT = ROOT / "tests/conformance/libtracefs.sh"
TIMEOUT = 120


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    own = {"LC_ALL": "C", "KPROBEFS_COMMAND": str(Path(sys.executable).with_name("kprobefs"))}
    return subprocess.run(
        [SCRIPT, *arguments],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


@pytest.fixture(scope="module")
def sources() -> str:
    """Return the path of libtracefs's sources, whose tests no distribution packages. Skip the test without
    LIBTRACEFS_SOURCE.
    """
    if (given := os.environ.get("LIBTRACEFS_SOURCE")) is None:
        pytest.skip("LIBTRACEFS_SOURCE names no source tree of libtracefs")
    return given


def test_all_pass(sources: str) -> None:
    result = _run(sources)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "...FAILED" not in result.stdout
    assert len(re.findall(r"^  Test: .*\.\.\.passed$", result.stdout, re.M)) >= 13


def test_a_directory_without_the_tests_is_told(tmp_path: Path) -> None:
    result = _run(str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"libtracefs: {tmp_path}: no utest/tracefs-utest.c in it\n"
