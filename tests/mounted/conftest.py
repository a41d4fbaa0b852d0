"""Fixtures: FUSE mounts of the built-in kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuse.conftest import directory, mount_point, runtime
from tests.fuse.harness import REAL_PROGRAM, Daemon, daemon, watched
from tests.mounted.files import EVENTS, Files

__all__ = ["directory", "runtime"]


@pytest.fixture
def mounted(directory: Path) -> Iterator[Daemon]:
    """Yield a daemon that serves the emulated kernel, and check that its log has no report of an error."""
    with daemon(directory, program=REAL_PROGRAM) as running:
        yield running
    assert_no_fault(running)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Yield a daemon for all tests of a module. The tests may only make writes that are refused."""
    with pytest.MonkeyPatch.context() as patch, mount_point() as path:
        patch.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(tmp_path_factory.mktemp("runtime")))
        with daemon(path, program=REAL_PROGRAM, is_shared=True) as running:
            yield running


@pytest.fixture
def shared(lasting: Daemon) -> Iterator[Files]:
    """Yield the files of the daemon `lasting`. Remove all events, errors and results of calls after
    the test.
    """
    files = Files(lasting.directory)
    with watched(lasting.process):
        yield files
        assert_no_fault(lasting)
        assert lasting.process.poll() is None
        if files.read("kprobe_events"):
            files.write(f"{EVENTS}/enable", "0")
        files.write("machine/call", "\n")
        for name in ("kprobe_events", "tracing/error_log"):
            files.write(name, "", os.O_TRUNC)
        for name in ("kprobe_events", "tracing/error_log", "machine/call"):
            assert files.read(name) == ""


def assert_no_fault(daemon: Daemon) -> None:
    """Check that the daemon's log has no report of an error."""
    assert "ERROR" not in daemon.log, daemon.log
    assert "Traceback" not in daemon.log, daemon.log


@pytest.fixture
def files(mounted: Daemon) -> Files:
    """Return the files of the daemon `mounted`."""
    return Files(mounted.directory)
