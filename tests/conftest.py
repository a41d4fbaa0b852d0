"""Set-up of all tests: a Hypothesis profile, time limits, cached kernel images, private mounts of workers."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings

from emulated_kernel.machine.native.host_code import PYTHON_TRAPS
from emulated_kernel.util.control_lock import ControlLock
from kprobefs.common.mountpoints import detach, our_mounts
from tests import own_thread
from tests.kept_images import keep_images
from tests.sample import WHOLE, fewer
from tests.worker_timer import WorkerTimer

ROOT = Path(__file__).resolve().parents[1]
QUICK = frozenset((ROOT / "tests/quick.txt").read_text(encoding="ascii").split())
"""Modules of quick tests; scripts/choose_quick_tests.py chooses them by measured durations."""
SHRINKING = 480
"""Time limit of a Hypothesis test in seconds; Hypothesis takes up to 300 to shrink a failing example."""

EVERYTHING = 1800
"""Time limit in seconds of a test that tries all cases instead of a sample."""

LEEWAY = 30
"""Seconds from the time limit of a test until the worker is ended, if the limit has not stopped the test."""

YOUNG = 2_000_000
"""Number of allocations between two collections of young garbage.

The number is high, because most objects of a boot and of the tables of a kernel's functions are no garbage.
"""
NEW_OBJECTS = 1000
"""Number of objects that a test leaves until they are searched for garbage; a kernel has twice as many."""
MORE_DESCRIPTORS = 200
"""Number of open descriptors by which a worker grows until all its objects are searched for garbage."""
MOST_DESCRIPTORS = 900
"""Number of open descriptors above which all objects are searched for garbage after each test.

select(2) does not support descriptors above 1,023.
"""
MORE_MEMORY = 300 << 20
"""Number of bytes by which a worker grows until all its objects are searched for garbage."""

# Variables of the user's terminal, CI or journal would change the output of programs under test.
_FROM_OUTSIDE = ("BUILD_NUMBER", "CI", "COLUMNS", "FORCE_COLOR", "LINES", "NOTIFY_SOCKET", "NO_COLOR", "TERM")
for _variable in _FROM_OUTSIDE:
    os.environ.pop(_variable, None)

# Modes of files and directories that tests and programs make must not depend on the user's own mask.
os.umask(0o022)

# A shell lets the commands that it runs in the background ignore these, and so the programs under test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# A loaded machine is slow, so there is no deadline for an example or for drawing one. Without a database, two
# runs with one seed test the same examples. The phase "explain" would exceed max_examples.
settings.register_profile(
    "kprobefs",
    max_examples=fewer(100, 4),
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.load_profile("kprobefs")

keep_images()


def count_no_pauses() -> None:
    """Let no time on the host count as a pause between requests.

    On a busy host, a process may wait for a CPU longer than PAUSE. Then the optimizer would begin earlier
    than in another run.
    """
    # This module must not be imported before keep_images() was called.
    from emulated_kernel.guests.common import request_clock

    request_clock.PAUSE = 60.0


count_no_pauses()


@pytest.fixture
def strict_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let assert_held() fail without the control lock in the main thread, too, as outside of tests."""
    monkeypatch.setattr(ControlLock, "assert_held", own_thread.assert_held)


_freeze = gc.freeze
TIMER = pytest.StashKey[WorkerTimer]()
"""Key in pytest's stash of the timer that ends the worker."""
CLONE_NEWNS = 0x20000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
RECORDS = Path("/run/kprobefs")
"""Directory with the records of root's daemons; see kprobefs.common.daemon_registry."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --python-traps, with which Python dispatches traps as on hosts without a routine for
    traps.
    """
    parser.addoption("--python-traps", action="store_true", help="let Python dispatch all traps of guests")


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker its own mount namespace and daemon records.

    Commands that list all mounts or daemons then see only those of the test.
    """
    if config.getoption("--python-traps"):
        os.environ[PYTHON_TRAPS] = "1"
    libc = ctypes.CDLL(None)
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        # pytest does not capture what is written to a duplicate of standard error.
        config.stash[TIMER] = WorkerTimer(os.dup(2))
    # If unshare(2) is not permitted, only tests that run at the same time can see each other's mounts.
    if hasattr(config, "workerinput") and os.geteuid() == 0 and libc.unshare(CLONE_NEWNS) == 0:
        assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0, "mounts would be the host's"
        # The copies of the host's mounts of kprobefs would keep them alive, and be stale after their ends.
        for point in reversed(our_mounts()):
            detach(point.directory)
        RECORDS.mkdir(exist_ok=True)
        libc.mount(b"none", bytes(RECORDS), b"tmpfs", 0, b"mode=755")


def pytest_collectstart() -> None:
    """Disable Python's garbage collection while pytest collects tests.

    The collected objects are no garbage, because all tests use them.
    """
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude all objects that exist after the collection of tests from garbage collection.

    Scanning these objects takes a seventh of the time of all tests. gc.freeze() and gc.unfreeze() are
    disabled: otherwise a reboot or a coverage in a test would include the objects again for all later tests.
    """
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    gc.set_threshold(YOUNG)
    gc.enable()


def pytest_unconfigure() -> None:
    """Exclude all objects from garbage collection, because the process ends.

    Otherwise pytest and Python would search the objects of all tests for garbage several times.
    """
    _freeze()


@pytest.fixture(scope="module")
def objects_excluded() -> None:
    """Exclude the objects that earlier modules have left from garbage collection.

    A module uses this fixture if it often reboots kernels or removes instances: each time, all garbage is
    collected. The other tests' caches of kernels are most of the objects, and stay until the end.
    """
    gc.collect()
    _freeze()


def _null_device() -> tuple[int, ...]:
    found = os.stat(os.devnull)
    return found.st_ino, found.st_mode, found.st_uid, found.st_gid, found.st_rdev


NULL_DEVICE = _null_device()


def _resident_bytes() -> int:
    """Return the size in bytes of the process's resident memory, without pages of files.

    A mount of a distribution's kernel maps its snapshot. These pages belong to the page cache, and are half
    of the mount's resident memory.
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    return sum(int(sizes[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def _used_descriptors() -> int:
    """Return the number of the lowest free descriptor."""
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    return free


class _Collector:
    """Collects garbage after tests."""

    def __init__(self) -> None:
        self._most_bytes = 0
        self._most_descriptors = MORE_DESCRIPTORS

    def collect(self) -> None:
        """Collect the garbage that the last test has left, such as its kernels.

        Objects of earlier tests are searched only if the process has grown much. They became garbage later,
        such as a kernel that the tests of a module have shared.
        """
        if gc.get_count()[0] > NEW_OBJECTS:
            gc.collect(0)
        if _used_descriptors() > self._most_descriptors or _resident_bytes() > self._most_bytes:
            gc.collect()
            self._most_bytes = _resident_bytes() + MORE_MEMORY
            self._most_descriptors = min(_used_descriptors() + MORE_DESCRIPTORS, MOST_DESCRIPTORS)


_collector = _Collector()


def _forget_frames(item: pytest.Item) -> None:
    """Drop the tracebacks of exceptions that are parameters: their frames hold the memory of the test."""
    callspec = getattr(item, "callspec", None)
    for value in callspec.params.values() if callspec is not None else ():
        if isinstance(value, BaseException):
            value.__traceback__ = None
            value.__context__ = None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Check that the test has not changed /dev/null, and collect garbage."""
    assert _null_device() == NULL_DEVICE, "/dev/null: changed by the test"
    _forget_frames(item)
    _collector.collect()


def _sendable(value: object) -> object:
    """Return `value` with all texts encoded so that a worker can send them."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_sendable(key): _sendable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_sendable, value))
    return value


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, object, object]:
    """Make all reports sendable, also those of failures that contain undecodable bytes.

    A worker that cannot send a report would end all other workers.
    """
    return _sendable((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the worker if a test does not end after its time limit; xdist then replaces the worker.

    pytest-timeout raises an exception in a signal handler. The exception is lost if C code calls the handler
    through a callback.
    """
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout"))
    timer = item.config.stash[TIMER]
    timer.start(limit + LEEWAY)
    try:
        return (yield)
    finally:
        timer.stop()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m quick`, import only modules with quick tests, because importing all modules would take
    longer.
    """
    if config.option.markexpr != "quick" or not collection_path.name.startswith("test_"):
        return None
    return str(collection_path.relative_to(ROOT)) not in QUICK or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path.relative_to(ROOT)) in QUICK:
            item.add_marker(pytest.mark.quick)
        if is_hypothesis_test(getattr(item, "obj", None)) or item.get_closest_marker("stateful"):
            item.add_marker(pytest.mark.timeout(SHRINKING))
        elif WHOLE:
            item.add_marker(pytest.mark.timeout(EVERYTHING))
