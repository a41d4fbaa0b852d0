"""KernelCalls: calls functions of a running distribution's kernel, each in a separate kernel thread.

An interrupt queues a work_struct, as a device's interrupt does. The work_struct's function creates the
thread, which may sleep.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from errno import EFAULT, ENOMEM, ETIMEDOUT

from emulated_kernel.guests.linux.guest.call_arguments import REGISTERS, CallArguments
from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.guest_abi import ARM64, X86_64, GuestAbi
from emulated_kernel.guests.linux.probing.probed_linux import ProbedLinux
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.machine.task_events import TaskObserver
from emulated_kernel.util.abi import PAGE_SIZE, Prot
from emulated_kernel.util.code_listing import machine_code
from emulated_kernel.util.errors import KernelError

_TEXT = 0x10000
"""Offset in bytes, from GuestAbi.host_code, of the page with this module's code."""
_MAKER = 0x100
"""Offset of the work_struct's function, which creates the thread, in the page with this module's code."""
_THREAD = 0x200
"""Offset in bytes of the thread function in the page with this module's code."""
_MAIL = 0x300
"""Offset in bytes, in the page with this module's code, of the address of the work_struct to queue."""
_NAME = 0x310
"""Offset in bytes of the thread's name in the page with this module's code."""
_COMM = b"machine/call\0"
_LONGEST = 60_000_000
"""Maximum microseconds of guest time that a call may sleep."""
_RESULT = 56
"""Offset in bytes of the result in a mailbox, which is the memory with the data of a call.

The function and its arguments precede the result.
"""
_STATE = 64
"""Offset in bytes of a call's state in its mailbox.

The state is 0 at first. Later it is _RETURNED (the result is at _RESULT), _NO_THREAD (no thread could be
made) or _KILLED (the thread exited before the call returned).
"""
_TASK = 72
"""Offset in bytes, in a mailbox, of the address of the thread's task_struct."""
_WORK = 128
"""Offset in bytes of the work_struct in a mailbox."""
_STRINGS = 256
"""Offset in bytes of the call's string arguments in a mailbox."""
_HEAD = struct.Struct("<10Q")
_RETURNED = 1
_NO_THREAD = 2
_KILLED = 3
_CONSTANTS = ("WORK_CPU_UNBOUND", "WORK_OFFQ_POOL_BITS", "WORK_OFFQ_POOL_SHIFT")
_PARTS = ("data", "entry", "func")
_SYMBOLS = ("queue_work_on", "kthread_create_on_node", "wake_up_process")
_WORKQUEUES = "system_dfl_wq", "system_unbound_wq"
"""Symbols of the workqueue whose work may run on any CPU: since v6.17, and before.

Newer kernels warn of users of the old workqueue.
"""
INTERRUPT = """
    48 bf imm64:any_cpu             | movabs rdi, any_cpu
    48 b8 imm64:workqueue           | movabs rax, workqueue
    48 8b 30                        | mov rsi, [rax]
    48 b8 imm64:work                | movabs rax, work
    48 8b 10                        | mov rdx, [rax]
    48 b8 imm64:queue_work_on       | movabs rax, queue_work_on
    ff e0                           | jmp rax
"""
"""Code that the interrupt of KernelCalls runs: queue_work_on(any_cpu, *workqueue, *work)."""
MAKER = """
    53                              | push rbx
    48 8d 5f 80                     | lea rbx, [rdi - 128]
    48 89 de                        | mov rsi, rbx
    48 bf imm64:thread              | movabs rdi, thread
    48 ba ff ff ff ff ff ff ff ff   | movabs rdx, -1
    48 b9 imm64:name                | movabs rcx, name
    48 b8 imm64:kthread_create_on_node | movabs rax, kthread_create_on_node
    ff d0                           | call rax
    48 3d 01 f0 ff ff               | cmp rax, -4095
    73 15                           | jae failed
    48 89 43 48                     | mov [rbx + 72], rax
    48 89 c7                        | mov rdi, rax
    48 b8 imm64:wake_up_process     | movabs rax, wake_up_process
    ff d0                           | call rax
    5b                              | pop rbx
    c3                              | ret
    48 89 43 38                     | failed: mov [rbx + 56], rax
    48 c7 43 40 02 00 00 00         | mov qword ptr [rbx + 64], 2
    5b                              | pop rbx
    c3                              | ret
"""
"""The work_struct's function: wake_up_process(kthread_create_on_node(thread, mailbox, NUMA_NO_NODE, name)).

The work_struct is at _WORK in the mailbox. The code stores the task at _TASK. After an error, it stores the
error at _RESULT and _NO_THREAD at _STATE.
"""
THREAD = """
    53                              | push rbx
    48 89 fb                        | mov rbx, rdi
    48 8b 7b 08                     | mov rdi, [rbx + 8]
    48 8b 73 10                     | mov rsi, [rbx + 16]
    48 8b 53 18                     | mov rdx, [rbx + 24]
    48 8b 4b 20                     | mov rcx, [rbx + 32]
    4c 8b 43 28                     | mov r8, [rbx + 40]
    4c 8b 4b 30                     | mov r9, [rbx + 48]
    ff 13                           | call [rbx]
    48 89 43 38                     | mov [rbx + 56], rax
    48 c7 43 40 01 00 00 00         | mov qword ptr [rbx + 64], 1
    31 c0                           | xor eax, eax
    5b                              | pop rbx
    c3                              | ret
"""
"""Code of the thread: call the function whose address and arguments are at the start of the mailbox.

It stores the function's result at _RESULT, and _RETURNED at _STATE.
"""


def calls_text(abi: GuestAbi) -> range:
    """Return the addresses of the guest page with the assembly code of this module."""
    return range(abi.host_code + _TEXT, abi.host_code + _TEXT + PAGE_SIZE)


def work_queues(kernel: LinuxKernel) -> tuple[dict[str, int], tuple[int, ...], dict[str, int]]:
    """Return (functions, constants, offsets) by which the code of this module uses the kernel's work queues.

    functions: symbol -> address; "workqueue" is the variable that points to the workqueue. constants: values
    of the constants named in _CONSTANTS. offsets: member of work_struct -> its offset in bytes.
    Raises: KernelError ENOEXEC (the kernel's work queues are unknown).
    """
    functions = {name: kernel.required(name) for name in _SYMBOLS}
    queues = (kernel.kallsyms.lookup_name(name) for name in _WORKQUEUES)
    functions["workqueue"] = next(filter(None, queues), 0) or kernel.required(_WORKQUEUES[-1])
    try:
        constants = tuple(kernel.btf.constant(name) for name in _CONSTANTS)
        return functions, constants, {part: kernel.btf.offset(f"work_struct.{part}") for part in _PARTS}
    except KernelError as error:
        raise unusable("its work queues are unknown") from error


def _code(abi: GuestAbi, symbols: Mapping[str, int]) -> tuple[tuple[int, bytes], ...]:
    """Return (offset in the page, bytes) of the code of the interrupt, of the work_struct and of the thread.

    `symbols`: name -> value, for the names in the code listings. A processor's module with these listings is
    imported only when a kernel of that processor is used.
    """
    if abi is X86_64:
        return (
            (0, machine_code(INTERRUPT, symbols=symbols)),
            (_MAKER, machine_code(MAKER, symbols=symbols)),
            (_THREAD, machine_code(THREAD)),
        )
    if abi is ARM64:
        from emulated_kernel.guests.linux.probing import arm64_calls

        return (
            (0, machine_code(arm64_calls.INTERRUPT, symbols=symbols)),
            (_MAKER, machine_code(arm64_calls.MAKER, symbols=symbols)),
            (_THREAD, machine_code(arm64_calls.THREAD)),
        )
    from emulated_kernel.guests.linux.probing import riscv_calls

    return (
        (0, riscv_calls.interrupt(symbols)),
        (_MAKER, riscv_calls.maker(symbols, _WORK, _RESULT, _STATE, _TASK, _NO_THREAD)),
        (_THREAD, riscv_calls.thread(_RESULT, _STATE, _RETURNED)),
    )


class KernelCalls(TaskObserver):
    """Calls functions of the kernel, one at a time. Lock: held.

    Raises: as work_queues.
    """

    def __init__(self, tasks: LinuxTasks, machine: ProbedLinux, kernel: LinuxKernel) -> None:
        self._tasks = tasks
        self._machine = machine
        self._kernel = kernel
        functions, (any_cpu, bits, shift), self._parts = work_queues(kernel)
        self._no_pool = (1 << bits) - 1 << shift
        """Value of work_struct.data for work that belongs to no worker pool.

        Mirrors: include/linux/workqueue.h:WORK_STRUCT_NO_POOL (v6.1).
        """
        self._mailboxes: set[int] = set()
        """Addresses of the mailboxes of calls whose threads may still write to them."""
        memory = machine.memory
        self._page = memory.host_pages.alloc(PAGE_SIZE)
        text = calls_text(tasks.machine.abi).start
        self._text = text
        memory.map(text, self._page, PAGE_SIZE, Prot.READ | Prot.EXEC)
        places = {"work": text + _MAIL, "thread": text + _THREAD, "name": text + _NAME}
        symbols = {**functions, **places, "any_cpu": any_cpu}
        for place, code in (
            *_code(tasks.machine.abi, symbols),
            (_NAME, _COMM),
        ):
            memory.ram[self._page + place : self._page + place + len(code)] = code
        tasks.machine.engine.flush_tlb()
        tasks.events.watch(self)

    def call_function(self, function: str, *arguments: int | str) -> int:
        """Call the kernel function `function` and return its result; copy string arguments to guest memory.

        Raises: the errors of CallArguments.placed(), KernelError EFAULT (the thread was killed), ETIMEDOUT
        (the function has not returned), ENOMEM (the thread cannot be made), GuestFault (the guest is dead, or
        dies in the call).
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
        """Call the kernel function at `address` without arguments and return its result.

        Raises: as call_function(), except for the errors of CallArguments.placed().
        """
        return self._call(self._machine.alloc_pages(PAGE_SIZE), address, ())

    def _call(self, mailbox: int, address: int, values: Sequence[int]) -> int:
        memory = self._machine.memory
        memory.write(mailbox, struct.pack("<7Q", address, *values, *(0,) * (len(REGISTERS) - len(values))))
        self._queue(mailbox)
        begun = self._tasks.machine.pc.tsc
        self._tasks.do_work(self._text, lambda: self._head(mailbox)[_STATE // 8] != 0, _LONGEST)
        head = self._head(mailbox)
        state = head[_STATE // 8]
        if not state:
            passed = (self._tasks.machine.pc.tsc - begun) // self._tasks.machine.pc.khz
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
        """Free the mailboxes of calls that have ended, including calls that ended after their time-out."""
        for mailbox in [found for found in self._mailboxes if self._head(found)[_STATE // 8]]:
            self._mailboxes.discard(mailbox)
            self._machine.free_pages(mailbox)

    def _queue(self, mailbox: int) -> None:
        memory = self._machine.memory
        work = mailbox + _WORK
        entry = work + self._parts["entry"]
        memory.write(work + self._parts["data"], struct.pack("<Q", self._no_pool))
        memory.write(entry, struct.pack("<QQ", entry, entry))
        memory.write(work + self._parts["func"], struct.pack("<Q", self._text + _MAKER))
        struct.pack_into("<Q", memory.ram, self._page + _MAIL, work)
        self._mailboxes.add(mailbox)

    def _head(self, mailbox: int) -> tuple[int, ...]:
        return _HEAD.unpack(self._machine.memory.read(mailbox, _HEAD.size))

    def exiting(self, task: int) -> None:
        """Mark a call as killed, if its thread exits before the call has returned.

        `task`: address of the task_struct of a task that exits.
        """
        for mailbox in self._mailboxes:
            head = self._head(mailbox)
            if head[_TASK // 8] == task and not head[_STATE // 8]:
                self._machine.memory.write(mailbox + _STATE, struct.pack("<Q", _KILLED))
