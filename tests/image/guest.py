"""A minimal machine that boots an image, for tests of the guest kernel without kprobefs's machine."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from unicorn import UC_ARCH_X86, UC_HOOK_INSN_INVALID, UC_HOOK_INTR, UC_MODE_64, Uc
from unicorn import x86_const as x86

from emulated_kernel.image.builtin_image import KernelImage
from emulated_kernel.util.abi import PAGE_SIZE, PARK, HostfsOp, Hypercall, Prot, Vector

RAM_SIZE = 64 << 20
PAGE_OFFSET = 0xFFFF_8880_0000_0000
KERNEL_MAP = 0xFFFF_FFFF_8000_0000
USER_BUFFER = 0x0000_7F00_0000_0000
USER_SIZE = 1 << 20
USER_PHYS = 0xC0_0000
TABLES_PHYS = 0x10_0000
BOOT_PARAMS_PHYS = 0x8000
NX = 1 << 63
TICK_NS = 4_000_000
BUGFLAG_WARNING = 1
"""Flag of a bug entry after whose ud2 the execution continues."""
SYSCALL_REGS = [getattr(x86, f"UC_X86_REG_R{n}") for n in ("DI", "SI", "DX", "10", "8", "9")]
GPRS = [
    *(getattr(x86, f"UC_X86_REG_R{n}") for n in ("AX", "BX", "CX", "DX", "SI", "DI", "BP", "SP")),
    *(getattr(x86, f"UC_X86_REG_R{n}") for n in range(8, 16)),
]


class GuestPanic(Exception):
    """Raised when the guest kernel has panicked."""


class GuestStuck(Exception):
    """Raised when the guest does not stop by itself in time."""


@dataclass(frozen=True)
class Trap:
    """A hypercall at which the guest stopped, with its arguments."""

    reason: Hypercall
    args: tuple[int, int, int, int]


@dataclass
class Task:
    """A guest task and the results of its system calls."""

    address: int
    results: list[int] = field(default_factory=list)


HostFile = Callable[[HostfsOp, int, int, int], int]


class Guest:
    """A guest with one CPU, page tables with NX, and hypercalls. Registers are accessed by Unicorn's API."""

    def __init__(self, image: KernelImage, ram_size: int = RAM_SIZE) -> None:
        self.image = image
        self.abi = image.abi
        self.uc = Uc(UC_ARCH_X86, UC_MODE_64)
        self.uc.mem_map(0, ram_size)
        self.ram_size = ram_size
        self.percpu = self.abi["percpu.base"]
        self.host_file: HostFile | None = None
        self.exited: list[tuple[int, int]] = []
        self._exits_read = 0
        self._fault: tuple[int, int] | None = None
        self._map_all()
        self._load()
        self.uc.hook_add(UC_HOOK_INTR, self._on_interrupt)
        self.uc.hook_add(UC_HOOK_INSN_INVALID, self._on_invalid)
        self._clean = self.uc.context_save()

    # Memory

    def read(self, va: int, size: int) -> bytes:
        return bytes(self.uc.mem_read(self._phys(va), size))

    def write(self, va: int, data: bytes) -> None:
        self.uc.mem_write(self._phys(va), data)

    def u64(self, va: int) -> int:
        return int(struct.unpack("<Q", self.read(va, 8))[0])

    def u32(self, va: int) -> int:
        return int(struct.unpack("<I", self.read(va, 4))[0])

    def symbol(self, name: str) -> int:
        address = self.image.kallsyms.lookup_name(name)
        assert address is not None, name
        return address

    def task_u32(self, task: int, name: str) -> int:
        return self.u32(task + self.abi[f"task_struct.{name}"])

    def comm(self, task: int) -> str:
        return self.read(task + self.abi["task_struct.comm"], 16).split(b"\0")[0].decode()

    @property
    def current(self) -> int:
        return self.u64(self.percpu + self.abi["percpu.current_task"])

    @property
    def free_pages(self) -> int:
        return self.call_raw("nr_free_pages")

    def log(self) -> list[str]:
        """Return the messages in the log buffer, whose format src/README.md describes."""
        return [text for _, _, text in self._records()]

    # Running

    def boot(self) -> None:
        params = (0x100_0000 + self._image_size(), self.ram_size, PAGE_OFFSET, 1, 250, 10**18, 1)
        self.uc.mem_write(BOOT_PARAMS_PHYS, struct.pack("<QQQIIQQ", *params))
        self.uc.reg_write(x86.UC_X86_REG_RDI, PAGE_OFFSET + BOOT_PARAMS_PHYS)
        self.uc.reg_write(x86.UC_X86_REG_RSP, self.abi["init_stack.top"])
        self.uc.reg_write(x86.UC_X86_REG_RIP, self.image.entry)
        self.write(self.abi["host_clock"], struct.pack("<QQ", 1000, 10))
        assert self.run().reason is Hypercall.BOOTED

    def run(self) -> Trap:
        """Run until a stop that this method does not handle; it handles faults and calls of hostfs."""
        while True:
            self._fault = None
            rip = self.uc.reg_read(x86.UC_X86_REG_RIP)
            self.uc.emu_start(rip, 0, timeout=10_000_000)
            if self._fault is not None:
                vector, error = self._fault
                self.deliver(vector, error)
                continue
            if self.uc.mem_read(self._phys(self.uc.reg_read(x86.UC_X86_REG_RIP) - 1), 1) != b"\xf4":
                raise GuestStuck(hex(self.uc.reg_read(x86.UC_X86_REG_RIP)))
            trap = self._trap()
            if trap.reason is Hypercall.PANIC:
                raise GuestPanic(self.read(trap.args[0], 256).split(b"\0")[0].decode())
            if trap.reason is not Hypercall.HOSTFS:
                self._collect_exits()
                return trap
            op, *rest = trap.args
            assert self.host_file is not None
            self.answer(self.host_file(HostfsOp(op), *rest))

    def answer(self, value: int) -> None:
        self.uc.reg_write(x86.UC_X86_REG_RAX, value & (1 << 64) - 1)

    def deliver(self, vector: int, error: int = 0) -> None:
        """Raise exception `vector` in the guest: push rip, flags, error code and vector, and continue at the
        guest's interrupt entry.
        """
        uc = self.uc
        cr2 = uc.reg_read(x86.UC_X86_REG_CR2)
        gprs = [uc.reg_read(reg) for reg in GPRS]
        rip, flags = uc.reg_read(x86.UC_X86_REG_RIP), uc.reg_read(x86.UC_X86_REG_EFLAGS)
        uc.context_restore(self._clean)
        for reg, value in zip(GPRS, gprs, strict=True):
            uc.reg_write(reg, value)
        self.write(self.percpu + self.abi["percpu.host_cr2"], struct.pack("<Q", cr2))
        sp = gprs[GPRS.index(x86.UC_X86_REG_RSP)] - 32
        self.write(sp, struct.pack("<QQQQ", vector, error, flags, rip))
        uc.reg_write(x86.UC_X86_REG_RSP, sp)
        uc.reg_write(x86.UC_X86_REG_EFLAGS, flags & ~0x300)
        uc.reg_write(x86.UC_X86_REG_RIP, self.abi["asm_host_interrupt"])

    def park(self, wake: int) -> None:
        """Answer the hypercall USER with PARK.

        `wake`: task to wake, or 0.
        """
        self.uc.reg_write(x86.UC_X86_REG_RDI, wake)
        self.answer(PARK)

    def set_ip(self, address: int) -> None:
        self.uc.reg_write(x86.UC_X86_REG_RIP, address)

    def tick(self) -> None:
        self.deliver(Vector.TIMER)

    def wake(self, task: int) -> None:
        self.write(self.percpu + self.abi["percpu.host_mailbox"], struct.pack("<Q", task))
        self.deliver(Vector.WAKE)

    def call_raw(self, name: str, *args: int) -> int:
        """Call a function on a separate stack, with preemption off, outside of any task."""
        saved = self.uc.context_save()
        count = self.percpu + self.abi["percpu.preempt_count"]
        preempt = self.read(count, 4)
        self.write(count, struct.pack("<I", 1))
        stack = PAGE_OFFSET + 0x7F000
        self.write(stack - 8, struct.pack("<Q", self.abi["host_return"]))
        self.uc.reg_write(x86.UC_X86_REG_RSP, stack - 8)
        for reg, value in zip(SYSCALL_REGS[:3], args, strict=False):
            self.uc.reg_write(reg, value)
        self.uc.reg_write(x86.UC_X86_REG_RIP, self.symbol(name))
        trap = self.run()
        assert trap.reason is Hypercall.RETURN
        self.uc.context_restore(saved)
        self.write(count, preempt)
        return trap.args[0]

    # Tasks; init creates all others

    def to_idle(self) -> None:
        """Park each task, until nothing is runnable."""
        while (trap := self.run()).reason is Hypercall.USER:
            self.park(0)
        assert trap.reason is Hypercall.IDLE

    def idle_until(self, done: Callable[[], bool], ticks: int = 1000) -> None:
        """Let time pass until `done` returns True; park tasks that arrive in user mode.

        Raises: GuestStuck (`done` still returns False after `ticks` timer ticks).
        """
        for _ in range(ticks):
            if done():
                return
            self.write(self.abi["host_clock"], struct.pack("<Q", self.u64(self.abi["host_clock"]) + TICK_NS))
            self.tick()
            self.to_idle()
        raise GuestStuck("nothing happened")

    def syscall(self, task: int, number: int, *args: int | bytes) -> int | None:
        """Make a system call of a parked task, and run until the CPU is idle.

        Return the result, or None if the task died or sleeps. Arguments of type bytes are put into the second
        half of the user buffer.
        """
        values = self._place(args)
        self.wake(task)
        asked = False
        while (trap := self.run()).reason is Hypercall.USER:
            if self.current != task:
                self.park(0)
            elif asked:
                self.park(0)
                self.to_idle()
                return trap.args[0] - (1 << 64) if trap.args[0] >> 63 else trap.args[0]
            else:
                asked = True
                for reg, value in zip(SYSCALL_REGS, values, strict=False):
                    self.uc.reg_write(reg, value & (1 << 64) - 1)
                self.answer(number)
        assert trap.reason is Hypercall.IDLE
        return None

    def start_syscall(self, task: int, number: int, *args: int | bytes) -> None:
        """Answer the hypercall USER of a parked task with a system call, without running the guest."""
        values = self._place(args)
        self.wake(task)
        assert self.run().reason is Hypercall.USER
        assert self.current == task
        for reg, value in zip(SYSCALL_REGS, values, strict=False):
            self.uc.reg_write(reg, value & (1 << 64) - 1)
        self.answer(number)

    def run_for(self, instructions: int) -> None:
        """Run a number of instructions, whatever they do."""
        self.uc.emu_start(self.uc.reg_read(x86.UC_X86_REG_RIP), 0, count=instructions)

    def adopt(self, pid: int, comm: str = "sh", parent: int = 1, uid: int = 0, gid: int = 0) -> int:
        init = self.task_of(1)
        result = self.syscall(
            init, self.abi["nr.host_task_create"], pid, parent, comm.encode() + b"\0", uid, gid
        )
        assert result is not None
        return result & (1 << 64) - 1 if result < -4096 else result

    def host_call(self, task: int, name: str, *args: int) -> int | None:
        words = struct.pack("<6Q", *(value & (1 << 64) - 1 for value in (*args, *[0] * (6 - len(args)))))
        return self.syscall(task, self.abi["nr.host_call"], self.symbol(name), words)

    def task_of(self, pid: int) -> int:
        return next(task for task in self.tasks() if self.task_u32(task, "pid") == pid)

    def tasks(self) -> Iterator[int]:
        """Yield all tasks in the guest's list of tasks. The idle task is not in this list."""
        offset = self.abi["task_struct.tasks"]
        head = self.abi["init_task"] + offset
        entry = self.u64(head)
        while entry != head:
            yield entry - offset
            entry = self.u64(entry)

    def _place(self, args: tuple[int | bytes, ...]) -> list[int]:
        where = USER_BUFFER + USER_SIZE // 2
        values = []
        for arg in args:
            if isinstance(arg, bytes):
                self.write(where, arg)
                values.append(where)
                where += (len(arg) + 15) & ~15
            else:
                values.append(arg)
        return values

    def _collect_exits(self) -> None:
        base = self.abi["host_exits"]
        count = self.u64(base)
        for index in range(self._exits_read, count):
            slot = index % self.abi["host_exits.entries"]
            record = base + self.abi["host_exits.ring"] + slot * self.abi["host_exit_record.size"]
            _, pid, code = struct.unpack("<Qii", self.read(record, 16))
            self.exited.append((pid, code))
        self._exits_read = count

    def _records(self) -> Iterator[tuple[int, int, str]]:
        buffer = self.abi["__log_buf"]
        index, last = self.u32(self.abi["log_first_idx"]), self.u32(self.abi["log_next_idx"])
        seq, next_seq = self.u64(self.abi["log_first_seq"]), self.u64(self.abi["log_next_seq"])
        header = self.abi["printk_record.text"]
        while seq < next_seq:
            if index + header > self.abi["log_buf.size"] or not self._rec_size(buffer + index):
                index = 0
            record = buffer + index
            (length,) = struct.unpack("<H", self.read(record + self.abi["printk_record.text_len"], 2))
            level = self.read(record + self.abi["printk_record.level"], 1)[0]
            yield seq, level, self.read(record + header, length).decode("ascii", "replace")
            index += self._rec_size(record)
            seq += 1
        assert index == last or seq == 0

    def _rec_size(self, record: int) -> int:
        return int(struct.unpack("<H", self.read(record + self.abi["printk_record.rec_size"], 2))[0])

    # Hardware

    def _trap(self) -> Trap:
        regs = [self.uc.reg_read(reg) for reg in SYSCALL_REGS[:4]]
        reason = Hypercall(self.uc.reg_read(x86.UC_X86_REG_EAX))
        return Trap(reason, (regs[0], regs[1], regs[2], regs[3]))

    def _on_interrupt(self, uc: Any, number: int, _data: object) -> None:
        self._fault = (number, 0)
        uc.emu_stop()

    def _on_invalid(self, uc: Any, _data: object) -> bool:
        self._fault = (Vector.INVALID_OPCODE, 0)
        uc.emu_stop()
        return True

    def _image_size(self) -> int:
        last = max(segment.va + segment.mem_size for segment in self.image.segments)
        return (last - KERNEL_MAP - 0x100_0000 + PAGE_SIZE - 1) & ~(PAGE_SIZE - 1)

    def _load(self) -> None:
        for segment in self.image.segments:
            self.uc.mem_write(segment.va - KERNEL_MAP, segment.data)
        uc = self.uc
        uc.reg_write(x86.UC_X86_REG_CR3, TABLES_PHYS)
        uc.reg_write(x86.UC_X86_REG_CR4, 0x20)
        uc.msr_write(0xC0000080, 0xD00)
        uc.reg_write(x86.UC_X86_REG_CR0, 0x80050033)
        uc.msr_write(0xC0000101, self.percpu)
        uc.ctl_set_exits([])

    def _map_all(self) -> None:
        self.uc.ctl_exits_enabled(True)
        pages = [(PAGE_OFFSET, 0, self.ram_size, 3 | NX)]
        for segment in self.image.segments:
            flags = 1 | (2 if segment.prot & Prot.WRITE else 0) | (0 if segment.prot & Prot.EXEC else NX)
            start = segment.va & ~0xFFF
            pages.append((start, start - KERNEL_MAP, segment.va + segment.mem_size - start, flags))
        pages.append((USER_BUFFER, USER_PHYS, USER_SIZE, 3 | NX))
        self.uc.mem_write(TABLES_PHYS, _page_tables(tuple(pages)))

    def _phys(self, va: int) -> int:
        if va >= KERNEL_MAP:
            return va - KERNEL_MAP
        if va >= PAGE_OFFSET:
            return va - PAGE_OFFSET
        return va - USER_BUFFER + USER_PHYS


@cache
def _page_tables(spans: tuple[tuple[int, int, int, int], ...]) -> bytes:
    """Return page tables for TABLES_PHYS, with the root first.

    Each span has a virtual address, a physical address, a size, and the bits of the entries.
    """
    tables = [[0] * 512]

    def below(table: list[int], index: int) -> list[int]:
        if not table[index]:
            table[index] = TABLES_PHYS + PAGE_SIZE * len(tables) | 3
            tables.append([0] * 512)
        return tables[(table[index] - TABLES_PHYS) // PAGE_SIZE]

    for va, phys, size, flags in spans:
        for offset in range(0, size, PAGE_SIZE):
            table = tables[0]
            for shift in (39, 30, 21):
                table = below(table, va + offset >> shift & 511)
            table[va + offset >> 12 & 511] = phys + offset | flags
    return b"".join(struct.pack("<512Q", *table) for table in tables)
