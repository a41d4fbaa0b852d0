"""Guest: connections that are complete wait in their listener's queue, up to its backlog."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel import Kernel

SIZE = 512
GFP_KERNEL = 0xCC0
O_NONBLOCK = 0o4000


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as booted:
        yield booted


def sock(kernel: Kernel) -> int:
    made = kernel.call("__kmalloc", SIZE, GFP_KERNEL)
    kernel.call("sock_init_data", made)
    return made


def accept(kernel: Kernel, listener: int) -> tuple[int, int]:
    """The connection, and the error."""
    place = kernel.call("__kmalloc", 8, GFP_KERNEL)
    child = kernel.call("inet_csk_accept", listener, O_NONBLOCK, place, 0)
    return child, -int.from_bytes(kernel.machine.memory.read(place, 4), "little", signed=True)


def test_in_order_up_to_the_backlog(kernel: Kernel) -> None:
    listener, *children = (sock(kernel) for _ in range(4))
    assert accept(kernel, listener) == (0, errno.EINVAL)
    assert kernel.call("inet_csk_listen_start", listener, 1) == 0
    assert accept(kernel, listener) == (0, errno.EAGAIN)
    # Linux: one more than the backlog says.
    added = [kernel.call("inet_csk_reqsk_queue_add", listener, child) for child in children]
    assert added == [*children[:2], 0]
    assert [accept(kernel, listener) for _ in range(3)] == [
        (children[0], 0),
        (children[1], 0),
        (0, errno.EAGAIN),
    ]


def test_names_that_are_not_unique(kernel: Kernel) -> None:
    assert kernel.image.kallsyms.count_name("name_show") == 2
