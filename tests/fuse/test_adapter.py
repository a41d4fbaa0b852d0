"""What the program says where FUSE is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kprobefs import mount
from kprobefs.failure import Failure
from tests.fuse.harness import environment


@pytest.mark.parametrize(
    ("broken", "advice"),
    [("raise ImportError('no module')", "pip install fusepy"), ("raise OSError('no libfuse')", "libfuse2")],
)
def test_missing_libraries(broken: str, advice: str) -> None:
    script = f"""
import sys, types
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "fuse":
            {broken}
sys.meta_path.insert(0, Finder())
import kprobefs.adapter
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    last = result.stderr.splitlines()[-1]
    assert last.startswith("kprobefs.failure.Failure: ")
    assert advice in last


def test_mount_points_are_unescaped() -> None:
    line = "36 35 0:98 / /mnt/a\\040b\\134c rw,nosuid shared:1 - fuse.kprobefs trace\\011fs rw\n"
    assert mount._parse(line) == mount.MountPoint("/mnt/a b\\c", "0:98", "fuse.kprobefs", "trace\tfs")


def test_the_root_is_a_mount_point() -> None:
    assert mount.mounted_on("/") is not None
    assert mount.mounted_on("/no/such/place") is None


def test_detaching_what_is_not_mounted_fails() -> None:
    with pytest.raises(Failure, match="can't unmount"):
        mount.detach("/no/such/place")
