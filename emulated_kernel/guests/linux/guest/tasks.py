"""Clients as tasks of the guest's kernel: forks of init, each driven by the host through its stub.

A client that isn't driven sleeps as a task that an interrupt put to sleep: it is in no system call. The host
changes clients by one platform interrupt, whose callback wakes the next one; the kernel does all else, and no
system call is made that a probe could see.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import field
from errno import EAGAIN, ESRCH

from emulated_kernel.guests.linux.boot.boot_protocol import HOST_SIZE
from emulated_kernel.guests.linux.guest.dcache import DcacheReader
from emulated_kernel.guests.linux.guest.running_linux import RunningLinux
from emulated_kernel.guests.linux.initramfs import BUFFER, BUFFER_SIZE, SYSCALL, TOUCH, TWO_CALLS
from emulated_kernel.guests.linux.kernel_offsets import KernelOffsets
from emulated_kernel.guests.linux.pc.devices import TSC_KHZ
from emulated_kernel.guests.linux.pc.linux_machine import IDLE, IN_CALL, LinuxMachine
from emulated_kernel.guests.linux.pc.ram import FRAME, PAGE, PRESENT, WRITABLE
from emulated_kernel.machine.traps.trap import GuestFault, Trap, TrapKind
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass

_PLATFORM_IPI = 0xF7
_INTERRUPTIBLE = 1
NEED_RESCHED = 1 << 3
THREAD_SIZE = 16 << 10
THUNK_SIZE = 64 << 10
"""Bytes of the host's memory that its code in the kernel takes, with page tables for it."""
_PT_REGS = (
    "r15", "r14", "r13", "r12", "bp", "bx", "r11", "r10", "r9", "r8", "ax", "cx", "dx", "si", "di",
    "orig_ax", "ip",
)  # fmt: skip
_PT_REGS_WORDS = 21
_CALL_SLOTS = [
    _PT_REGS.index(name) for name in ("di", "si", "dx", "r10", "r8", "r9", "ax", "ip", "cx", "bx", "bp")
]
_NO_ARGUMENTS = (0,) * 6
_HOST_TEXT, _HOST_DATA = 0xFFFFFFFF70000000, 0xFFFFFFFF70001000
"""In a part of the kernel's own gigabytes that Linux leaves free, within reach of a jump from its text."""
_TAKEN = 0x100
"""Bytes of that page that are taken: the task to wake is the first word."""
_ARRIVAL = TSC_KHZ // 1000
"""Cycles that each arrival at the stub takes: time must pass for the guest's own housekeeping."""
_CLOSE = 3
_CLONE = 56
_EXIT_GROUP = 231
_RT_SIGACTION = 13
_MADVISE = 28
_KILL = 62
_CLONE_FILES = 0x400
_SIGCHLD = 17
_SIGKILL = 9
_SIG_IGN = 1
_WIPE_ON_FORK = 18
_PID_MAX = 1 << 22
_ROUNDS = 1 << 16
"""Runs until an answer is there; more of them mean that the guest has lost it."""
_WORD = (1 << 64) - 1
_OWN = PRESENT | WRITABLE


class Blocked(Exception):
    """The call sleeps in the guest; `answer` may be asked for again."""


Service = Callable[[], Callable[[], None]]
"""Does what a call asks the host for; what it returns puts the answer into the task's registers.

Raises: WouldBlock (the task waits on, and its client asks again). Nothing else.
"""


@dataclass(eq=False, slots=True, weakref_slot=True)
class LinuxTask:
    """A client's task; its registers and flags are reached where the kernel keeps them."""

    address: int
    pid: int
    root: int
    registers: int
    state: int
    flags: int
    """Physical addresses, as the three before."""
    entries: dict[int, int] = field(default_factory=dict)
    """By page the word with its page table entry: tables stay until it executes or ends."""
    owner: tuple[int, int] = 0, 0
    comm: str = ""
    pending: bool = False
    result: int = 0
    alive: bool = True
    service: Service | None = None
    """What the host does in the middle of its call."""
    waits: bool = False
    """It is where that is done; while the guest runs for others it sleeps there."""


class LinuxTasks(RunningLinux):
    """The tasks, and which of them stands at the stub; needs a machine at init's stub.

    Raises: KernelError (with the errno of a system call), GuestFault (the guest has died).
    """

    def __init__(self, machine: LinuxMachine, facts: KernelOffsets) -> None:
        super().__init__()
        self.machine = machine
        self.release = facts.release
        self.facts = facts
        self._memory = machine.memory
        self._ram = machine.memory.ram
        self._by_address: dict[int, LinuxTask] = {}
        self.per_cpu = self._word(facts.symbols["__per_cpu_offset"])
        self.current_cell = self.per_cpu + facts.current_task
        self._current = self._physical(self.current_cell)
        self._cursor = self._physical(
            facts.symbols["init_pid_ns"] + facts.offsets["pid_namespace.idr.idr_next"]
        )
        self._callback = self._physical(facts.symbols["x86_platform_ipi_callback"])
        machine.call_at(facts.symbols["do_exit"], self._exiting)
        machine.call_at(facts.symbols["wake_up_new_task"], self._forked)
        machine.call_at(facts.symbols["delayed_put_task_struct"], self._freed)
        machine.watch_reset(facts.symbols["emergency_restart"])
        self.init = self._adopt(self.running())
        self.files = DcacheReader(machine, facts, self.init.address)
        self.root = self.init.root
        self.host_room = len(self._ram) - HOST_SIZE + PAGE + _TAKEN, _HOST_DATA + _TAKEN
        """Physical and virtual address of most of a page that the host has in the kernel."""
        self.current: LinuxTask | None = self.init
        """Who stands at the stub; None: the CPU is idle, or between two of them."""
        self._in_call: LinuxTask | None = None
        """Who stands where its call waits for the host."""
        self.sleep_in_call: int | None = None
        """Where code begins that sleeps until its task is woken, and goes on at `woken()`."""
        self._answers: dict[LinuxTask, Callable[[], None]] = {}
        """Of tasks that have been served and sleep still."""

    def prepare(self) -> None:
        """Once, behind a boot: the thunk, and what all forks of init have from it."""
        self._map_thunk()
        self._store("<i", self._physical(self.facts.symbols["pid_max"]), _PID_MAX)
        self.copy_to_user(self.init, BUFFER, struct.pack("<4Q", _SIG_IGN, 0, 0, 0))
        self.call(self.init, _RT_SIGACTION, _SIGCHLD, BUFFER, 0, 8)
        self.call(self.init, _MADVISE, BUFFER, BUFFER_SIZE, _WIPE_ON_FORK)

    def _map_thunk(self) -> None:
        """wake_up_process() of the task in a word of the host's, as the platform interrupt's callback."""
        base = len(self._ram) - HOST_SIZE
        text, data, table, directory = (base + PAGE * number for number in range(4))
        slot = self._physical(self.facts.symbols["level3_kernel_pgt"]) + (_HOST_TEXT >> 30 & 511) * 8
        self._store("<Q", directory + (_HOST_TEXT >> 21 & 511) * 8, table | 0x63)
        self._store("<Q", table, text | 0x163)
        self._store("<Q", table + 8, data | 0x163 | 1 << 63)
        self._store("<Q", slot, directory | 0x63)
        wake = self.facts.symbols["wake_up_process"]
        code = b"\x48\x8b\x3d" + struct.pack("<i", _HOST_DATA - _HOST_TEXT - 7)  # mov rdi, [task]
        code += b"\x48\x85\xff\x74\x05"  # test rdi, rdi; jz the ret
        code += b"\xe9" + struct.pack("<i", wake - (_HOST_TEXT + len(code) + 5)) + b"\xc3"  # jmp wake; ret
        self._ram[text : text + len(code)] = code
        self._store("<Q", self._callback, _HOST_TEXT)
        self.machine.engine.flush_tlb()

    # The kernel's structures

    def _physical(self, va: int) -> int:
        return self._memory.translate(self.machine.cpu.root, va)

    def _word(self, va: int) -> int:
        return self._memory.words[self._physical(va) >> 3]

    def has_new_memory(self, task: LinuxTask) -> None:
        """Nothing of the memory that it had is its own any more."""
        task.root = self._root_of(task.address)
        task.entries.clear()

    def _root_of(self, address: int) -> int:
        """The page tables of a task that has memory of its own; physical."""
        offset = self.facts.offsets
        memory = self._word(address + offset["task_struct.mm"])
        return self._physical(self._word(memory + offset["mm_struct.pgd"]))

    def running(self) -> int:
        """The address of the task that the CPU runs."""
        return self._memory.words[self._current >> 3]

    def _store(self, form: str, physical: int, *values: int) -> None:
        struct.pack_into(form, self._ram, physical, *values)

    def _pid(self, address: int) -> int:
        place = self._physical(address + self.facts.offsets["task_struct.pid"])
        return int(struct.unpack_from("<i", self._ram, place)[0])

    def _adopt(self, address: int) -> LinuxTask:
        offset = self.facts.offsets
        stack = self._word(address + offset["task_struct.stack"])
        task = LinuxTask(
            address,
            self._pid(address),
            self._root_of(address),
            self._physical(stack + THREAD_SIZE - 8 * _PT_REGS_WORDS),
            self._physical(address + offset["task_struct.__state"]),
            self._physical(address + offset["task_struct.thread_info.flags"]),
        )
        self._by_address[address] = task
        return task

    def set_comm(self, task: LinuxTask, comm: str) -> None:
        """As its process is called on the host."""
        task.comm = comm
        at = self._physical(task.address + self.facts.offsets["task_struct.comm"])
        self._ram[at : at + 16] = comm.encode("utf-8", "surrogateescape")[:15].ljust(16, b"\0")
        for tell in self.events.renamed:
            tell(task.pid, comm)

    def set_creds(self, task: LinuxTask, uid: int, gid: int) -> None:
        """Its credentials, which a fork has for itself; without root's capabilities for anybody else."""
        offset = self.facts.offsets
        task.owner = uid, gid
        cred = self._word(task.address + offset["task_struct.cred"])
        self._store("<8I", self._physical(cred + offset["cred.uid"]), *(uid, gid) * 4)
        capabilities = 0 if uid else (1 << 40) - 1
        for name in ("cred.cap_permitted", "cred.cap_effective"):
            self._store("<Q", self._physical(cred + offset[name]), capabilities)

    # Running

    def _forked(self) -> None:
        """Before the child executes anything."""
        parent = self.running()
        child = self.machine.regs.di
        for tell in self.events.forked:
            tell(self._pid(parent), self._pid(child))

    def _exiting(self) -> None:
        """Whoever comes here never comes to the stub again; its task_struct may become another's."""
        address = self.running()
        for tell_end in self.events.exiting:
            tell_end(address)
        task = self._by_address.pop(address, None)
        if task is not None:
            task.alive = False
            task.pending = False
            task.result = -ESRCH

    def _freed(self) -> None:
        """Nothing is heard of a task any more."""
        task = self.machine.regs.di - self.facts.offsets["task_struct.rcu"]
        pid = self._pid(task)
        for tell in self.events.freed:
            tell(task)
        for tell in self.events.exited:
            tell(pid)

    def _run(self) -> LinuxTask | None:
        """Until a task is at the stub, or waits in its call; None where the CPU is idle."""
        if self._in_call is not None:
            self._leave_call()
        self.current = None
        machine = self.machine
        stopped = machine.run()
        if stopped is IDLE:
            return None
        if stopped is IN_CALL:
            return self._in_call
        address = self._memory.words[self._current >> 3]
        task = self._by_address.get(address) or self._adopt(address)
        if task.pending:
            result = machine.regs.ax
            task.pending = False
            task.result = result - (1 << 64) if result >> 63 else result
        machine.pc.pass_time(_ARRIVAL)
        self.current = task
        return task

    def _switch(self, to: LinuxTask | None) -> None:
        """Send away whoever is at the stub or in a call, and wake `to`. The CPU has to run next."""
        self._leave_call()
        task = self.current
        self.current = None
        self._store("<Q", len(self._ram) - HOST_SIZE + PAGE, to.address if to else 0)
        if task is not None:
            self._store("<I", task.state, _INTERRUPTIBLE)
            # The way back to user mode calls schedule().
            self._memory.words[task.flags >> 3] |= NEED_RESCHED
        self.machine.cpu.interrupt(_PLATFORM_IPI)

    # Calls that the host serves

    def wait_in_call(self) -> bool:
        """The running task's call is to be served: its run ends here. False: nobody serves it."""
        task = self._by_address.get(self._memory.words[self._current >> 3])
        if task is None or task.service is None:
            return False
        task.waits = True
        self._in_call = task
        self.machine.stop_in_call()
        return True

    def woken(self) -> bool:
        """The running task has been woken in its call: it gets its answer. False: none will ever come."""
        task = self._by_address.get(self._memory.words[self._current >> 3])
        if task is None or not (task.waits or task in self._answers):
            return False
        answer = self._answers.pop(task, None)
        if answer is None:
            # By somebody else.
            self._sleep_in_call(task)
        else:
            answer()
        return True

    def _leave_call(self) -> None:
        """Who stands in a call sleeps there from the next run on."""
        task = self._in_call
        self._in_call = None
        if task is not None:
            self._sleep_in_call(task)

    def _sleep_in_call(self, task: LinuxTask) -> None:
        assert self.sleep_in_call is not None, "nothing waits in a call before that code is there"
        self._store("<I", task.state, _INTERRUPTIBLE)
        self.machine.regs.ip = self.sleep_in_call

    def _serve(self, task: LinuxTask) -> None:
        """Do what its call waits for; the guest may run meanwhile. Raises: WouldBlock."""
        assert task.service is not None
        answer = task.service()
        task.waits = False
        task.service = None
        if self._in_call is task:
            self._in_call = None
            answer()
        else:
            self._answers[task] = answer
            self._switch(task)

    def _begin(
        self,
        task: LinuxTask,
        ip: int,
        ax: int,
        arguments: tuple[int, ...],
        cx: int = 0,
        kept: tuple[int, int] = (0, 0),
    ) -> None:
        """`kept`: rbx and rbp, which a system call leaves alone."""
        machine = self.machine
        if machine.death:
            machine.check_alive()
        if not task.alive:
            raise KernelError(ESRCH, f"task {task.pid} has ended")
        if self.current is not None and machine.pc.is_due:
            self._take_interrupts()
        values = (*arguments, *_NO_ARGUMENTS[len(arguments) :], ax, ip, cx, *kept)
        task.pending = True
        if task is self.current:
            regs = machine.regs
            regs.di, regs.si, regs.dx, regs.r10, regs.r8, regs.r9, regs.ax, *rest = values
            regs.ip, regs.cx, regs.bx, regs.bp = rest
            # The instruction itself would cost a callback.
            if ip != TOUCH:
                machine.cpu.syscall(ip)
            return
        words = self._memory.words
        base = task.registers >> 3
        for slot, value in zip(_CALL_SLOTS, values, strict=True):
            words[base + slot] = value & _WORD
        self._switch(task)

    def _take_interrupts(self) -> None:
        while self.current is not None and self.machine.pc.is_due:
            self.machine.timer()
            self._run()

    def call(
        self,
        task: LinuxTask,
        number: int,
        *arguments: int,
        patience: int = 0,
        service: Service | None = None,
    ) -> int:
        """A system call of the task's. Raises: Blocked, WouldBlock, as `service`, KernelError (its errno)."""
        task.service = service
        self._begin(task, SYSCALL, number, arguments)
        return self.wait_for_result(task, patience)

    def call_behind_close(
        self, task: LinuxTask, closed: int, number: int, *arguments: int, patience: int = 0
    ) -> int:
        """The same behind its close(2) of a descriptor, in one run; what that returns nobody is told."""
        first, *others = arguments
        self._begin(task, TWO_CALLS, _CLOSE, (closed, *others), kept=(first, number))
        return self.wait_for_result(task, patience)

    def wait_for_result(self, task: LinuxTask, patience: int = 0) -> int:
        """What its call has returned. Raises: Blocked (it sleeps for more than `patience` microseconds).

        With 0 it waits for ever, as far as something will ever interrupt the guest. WouldBlock; KernelError.
        """
        end = 0
        for _ in range(_ROUNDS):
            if task.waits:
                self._serve(task)
            elif not task.pending and self.current is not None:
                break
            found = self._run()
            if found is None:
                if not task.pending:
                    break
                now = self.machine.pc.tsc
                end = end or now + patience * TSC_KHZ // 1000
                if patience and now >= end:
                    raise Blocked
                self.machine.timer()
            elif task.pending and not task.waits:
                self._switch(None)
        else:
            self.machine.death = f"task {task.pid} doesn't come back from its call"
            raise GuestFault(Trap(TrapKind.BUDGET, 0), self.machine.death)
        if -4096 < task.result < 0:
            raise KernelError(-task.result)
        return task.result

    def idle(self, microseconds: int) -> None:
        end = self.machine.pc.tsc + microseconds * TSC_KHZ // 1000
        if self.current is not None:
            self._switch(None)
        while True:
            if self._run() is not None:
                self._switch(None)
            elif self.machine.pc.tsc >= end or self.machine.pc.timer_vector is None:
                return
            else:
                self.machine.timer()

    def do_work(self, callback: int, is_done: Callable[[], bool], microseconds: int) -> None:
        """The kernel calls `callback` in an interrupt; go on until that is done, for so long at most."""
        self.machine.check_alive()
        if self.current is not None:
            self._take_interrupts()
        end = self.machine.pc.tsc + microseconds * TSC_KHZ // 1000
        self._store("<Q", self._callback, callback)
        self._switch(None)
        for _ in range(_ROUNDS):
            found = self._run()
            self._store("<Q", self._callback, _HOST_TEXT)
            if is_done():
                return
            if found is not None:
                self._switch(None)
            elif self.machine.pc.tsc >= end or self.machine.pc.timer_vector is None:
                return
            else:
                self.machine.timer()

    def schedule_in(self, task: LinuxTask) -> None:
        """Let it be the one that stands at the stub; what sleeps in a call stays where it is."""
        if task is self.current or task.pending or not task.alive:
            return
        self.machine.check_alive()
        self._switch(task)
        for _ in range(_ROUNDS):
            found = self._run()
            if found is task:
                return
            if found is None:
                self.machine.timer()
            else:
                self._switch(task)

    # Life

    def fork(self, parent: LinuxTask, pid: int) -> LinuxTask:
        """A child, of that pid if nobody has it. Raises: KernelError EAGAIN, ENOMEM."""
        known = set(self._by_address)
        cursor = struct.unpack_from("<I", self._ram, self._cursor)[0]
        self._store("<I", self._cursor, pid)
        self._begin(parent, SYSCALL, _CLONE, (_CLONE_FILES | _SIGCHLD,))
        child = None
        for _ in range(_ROUNDS):
            found = self._run()
            if found is not None and found.address not in known:
                child = found
            if not parent.pending and (child is not None or parent.result < 0):
                break
            if found is None:
                self.machine.timer()
            else:
                self._switch(None)
        # The kernel's own threads go on where they were.
        self._store("<I", self._cursor, cursor)
        if child is None:
            raise KernelError(-parent.result if parent.result < 0 else EAGAIN)
        child.owner = parent.owner
        child.comm = parent.comm
        return child

    def exit(self, task: LinuxTask) -> None:
        """The process has ended on the host; one that sleeps in a call is killed."""
        if not task.alive:
            return
        task.waits = False
        task.service = None
        self._answers.pop(task, None)
        if task.pending:
            self.call(self.init, _KILL, task.pid, _SIGKILL)
            self._switch(None)
        else:
            self._begin(task, SYSCALL, _EXIT_GROUP, (0,))
        for _ in range(_ROUNDS):
            found = self._run()
            if not task.alive:
                return
            if found is None:
                self.machine.timer()
            else:
                self._switch(None)

    # Memory of a client's own

    def _places(self, task: LinuxTask, va: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Where its pages lie: physical address, offset in what is meant, size. They are its own then."""
        for page in range(va & -PAGE, va + size, PAGE):
            found = self._memory.walk(task.root, page)
            if found is None or not found[1] & WRITABLE:
                kept = self._ram[found[0]] if found else 0
                self._begin(task, TOUCH, kept, (page,), cx=1)
                self.wait_for_result(task)
                found = self._memory.walk(task.root, page)
                assert found is not None
            first = max(page, va)
            last = min(page + PAGE, va + size)
            yield found[0] + first - page, first - va, last - first

    def _entry(self, task: LinuxTask, page: int) -> int:
        """Its page table entry of a page; 0 where there is none. What has it is kept in `entries`."""
        slot, size = self._memory.last(task.root, page)
        if size != PAGE:
            return 0
        task.entries[page] = slot
        return self._memory.words[slot]

    def copy_to_user(self, task: LinuxTask, va: int, data: bytes) -> None:
        """Write to its memory."""
        page = va & -PAGE
        slot = task.entries.get(page)
        entry = self._memory.words[slot] if slot is not None else self._entry(task, page)
        if entry & _OWN == _OWN and va + len(data) <= page + PAGE:
            at = (entry & FRAME) + va - page
            self._ram[at : at + len(data)] = data
            return
        for at, offset, size in self._places(task, va, len(data)):
            self._ram[at : at + size] = data[offset : offset + size]

    def copy_from_user(self, task: LinuxTask, va: int, size: int) -> bytes:
        """Read its memory; what isn't there is zeros."""
        start = va & -PAGE
        slot = task.entries.get(start)
        entry = self._memory.words[slot] if slot is not None else self._entry(task, start)
        if entry & PRESENT and va + size <= start + PAGE:
            at = (entry & FRAME) + va - start
            return self._ram[at : at + size]
        parts = []
        for page in range(va & -PAGE, va + size, PAGE):
            first = max(page, va)
            last = min(page + PAGE, va + size)
            found = self._memory.walk(task.root, first)
            parts.append(self._ram[found[0] : found[0] + last - first] if found else bytes(last - first))
        return b"".join(parts)
