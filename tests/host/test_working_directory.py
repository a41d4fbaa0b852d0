"""What a process that waits in a system call passes to it, as /proc tells."""

from __future__ import annotations

import os

import pytest

from emulated_kernel.host import working_directory
from emulated_kernel.host.working_directory import chdir_argument


def test_in_another_call_and_in_none_at_all() -> None:
    assert chdir_argument(os.getpid()) is None
    assert chdir_argument(1 << 22) is None


def test_a_call_whose_argument_is_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of /proc/self/syscall is in read(2), whose first argument is a descriptor.

    Some kernels tell nothing of a task that runs: then nobody can say in which call it is.
    """
    with open("/proc/self/syscall", encoding="ascii") as file:
        fields = file.read().split()
    number, expected = (int(fields[0]), "") if len(fields) > 1 else (0, None)
    for chdir, fchdir in ((number, -1), (-1, number)):
        monkeypatch.setattr(working_directory, "_NUMBERS", working_directory._Numbers(chdir, fchdir))
        assert chdir_argument(os.getpid()) == expected
