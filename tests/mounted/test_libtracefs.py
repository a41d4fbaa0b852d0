"""libtracefs on a mount: the library's functions change and return what the files show."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.fuse.harness import needs_fuse
from tests.mounted.system import as_system, beside

try:
    ctypes.CDLL("libtracefs.so.1")
except OSError:
    pytest.skip("libtracefs isn't installed", allow_module_level=True)

from tests.mounted import tracefs_client

pytestmark = [pytest.mark.mounted, needs_fuse]

CLIENT = f"{shlex.quote(sys.executable)} -m tests.mounted.tracefs_client"
CPUS = ("--cpus", str(os.cpu_count()))
"""Options for as many CPUs as the host has, because libtracefs counts the host's CPUs."""


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the tracebacks of the failed cases. All cases have run on one mount."""
    told: dict[str, str] = json.loads(as_system(CLIENT, tmp_path_factory.mktemp("home"), *CPUS))
    return told


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting at the system's places needs root")
@pytest.mark.parametrize("name", [case.__name__ for case in tracefs_client.CASES])
def test_libtracefs(name: str, failed: dict[str, str]) -> None:
    assert name not in failed, failed[name]


def test_pages_on_any_mount(tmp_path: Path) -> None:
    cases = [tracefs_client.pages_of_a_cpu, tracefs_client.records_of_each_cpu, tracefs_client.markers]
    names = " ".join(case.__name__ for case in cases)
    assert json.loads(beside(f"TRACING=$KPROBEFS/tracing {CLIENT} {names}", tmp_path, *CPUS)) == {}
