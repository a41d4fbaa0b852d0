"""KernelCalls: calls functions of a running distribution's kernel, each in its own kernel thread.

An interrupt queues work, as a device's interrupt does. The work makes the thread, which may sleep.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from errno import EFAULT, ENOMEM, ETIMEDOUT

from emulated_kernel.guests.linux.guest.call_arguments import REGISTERS, CallArguments
from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.pc.devices import TSC_KHZ
from emulated_kernel.guests.linux.probing.probed_linux import ProbedLinux
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.machine.task_events import TaskObserver
from emulated_kernel.util.abi import PAGE_SIZE, Prot
from emulated_kernel.util.errors import KernelError

_TEXT = 0xFFFFFFFF70010000
"""Address of the page with this module's code, after the host's other code in the kernel."""
_MAKER = 0x100
"""Offset of the work function."""
_THREAD = 0x200
"""Offset of the thread function."""
_MAIL = 0x300
"""Offset of the address of the work."""
_NAME = 0x310
"""Offset of the thread's name."""
_COMM = b"machine/call\0"
_LONGEST = 60_000_000
"""Microseconds of guest time that a call may sleep."""
_RESULT = 56
"""Offset of the result in a mailbox; the function and its arguments precede it."""
_STATE = 64
"""Offset of the state in a mailbox; 0: the call has not returned."""
_TASK = 72
"""Offset of the thread's task_struct address in a mailbox."""
_WORK = 128
"""Offset of the work_struct in a mailbox."""
_STRINGS = 256
"""Offset of strings in a mailbox."""
_HEAD = struct.Struct("<10Q")
_RETURNED = 1
_NO_THREAD = 2
_KILLED = 3
_CONSTANTS = ("WORK_CPU_UNBOUND", "WORK_OFFQ_POOL_BITS", "WORK_OFFQ_POOL_SHIFT")
_PARTS = ("data", "entry", "func")
_SYMBOLS = ("queue_work_on", "system_unbound_wq", "kthread_create_on_node", "wake_up_process")
_CALL_THREAD = bytes.fromhex(
    "53"  # push rbx
    "4889fb"  # mov rbx, rdi
    "488b7b08488b7310488b5318"  # mov rdi, [rbx+8]; mov rsi, [rbx+16]; mov rdx, [rbx+24]
    "488b4b204c8b43284c8b4b30"  # mov rcx, [rbx+32]; mov r8, [rbx+40]; mov r9, [rbx+48]
    "ff13"  # call [rbx]
    "48894338"  # mov [rbx+56], rax
    "48c7434001000000"  # mov qword [rbx+64], 1
    "31c05bc3"  # xor eax, eax; pop rbx; ret
)


def work_queues(kernel: LinuxKernel) -> tuple[dict[str, int], tuple[int, ...], dict[str, int]]:
    """Return the functions, constants and offsets in work_struct that calls need.

    Raises: KernelError ENOEXEC (the kernel's work queues are unknown).
    """
    try:
        functions = {name: kernel.required(name) for name in _SYMBOLS}
        constants = tuple(kernel.btf.constant(name) for name in _CONSTANTS)
        return functions, constants, {part: kernel.btf.offset(f"work_struct.{part}") for part in _PARTS}
    except KernelError as error:
        raise unusable("its work queues are unknown") from error


class KernelCalls(TaskObserver):
    """Calls functions of the kernel, one at a time. Needs the control lock.

    Raises: as work_queues.
    """

    def __init__(self, tasks: LinuxTasks, machine: ProbedLinux, kernel: LinuxKernel) -> None:
        self._tasks = tasks
        self._machine = machine
        self._kernel = kernel
        functions, (any_cpu, bits, shift), self._parts = work_queues(kernel)
        self._no_pool = (1 << bits) - 1 << shift
        """Data of a work_struct without a pool.

        Mirrors: include/linux/workqueue.h:WORK_STRUCT_NO_POOL (v6.1).
        """
        self._mailboxes: set[int] = set()
        """Mailboxes of calls whose threads may still write to them."""
        memory = machine.memory
        self._page = memory.host_pages.alloc(PAGE_SIZE)
        memory.map(_TEXT, self._page, PAGE_SIZE, Prot.READ | Prot.EXEC)
        for place, code in (
            (0, _interrupt_code(functions, any_cpu)),
            (_MAKER, _maker_code(functions)),
            (_THREAD, _CALL_THREAD),
            (_NAME, _COMM),
        ):
            memory.ram[self._page + place : self._page + place + len(code)] = code
        tasks.machine.engine.flush_tlb()
        tasks.events.watch(self)

    def call_function(self, function: str, *arguments: int | str) -> int:
        """Call a function and return its result. Strings are copied to guest memory.

        Raises: KernelError, as `CallArguments.placed`, EFAULT (the thread was killed), ETIMEDOUT (the
        function has not returned), ENOMEM (the thread cannot be made), GuestFault.
        """
        self._free_ended()
        memory = self._machine.memory
        mailbox = self._machine.alloc_pages(PAGE_SIZE)
        places = CallArguments(self._kernel, memory, mailbox + _STRINGS, PAGE_SIZE - _STRINGS)
        try:
            address, values = places.placed(function, arguments)
        except BaseException:
            self._machine.free_pages(mailbox)
            raise
        return self._call(mailbox, address, values)

    def call_at(self, address: int) -> int:
        """Call a function without arguments and return its result. Raises: as call_function."""
        return self._call(self._machine.alloc_pages(PAGE_SIZE), address, ())

    def _call(self, mailbox: int, address: int, values: Sequence[int]) -> int:
        memory = self._machine.memory
        memory.write(mailbox, struct.pack("<7Q", address, *values, *(0,) * (len(REGISTERS) - len(values))))
        self._queue(mailbox)
        begun = self._tasks.machine.pc.tsc
        self._tasks.do_work(_TEXT, lambda: self._head(mailbox)[_STATE // 8] != 0, _LONGEST)
        head = self._head(mailbox)
        state = head[_STATE // 8]
        if not state:
            passed = (self._tasks.machine.pc.tsc - begun) // TSC_KHZ
            raise KernelError(
                ETIMEDOUT, f"it hasn't come back after {passed} ms of the guest's; its thread is left to that"
            )
        self._free_ended()
        if state == _RETURNED:
            return head[_RESULT // 8]
        if state == _NO_THREAD:
            raise KernelError(ENOMEM, "the thread cannot be made")
        raise KernelError(EFAULT, "its thread was killed; see machine/dmesg")

    def _free_ended(self) -> None:
        """Free the mailboxes of calls that have ended, including those that timed out before."""
        for mailbox in [found for found in self._mailboxes if self._head(found)[_STATE // 8]]:
            self._mailboxes.discard(mailbox)
            self._machine.free_pages(mailbox)

    def _queue(self, mailbox: int) -> None:
        memory = self._machine.memory
        work = mailbox + _WORK
        entry = work + self._parts["entry"]
        memory.write(work + self._parts["data"], struct.pack("<Q", self._no_pool))
        memory.write(entry, struct.pack("<QQ", entry, entry))
        memory.write(work + self._parts["func"], struct.pack("<Q", _TEXT + _MAKER))
        struct.pack_into("<Q", memory.ram, self._page + _MAIL, work)
        self._mailboxes.add(mailbox)

    def _head(self, mailbox: int) -> tuple[int, ...]:
        return _HEAD.unpack(self._machine.memory.read(mailbox, _HEAD.size))

    def exiting(self, task: int) -> None:
        """Mark the call of an ending thread as killed if it has not returned."""
        for mailbox in self._mailboxes:
            head = self._head(mailbox)
            if head[_TASK // 8] == task and not head[_STATE // 8]:
                self._machine.memory.write(mailbox + _STATE, struct.pack("<Q", _KILLED))


def _load(register: int, value: int) -> bytes:
    """Return `mov register, imm64`; the register's number must be below 8."""
    return bytes((0x48, 0xB8 + register)) + struct.pack("<Q", value & (1 << 64) - 1)


_AX = 0
_CX = 1
_DX = 2
_DI = 7
_CALL_AX = b"\xff\xd0"
_JUMP_AX = b"\xff\xe0"


def _interrupt_code(functions: dict[str, int], any_cpu: int) -> bytes:
    """Return code that calls queue_work_on(any_cpu, system_unbound_wq, the work)."""
    return (
        _load(_DI, any_cpu)
        + _load(_AX, functions["system_unbound_wq"])
        + b"\x48\x8b\x30"  # mov rsi, [rax]
        + _load(_AX, _TEXT + _MAIL)
        + b"\x48\x8b\x10"  # mov rdx, [rax]
        + _load(_AX, functions["queue_work_on"])
        + _JUMP_AX
    )


def _maker_code(functions: dict[str, int]) -> bytes:
    """Return code that makes and wakes the thread.

    It calls wake_up_process(kthread_create_on_node(the thread, the mailbox, NUMA_NO_NODE, its name)).
    """
    made = (
        bytes.fromhex("488943484889c7")  # mov [rbx+72], rax; mov rdi, rax
        + _load(_AX, functions["wake_up_process"])
        + _CALL_AX
        + bytes.fromhex("5bc3")  # pop rbx; ret
    )
    return (
        bytes.fromhex("53488d5f804889de")  # push rbx; lea rbx, [rdi-128]; mov rsi, rbx
        + _load(_DI, _TEXT + _THREAD)
        + _load(_DX, -1)
        + _load(_CX, _TEXT + _NAME)
        + _load(_AX, functions["kthread_create_on_node"])
        + _CALL_AX
        + bytes.fromhex("483d01f0ffff73")  # cmp rax, -4095; jae to the store after `made`
        + bytes((len(made),))
        + made
        + bytes.fromhex("4889433848c74340020000005bc3")  # mov [rbx+56], rax; mov qword [rbx+64], 2
    )
