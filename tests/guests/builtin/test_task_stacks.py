"""StackScanner: the ranges of code that tasks will return to, in a guest with damaged data."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulated_kernel.guests.builtin.readers.stack_scanner import StackScanner
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.machine.memory.guest_reader import DamageReports, GuestReader

NOWHERE = (0x1000, 0x1001)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as kernel:
        yield kernel


@pytest.fixture
def stacks(kernel: Kernel) -> StackScanner:
    image = kernel.image

    def reader() -> GuestReader:
        return GuestReader(kernel.machine.memory, "stacks", DamageReports())

    return StackScanner(reader, image.kallsyms, image.abi, kernel.machine)


def _with_stack(kernel: Kernel, stacks: StackScanner, base: int) -> set[tuple[int, int]]:
    """Set the field task_struct.stack of the last task to `base`.

    Return the ranges in use, and restore the field.
    """
    memory, image = kernel.machine.memory, kernel.image
    *_, task = kernel.guest.kernel.tasks()
    field = task.addr + image.abi["task_struct.stack"]
    saved = memory.read_word(field)
    memory.write_word(field, base)
    try:
        return stacks.in_use_ranges([NOWHERE])
    finally:
        memory.write_word(field, saved)


def test_a_task_that_has_given_its_stack_back_comes_back_nowhere(
    kernel: Kernel, stacks: StackScanner
) -> None:
    assert stacks.in_use_ranges([NOWHERE]) == set()
    assert _with_stack(kernel, stacks, 0) == set()


def test_what_cant_be_read_may_be_anywhere(kernel: Kernel, stacks: StackScanner) -> None:
    assert _with_stack(kernel, stacks, 0x1234_5000) == {NOWHERE}
