"""Calling kernel functions: results, refused arguments, and functions that die or never return."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from emulated_kernel.guests.builtin.builtin_kernel import BUFFER_SIZE
from emulated_kernel.image.builtin_image import PREBUILT
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.guests.builtin.conftest import dmesg, tasks


def failed(kernel: Kernel, name: str, *arguments: int | str | bytes) -> str:
    with pytest.raises(KernelError) as caught:
        kernel.call(name, *arguments)
    return caught.value.name


def test_results(kernel: Kernel) -> None:
    assert kernel.call("gcd", 12, 18) == 6
    assert kernel.call("strlen", "text") == kernel.call("strlen", b"text") == 4
    assert kernel.call("strcmp", "a", "b") & 0xFFFFFFFF == 0xFFFFFFFF
    assert kernel.call("int_sqrt", -1) == 0xFFFFFFFF


def test_refused_calls(kernel: Kernel) -> None:
    before = tasks(kernel).keys()
    assert failed(kernel, "no_such_function") == "ENOENT"
    assert failed(kernel, "init_task") == "EINVAL"
    assert failed(kernel, "gcd", *range(7)) == "E2BIG"
    assert failed(kernel, "strlen", "a\0b") == "EINVAL"
    assert failed(kernel, "strlen", "x" * BUFFER_SIZE) == "E2BIG"
    assert failed(kernel, "strcmp", "x" * (BUFFER_SIZE // 2), "y" * (BUFFER_SIZE // 2)) == "E2BIG"
    assert tasks(kernel).keys() == before
    assert kernel.call("strlen", b"ab\0c") == 2
    assert kernel.call("strlen", "x" * 10_000) == 10_000


def test_null_pointer_is_an_oops_and_the_machine_goes_on(kernel: Kernel) -> None:
    for number in range(1, 4):
        assert failed(kernel, "strlen", 0) == "EFAULT"
        log = dmesg(kernel)
        assert f"Oops: 0000 [#{number}]" in log
        assert kernel.call("gcd", 12, 18) == 6
    assert "BUG: kernel NULL pointer dereference, address: 0000000000000000" in log
    assert "RIP: 0010:strlen+0x5/0x" in log


def test_a_call_that_sleeps_for_ever_keeps_no_other_call_from_its_task(kernel: Kernel) -> None:
    """Its task stays asleep, as in Linux, and later calls and loads of modules get another task."""
    before = tasks(kernel)
    longest = (1 << 8 * kernel.machine.memory.word_size - 1) - 1
    for _ in range(2):
        assert failed(kernel, "schedule_timeout_uninterruptible", longest) == "EFAULT"
        assert kernel.call("gcd", 12, 18) == 6
        kernel.load_module("counter")
        kernel.unload_module("counter")
    later = [task for pid, task in tasks(kernel).items() if pid not in before]
    assert [task.comm for task in later] == ["kprobefs"] * 3
    assert sum(task.state == "D" for task in later) == 2
    assert "it sleeps, and nothing will wake it" in kernel.guest.messages()[-1].text


def test_messages_of_the_host_have_their_places_in_the_log(kernel: Kernel) -> None:
    """Messages that the guest has not logged itself are listed between its own messages, in order of time."""
    kernel.guest.log("before the note")
    kernel.call("gcd", 12, 18)
    kernel.guest.runner.note("a note")
    kernel.call("gcd", 12, 18)
    kernel.guest.log("after the note")
    *_, before, note, after = kernel.guest.messages()
    assert before.text == "before the note"
    assert note.text == "kprobefs: a note"
    assert after.text == "after the note"


def test_endless_loop_is_a_soft_lockup_and_the_machine_goes_on(kernel: Kernel) -> None:
    lock = kernel.machine.alloc_pages(16)
    kernel.machine.memory.write_u32(lock, 1)
    assert failed(kernel, "_raw_spin_lock", lock) == "EFAULT"
    log = dmesg(kernel)
    assert "watchdog: BUG: soft lockup - CPU#0 stuck for" in log
    assert "RIP: 0010:queued_spin_lock_slowpath+0x" in log
    assert kernel.call("gcd", 12, 18) == 6


def test_buffers_come_back_from_calls_that_die(kernel: Kernel) -> None:
    for _ in range(40):
        assert failed(kernel, "strlen", 0) == "EFAULT"
    assert kernel.call("strlen", "text") == 4


def test_a_panic_is_eio_for_ever(kernel: Kernel) -> None:
    assert failed(kernel, "panic", "by a test") == "EFAULT"
    assert kernel.guest.runner.is_dead
    for _ in range(2):
        assert failed(kernel, "gcd", 12, 18) == "EIO"
    assert "Kernel panic - not syncing: by a test" in dmesg(kernel)


def test_strings_may_have_any_bytes(kernel: Kernel) -> None:
    assert kernel.call("strlen", os.fsdecode(b"\xd3\xc6x")) == 3


def test_an_image_that_lacks_something(tmp_path: Path) -> None:
    """An image without a symbol or number that the host needs is refused with ENOEXEC, and no
    thread is left.
    """
    whole = (PREBUILT / "x86_64" / "vmlinux").read_bytes()
    damaged = tmp_path / "vmlinux"
    threads = threading.active_count()
    for name in (b"host_find_task\0", b"percpu.host_mailbox\0", b"nr.getdents64\0"):
        damaged.write_bytes(whole.replace(name, b"x" + name[1:]))
        with pytest.raises(KernelError) as caught:
            Kernel(MachineConfig(image=damaged))
        assert caught.value.errno == errno.ENOEXEC
    assert threading.active_count() == threads
