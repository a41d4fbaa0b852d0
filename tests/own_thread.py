"""Relaxed check of the control lock: the main thread may use a kernel without the lock while no thread holds
the lock.

Most tests use internal methods, and would have to take the lock everywhere. Outside of tests, the caller of
such a method holds the lock. Other threads of a test, and daemons, still need the lock. Import this module in
each program that runs kernels in its own process.
"""

from __future__ import annotations

import threading

from emulated_kernel.util.control_lock import ControlLock

assert_held = ControlLock.assert_held
"""The check that is used outside of tests."""


def _assert_not_elsewhere(lock: ControlLock) -> None:
    if lock._owner or threading.current_thread() is not threading.main_thread():
        assert_held(lock)


ControlLock.assert_held = _assert_not_elsewhere
