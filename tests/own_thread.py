"""A test's own thread may use a kernel without its lock while nobody has it; no other thread may, no daemon.

Most tests reach below the public API, and would have to take the lock all over; outside of tests a request, a
call or a load has it. Who runs kernels in this process imports this module.
"""

from __future__ import annotations

import threading

from emulated_kernel.util.control_lock import ControlLock

assert_held = ControlLock.assert_held
"""As it is outside of tests."""


def _assert_not_elsewhere(lock: ControlLock) -> None:
    if lock._owner or threading.current_thread() is not threading.main_thread():
        assert_held(lock)


ControlLock.assert_held = _assert_not_elsewhere
