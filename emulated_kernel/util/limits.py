"""Resource limits of one kernel, which machine/limits shows and sets."""

from __future__ import annotations

import errno
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import MappingProxyType

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.lazy_pattern import lazy_pattern


class Limit(Enum):
    """A limited resource; the value of the member is the resource's name in machine/limits."""

    # Enum's own __hash__ is Python code, and each open(2) looks up a limit.
    __hash__ = object.__hash__

    PROBES = "probes"
    """Maximum number of dynamic events of all kinds."""
    INSTANCES = "instances"
    """Maximum number of directories in tracing/instances."""
    OPEN_FILES = "open_files"
    """Maximum number of open files and directories of all mounts of the kernel together.

    Files of machine/ can always be opened.
    """
    USER_OPEN_FILES = "user_open_files"
    """Maximum number of open files and directories of a user other than root.

    Files of machine/ can always be opened.
    """
    HIST_BYTES = "hist_bytes"
    """Maximum size of the host's memory for keys and variables of all histograms, in bytes."""
    USER_HIST_BYTES = "user_hist_bytes"
    """Maximum part of HIST_BYTES for one user who is neither root nor the owner of the mount."""
    DEFINITION_BYTES = "definition_bytes"
    """Maximum size of the host's memory for all filters, synthetic events and lists of pids, in bytes."""
    USER_DEFINITION_BYTES = "user_definition_bytes"
    """Maximum part of DEFINITION_BYTES for one user who is neither root nor the owner of the mount."""
    USER_RECORD_BYTES = "user_record_bytes"
    """Maximum size in bytes of all ring buffers and snapshots that one user has allocated.

    The limit is for users who are neither root nor the owner of the mount.
    """
    SCRATCH_BYTES = "scratch_bytes"
    """Maximum size of all files in scratch/ and dev/ together, in bytes; each file takes whole pages."""
    RUN_BUDGET_MS = "run_budget_ms"
    """Maximum CPU time of one run of the guest in milliseconds; see MachineConfig.run_budget."""


DEFAULTS: Mapping[Limit, int | None] = MappingProxyType(
    {
        Limit.PROBES: 65536,
        Limit.INSTANCES: 1024,
        Limit.OPEN_FILES: 65536,
        Limit.USER_OPEN_FILES: 16384,
        Limit.HIST_BYTES: 512 << 20,
        Limit.USER_HIST_BYTES: 128 << 20,
        Limit.DEFINITION_BYTES: 512 << 20,
        Limit.USER_DEFINITION_BYTES: 128 << 20,
        Limit.USER_RECORD_BYTES: 128 << 20,
        Limit.SCRATCH_BYTES: None,
    }
)
"""Limit -> default value; None means that only memory limits the resource."""
ERRNO = {
    Limit.PROBES: errno.ENOSPC,
    Limit.INSTANCES: errno.ENOSPC,
    # Linux: the errno for fs.file-max, which also holds for all processes together.
    Limit.OPEN_FILES: errno.ENFILE,
    Limit.USER_OPEN_FILES: errno.ENFILE,
    Limit.HIST_BYTES: errno.ENOMEM,
    Limit.USER_HIST_BYTES: errno.ENOMEM,
    Limit.DEFINITION_BYTES: errno.ENOMEM,
    Limit.USER_DEFINITION_BYTES: errno.ENOMEM,
    Limit.USER_RECORD_BYTES: errno.ENOMEM,
}
"""Limit -> errno of a request that would exceed the limit.

The guest enforces SCRATCH_BYTES itself, with ENOSPC.
"""
RECORD_BYTES = "record_bytes"
"""Name of the line in machine/limits for the memory of all ring buffers, whose limit cannot be set."""
UNLIMITED = "max"
BYTES_PER_CHARACTER = 60
"""Bytes of the host's memory that a character of a filter or a synthetic event's definition takes.

36 to 57 bytes were measured, with the shortest fields, numbers and names.
"""
_NUMBER = lazy_pattern(r"[0-9]{1,20}")
_MAX_VALUE = 1 << 48
_RUN_BUDGETS_MS = range(10, 600_001)
"""Allowed run budgets in milliseconds. A looping guest makes all clients wait until its budget ends."""


def parse_limit(name: str, text: str, offered: Sequence[Limit] = tuple(Limit)) -> tuple[Limit, int | None]:
    """Return the limit called `name`, and the value that `text` gives it: a number, or None for `max`.

    `offered`: the limits that may be named. Raises: KernelError EINVAL (no such limit, or not a number),
    ERANGE (the number is too small or too large).
    """
    if name == RECORD_BYTES:
        raise KernelError(errno.EINVAL, f"{name}: the machine has a fixed size; choose smaller buffers")
    limit = next((each for each in offered if each.value == name), None)
    if limit is None:
        names = ", ".join(each.value for each in offered)
        raise KernelError(errno.EINVAL, f"{name}: no such limit; choose from {names}")
    if text == UNLIMITED and limit is not Limit.RUN_BUDGET_MS:
        return limit, None
    if not _NUMBER.fullmatch(text):
        words = "" if limit is Limit.RUN_BUDGET_MS else f" or {UNLIMITED}"
        raise KernelError(errno.EINVAL, f"{name}: {text!r} is not a number{words}")
    allowed = _RUN_BUDGETS_MS if limit is Limit.RUN_BUDGET_MS else range(_MAX_VALUE + 1)
    if int(text) not in allowed:
        raise KernelError(errno.ERANGE, f"{name}: {text} is out of range; use {allowed[0]} to {allowed[-1]}")
    return limit, int(text)


def limit_line(limit: Limit, most: int | None, used: int) -> str:
    """Return the line of a limit in machine/limits, with its name, its maximum and the amount in use.

    `most`: the maximum, or None if there is no limit. `used`: the amount in use.
    """
    return f"{limit.value} {UNLIMITED if most is None else most} {used}\n"


class Limits:
    """Limits of one kernel and its mounts; they persist when the kernel is rebooted.

    Lowering a limit frees nothing that is in use; it only refuses new allocations.
    """

    def __init__(self, values: Mapping[Limit, int | None] = MappingProxyType({})) -> None:
        self._values = {**DEFAULTS, **values}
        self.open_files = 0
        """Number of open files and directories of all mounts; the mounts keep it up to date."""
        self._by_user: Counter[int] = Counter()
        """Uid of a user other than root -> number of the user's open files.

        Users without open files are left out.
        """

    def __getitem__(self, limit: Limit) -> int | None:
        return self._values[limit]

    def __setitem__(self, limit: Limit, value: int | None) -> None:
        self._values[limit] = value

    @property
    def user_open_files(self) -> int:
        """Largest number of open files that one user other than root has."""
        return max(self._by_user.values(), default=0)

    def count_user(self, uid: int, change: int) -> None:
        """Change the number of open files of the user `uid`, who is not root.

        `change` is 1 for an open and -1 for a close.
        """
        self._by_user[uid] += change
        if not self._by_user[uid]:
            del self._by_user[uid]

    def check_user(self, uid: int) -> None:
        """Check that the user `uid`, who is not root, may open one more file. Raises: KernelError ENFILE."""
        self.check(Limit.USER_OPEN_FILES, self._by_user[uid])

    def open_file_lines(self) -> Iterator[str]:
        """Yield the lines of machine/limits for open files. All mounts of the kernel share these limits."""
        used = {Limit.OPEN_FILES: self.open_files, Limit.USER_OPEN_FILES: self.user_open_files}
        for limit, count in used.items():
            yield limit_line(limit, self._values[limit], count)

    def check(self, limit: Limit, in_use: int) -> None:
        """Check that one more object may be allocated under `limit`.

        `in_use` is the number of objects in use.
        Raises: KernelError ENOSPC, ENFILE, ENOMEM (the errno in ERRNO).
        """
        most = self._values[limit]
        if most is not None and in_use >= most:
            raise KernelError(ERRNO[limit], f"the limit of {limit.value} is reached: {most}")


class MemoryBudget:
    """Memory that clients of one kernel occupy, with a limit for all users together and one for each user.

    Root and the owner of the mount are user 0 here. The limit for each user does not apply to them.
    """

    def __init__(
        self, limits: Limits, total: Limit | None, share: Limit, user: Callable[[], int] = lambda: 0
    ) -> None:
        """Create a budget without charges.

        `user` returns the user for whom memory is allocated at the time of the call. `total`: the limit for
        all users together; None if only each user is limited. `share`: the limit for each user.
        """
        self._limits = limits
        self._total = total
        self._share = share
        self.user = user
        self._used = 0
        self._by_user: Counter[int] = Counter()
        self._ended: deque[tuple[int, int]] = deque()
        """(size in bytes, user) of each Charge object that was freed, but whose memory is still counted."""

    @property
    def used(self) -> int:
        """Number of bytes that all users together have in use."""
        self._settle()
        return self._used

    @property
    def max_by_user(self) -> int:
        """Largest number of bytes that one user has in use; 0 if only root and the owner use any."""
        self._settle()
        return max(self._by_user.values(), default=0)

    def charge_text(self, text: str) -> Charge:
        """Charge the present user for the memory that the definition `text` takes, and return the Charge.

        Raises: KernelError ENOMEM (a limit would be exceeded).
        """
        return self.charge(BYTES_PER_CHARACTER * len(text))

    def charge(self, size: int) -> Charge:
        """Charge `size` bytes to the present user for as long as the returned object exists.

        Raises: KernelError ENOMEM (a limit would be exceeded).
        """
        user = self.user()
        if not self.take(size, user):
            why = f"{self._share.value} is reached; remove filters, events or pids first"
            raise KernelError(errno.ENOMEM, why)
        return Charge(self._ended, size, user)

    def _settle(self) -> None:
        """Subtract the charges in `_ended` from the memory in use. The caller holds the control lock."""
        while self._ended:
            self.give_back(*self._ended.popleft())

    def take(self, size: int, user: int) -> bool:
        """Charge `size` bytes to `user` until give_back(), and return True.

        Return False and change nothing if this would exceed a limit.
        """
        self._settle()
        most = None if self._total is None else self._limits[self._total]
        if most is not None and self._used + size > most:
            return False
        if user:
            share = self._limits[self._share]
            if share is not None and self._by_user[user] + size > share:
                return False
        self._add(size, user)
        return True

    def _add(self, size: int, user: int) -> None:
        self._used += size
        if user:
            self._by_user[user] += size

    def give_back(self, size: int, user: int) -> None:
        """End a charge of `size` bytes that take() made to `user`."""
        self._used -= size
        if user:
            self._by_user[user] -= size
            if not self._by_user[user]:
                del self._by_user[user]

    @contextmanager
    def exchanged(self, freed: Sequence[tuple[int, int]], size: int, user: int) -> Iterator[None]:
        """Charge `size` bytes to `user` in place of the charges `freed`: pairs (size in bytes, user).

        The new charge stays after the `with` block. But if the block raises an exception, the former charges
        are restored.
        Raises: KernelError ENOMEM (a limit would be exceeded).
        """
        for charge in freed:
            self.give_back(*charge)
        is_taken = self.take(size, user)
        try:
            if not is_taken:
                raise KernelError(errno.ENOMEM, f"{self._share.value} is reached; free memory first")
            yield
        except BaseException:
            if is_taken:
                self.give_back(size, user)
            for charge in freed:
                self._add(*charge)
            raise


class Charge:
    """Memory that is charged to a user for as long as this object exists.

    The garbage collector may free the object in any thread. Therefore, the finalizer only queues the size and
    the user, and MemoryBudget subtracts the size later.
    """

    __slots__ = ("_ended", "_size", "_user")

    def __init__(self, ended: deque[tuple[int, int]], size: int, user: int) -> None:
        self._ended = ended
        self._size = size
        self._user = user

    def __del__(self) -> None:
        self._ended.append((self._size, self._user))
