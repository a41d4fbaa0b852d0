"""A few ftrace selftests of Linux 6.12 and 7.2, unmodified, with the profiles of these versions.

`tests/conformance/ftracetest.sh --profile NAME` runs all selftests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

import pytest

from tests.fuse.harness import ROOT, needs_fuse
from tests.sample import share

pytestmark = [
    pytest.mark.mounted,
    needs_fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="the selftests run as root alone"),
]

SCRIPT = ROOT / "tests/conformance/ftracetest.sh"
FETCH_SECONDS = 60
SECONDS = 240
"""Time limit in seconds, which is far longer than the tests take."""


@cache
def sources(version: str) -> str:
    """Return the directory of a version's selftests, or the reason why the selftests cannot be fetched."""
    try:
        done = subprocess.run(
            [SCRIPT, "--fetch", version], capture_output=True, text=True, timeout=FETCH_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip()


@pytest.mark.parametrize(
    ("version", "tests"),
    [
        ("6.12", share(("dynevent/add_remove_tprobe.tc", "kprobe/kprobe_args_char.tc"), 1, 2)),
        ("7.2", share(("00basic/trace_marker.tc", "dynevent/enable_disable_tprobe.tc"), 1, 2)),
    ],
)
def test_selftests_pass(version: str, tests: Sequence[str]) -> None:
    directory = sources(version)
    if not os.path.isfile(f"{directory}/ftracetest"):
        pytest.skip(f"no selftests of Linux {version}: {directory}")
    done = subprocess.run(
        [SCRIPT, "--profile", f"linux-{version}", *tests],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = {line.split()[0] for line in done.stdout.splitlines() if line.endswith(" PASS")}
    assert passed == {*tests}
