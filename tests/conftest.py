"""What holds for all tests: a profile of Hypothesis, time limits, images read once, mounts of their own."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings

from emulated_kernel.image import builtin_image, trace_events
from emulated_kernel.util.control_lock import ControlLock
from tests import own_thread
from tests.sample import WHOLE, fewer

ROOT = Path(__file__).resolve().parents[1]
QUICK = frozenset((ROOT / "tests/quick.txt").read_text(encoding="ascii").split())
"""Modules of quick tests; scripts/choose_quick_tests.py chooses them by measured durations."""
SHRINKING = 480
"""Seconds for a test whose failure is made smaller first; Hypothesis takes up to 300 for that."""

EVERYTHING = 1800
"""Seconds for a test that takes no share."""

LEEWAY = 30
"""Seconds more until a test that its time limit doesn't end ends its worker."""

YOUNG = 20_000
"""Objects for each collection of young garbage: many, since boots and tables of a kernel's functions stay."""
FEW_DESCRIPTORS = 256
"""Of a worker; more are garbage's."""

# Who runs the suite has a terminal, a CI or a journal: what they say to programs is nothing that a test asks.
_FROM_OUTSIDE = ("BUILD_NUMBER", "CI", "COLUMNS", "FORCE_COLOR", "LINES", "NOTIFY_SOCKET", "NO_COLOR", "TERM")
for _variable in _FROM_OUTSIDE:
    os.environ.pop(_variable, None)

# A machine under load is slow, and no test is about that: no deadline for an example, none for drawing one.
# No database: two runs with one seed test the same. Explaining takes more examples, outside that limit.
settings.register_profile(
    "kprobefs",
    max_examples=fewer(100, 2),
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.load_profile("kprobefs")

_T = TypeVar("_T")
_load = builtin_image.load_image
_PREBUILT: dict[str, builtin_image.KernelImage] = {}
"""Those that come with us, by architecture. Nothing changes an image."""


def load_image(path: Path | str | None = None, arch: str = "x86_64") -> builtin_image.KernelImage:
    """See image.load_image. To read an image is a third of a boot."""
    if path is not None or arch not in _PREBUILT:
        loaded = _load(path, arch)
        return loaded if path is not None else _PREBUILT.setdefault(arch, loaded)
    return _PREBUILT[arch]


def _once(
    find: Callable[[builtin_image.KernelImage], Iterable[_T]],
) -> Callable[[builtin_image.KernelImage], Iterable[_T]]:
    """`find`, asked once of a prebuilt image. To read the tables of events is a fifth of a boot."""
    found: dict[str, tuple[_T, ...]] = {}

    def find_once(of: builtin_image.KernelImage) -> Iterable[_T]:
        prebuilt = _PREBUILT.get(of.arch)
        # Each boot has an image with symbols of its own.
        if prebuilt is None or of.segments is not prebuilt.segments:
            return find(of)
        if of.arch not in found:
            found[of.arch] = tuple(find(of))
        return found[of.arch]

    return find_once


# Before anybody imports them: thousands of tests boot a kernel of their own.
builtin_image.load_image = load_image
for _table in ("event_definitions", "syscall_definitions"):
    setattr(trace_events, _table, _once(getattr(trace_events, _table)))


@pytest.fixture
def strict_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control lock as it is outside of tests."""
    monkeypatch.setattr(ControlLock, "assert_held", own_thread.assert_held)


TERMINAL = pytest.StashKey[int]()
"""Standard error, as it is outside of tests."""
CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 0x4000, 1 << 18
RECORDS = Path("/run/kprobefs")
"""Where root's daemons are found; see kprobefs.common.daemon_registry."""


def pytest_configure(config: pytest.Config) -> None:
    """A worker has mounts and daemons of its own: commands that look at all see those of one test alone."""
    libc = ctypes.CDLL(None)
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        config.stash[TERMINAL] = os.dup(2)
    # Where it isn't permitted, only tests that run at the same time could see each other's.
    if hasattr(config, "workerinput") and os.geteuid() == 0 and libc.unshare(CLONE_NEWNS) == 0:
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        RECORDS.mkdir(exist_ok=True)
        libc.mount(b"none", bytes(RECORDS), b"tmpfs", 0, b"mode=755")


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays; to look for garbage in it took a seventh of all time.

    A reboot and a coverage, run in here, would thaw it for all tests behind them.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    gc.set_threshold(YOUNG)


def _null_device() -> tuple[int, ...]:
    found = os.stat(os.devnull)
    return found.st_ino, found.st_mode, found.st_uid, found.st_gid, found.st_rdev


NULL_DEVICE = _null_device()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """The machine's devices are left alone.

    A kernel's pipes go with it, and it with the garbage: select(2) takes no descriptor above 1,023.
    """
    assert _null_device() == NULL_DEVICE, "the machine's /dev/null isn't what it was"
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    if free > FEW_DESCRIPTORS:
        gc.collect()


def _sendable(value: object) -> object:
    """`value`, its texts made such that a worker can send them."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_sendable(key): _sendable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_sendable, value))
    return value


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, object, object]:
    """A failure that shows bytes of an odd name is told; a worker that can't send it would end all others."""
    return _sendable((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that nothing ends ends its worker, which xdist replaces: one test has failed, and the rest runs.

    pytest-timeout raises in a signal's handler; what is raised in a callback from C is lost.
    """
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit + LEEWAY, exit=True, file=item.config.stash[TERMINAL])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m quick`, import the modules of quick tests only; importing all would take longer."""
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
