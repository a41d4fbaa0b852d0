"""Compares unwound call chains with the calls and returns that the CPU executed, at every instruction.

`python -m stress.chains [ARCH...]` compares all instructions; the test suite compares a sample.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from contextlib import suppress
from enum import Enum
from random import Random

import tests.own_thread  # noqa: F401 - for kernels in this process
from emulated_kernel.arch.riscv.insn import RA, T0, RiscvInsn, decode_insn
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import GuestAddr, Kprobe
from emulated_kernel.kprobes.profile import STRATEGIES
from emulated_kernel.kprobes.return_hook.return_hook import ReturnHandler
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.machine.unicorn_engine import CODE_CALLBACK, HOOK_CODE
from emulated_kernel.util.config import ARCHITECTURES, MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.arch.decoding import insn_length, is_call, is_return

_RISCV_SRET = 0x10200073
_MAX_INSN_SIZE = 15
"""Maximum size of an instruction in bytes."""


class Code(Enum):
    """Kind of the code that an instruction belongs to."""

    TEXT = "text"
    """Text of the kernel, and trampolines."""
    COPY = "slots and detours"
    HANDLER = "compiled detours and stubs"
    """Guest code with handlers, before and after the copy of the probed instruction."""
    LEFT_OUT = "not compared"
    """Code in which no interrupt or probe occurs, so that it is never unwound.

    It is guest code with handlers of calls and returns, and on RISC-V the second instruction of a jump.
    """


NEW_ONE_OF = 4
"""One in this many instructions of code that the host has added is compared at its first execution."""


class Chains:
    """Follows the calls and returns of a guest with one CPU, at each instruction.

    A task is ignored until it is in user mode, because only then its kernel stack is known to be empty.
    """

    def __init__(self, kernel: Kernel, one_of: int = 1, seed: int = 0) -> None:
        """Follow a kernel. On average, compare one of `one_of` executed instructions.

        In code that the host has added, also compare one of NEW_ONE_OF instructions when it is executed for
        the first time. `seed`: seed of the random choices. The caller must not change probes from now on.
        """
        self._kernel = kernel
        self._arch = kernel.arch
        self._dice = Random(seed)
        self._one_of = one_of
        self._stack = kernel.tracing.system.stack
        self._lookup = kernel.tracing.symbols.lookup
        self._is_handler = kernel.kprobes.compiler.contains
        find = kernel.image.kallsyms.lookup_name
        self._entry = find("asm_host_interrupt") or find("handle_exception")
        self._fork = find("ret_from_fork")
        self._user = find("host_user_resume")
        switch = kernel.image.kallsyms.by_name("__switch_to_asm")[0]
        self._switch = range(switch.address, switch.address + switch.size)
        restart = kernel.image.kallsyms.by_name("host_restart_hypercall")[0]
        self._restart = range(restart.address, restart.address + restart.size)
        self._met: set[int] = set()
        """Addresses of executed instructions in code that the host has added."""
        self._calls: dict[int, list[int] | None] = {}
        """Address of a task's stack -> its return addresses, the newest last; None if they are unknown."""
        self._mine: list[int] | None = None
        self._task = 0
        self._interrupts: list[tuple[int, int]] = []
        """(index in the task's calls, address of the saved instruction pointer) of each active interrupt."""
        self._last = 0
        self._last_sp = 0
        self._kinds: dict[tuple[int, bytes], tuple[str, int]] = {}
        self._relocated: dict[int, int | None] = {}
        """Address of an executed instruction -> original return address, if a relocated call ends there.

        The value is None if no relocated call ends there.
        """
        self.compared: Counter[Code] = Counter()
        self.wrong: Counter[str] = Counter()
        self.examples: list[str] = []
        self.failures: list[BaseException] = []
        engine = kernel.machine._engine
        engine.add_hook(HOOK_CODE, CODE_CALLBACK(self._note))
        engine.flush_code()

    # The CPU

    def _note(self, _engine: int, address: int, _size: int, _data: int) -> None:
        try:
            self._follow(address)
            if self._mine is not None and self._is_taken(address):
                self._compare(address, self._mine)
        except BaseException as error:
            self.failures.append(error)

    def _is_taken(self, address: int) -> bool:
        if self._dice.randrange(self._one_of) == 0:
            return True
        if address in self._met or self._kernel.image.kallsyms.lookup(address) is not None:
            return False
        self._met.add(address)
        return self._dice.randrange(NEW_ONE_OF) == 0

    def _follow(self, address: int) -> None:
        sp = self._kernel.machine.regs.sp
        last, self._last = self._last, address
        last_sp, self._last_sp = self._last_sp, sp
        if address == self._user:
            self._task = sp - 1 & -self._arch.thread_size
            self._mine = self._calls[self._task] = []
            return
        if address == self._entry:
            if self._mine is not None:
                regs = self._arch.pt_regs
                kept = sp - (len(regs) - regs.index("ip")) * self._arch.word_size
                self._interrupts.append((len(self._mine), kept))
                self._mine.append(self._interrupted(sp))
            return
        if last in self._restart and self._mine is not None:
            # The function may change the saved address, to restart an interrupted hypercall.
            index, kept = self._interrupts[-1]
            self._mine[index] = self._kernel.machine.memory.read_word(kept)
        if not last or self._mine is None:
            if address in self._switch or last in self._switch:
                self._other_task(last_sp, sp)
            return
        if last in self._switch:
            self._other_task(last_sp, sp)
        kind, end = self._kind(last)
        if kind == "call" and self._mine is not None:
            self._mine.append(end)
        elif kind == "leaves" and self._mine and address == self._mine[-1]:
            self._mine.pop()
            if self._interrupts and self._interrupts[-1][0] == len(self._mine):
                self._interrupts.pop()

    def _other_task(self, last_sp: int, sp: int) -> None:
        """If the stack pointer has moved to another task's stack, continue with the calls of this task."""
        if last_sp & -self._arch.thread_size == sp & -self._arch.thread_size:
            return
        self._calls[self._task] = self._mine
        self._task = sp - 1 & -self._arch.thread_size
        self._mine = self._calls.get(self._task)

    def _interrupted(self, sp: int) -> int:
        if self._arch.registers.link is None:
            return self._kernel.machine.memory.read_word(sp + 3 * self._arch.word_size)
        return int(self._kernel.machine.regs.get("sepc"))

    def _kind(self, address: int) -> tuple[str, int]:
        """Return (kind, return address) of an instruction; the return address is that of a call.

        The kind is "call", "leaves" (the function ends) or "". A detour contains a relocated call as a push
        of the original return address and a jump.
        """
        if address not in self._relocated:
            self._relocated[address] = self._relocated_call(address)
        copied = self._relocated[address]
        if copied is not None:
            return "call", copied
        read, rest = self._kernel.machine.memory.read, 4096 - address % 4096
        try:
            code = read(address, _MAX_INSN_SIZE)
        except MemoryFault:
            # The next page is not mapped.
            code = read(address, min(_MAX_INSN_SIZE, rest))
        key = address, code
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = self._read_kind(address, code)
        return found

    def _relocated_call(self, address: int) -> int | None:
        """If the jump at `address` ends a relocated call, return the original return address of the call.

        Otherwise, return None.
        """
        if self._lookup(address) is not None:
            return None
        found = self._kernel.kprobes.resolve_probed_address(address)
        if found is None or not found.is_calling:
            return None
        code = self._kernel.machine.text.original(found.address, _MAX_INSN_SIZE)
        return found.address + insn_length(self._arch, code)

    def _read_kind(self, address: int, code: bytes) -> tuple[str, int]:
        with suppress(KernelError):
            if self._arch.registers.link is not None:
                insn = decode_insn(code, compressed=self._arch.name == "riscv64")
                return self._read_riscv(address, insn), address + insn.length
            end = self._arch.instruction_boundaries(code.ljust(2 * _MAX_INSN_SIZE, b"\x90"), address)[1]
            if is_call(self._arch, code):
                return "call", end
            if is_return(self._arch, code):
                return "leaves", end
        return "", 0

    def _read_riscv(self, address: int, insn: RiscvInsn) -> str:
        """Return the kind of an instruction on RISC-V: "call", "leaves" (the function ends) or "".

        The jump to a detour also writes a return address to a register, but it is no call.
        """
        by_t0 = insn.rd == T0 and address - insn.length in self._kernel.image.mcount
        if insn.is_call and (insn.rd == RA or by_t0):
            return "call"
        return "leaves" if insn.is_return or insn.is_indirect_jump or insn.word == _RISCV_SRET else ""

    # The comparison

    def _compare(self, address: int, calls: list[int]) -> None:
        if any(self._lookup(each) is None for each in calls):
            # The host has called a function: its return address is not in the kernel.
            return
        kind = self._kind_of_code(address)
        self.compared[kind] += 1
        if kind is Code.LEFT_OUT:
            return
        expected = [address, *reversed(calls)]
        regs = self._kernel.machine.regs
        found = [address, *(caller.address for caller in self._stack.returns(address, regs))]
        if found == expected:
            return
        where = self._name(address)
        self.wrong[where.partition("+")[0]] += 1
        if len(self.examples) < 20 and self.wrong[where.partition("+")[0]] == 1:
            self.examples.append(f"{where}\n  {self._names(expected)}\n  {self._names(found)}")

    def _kind_of_code(self, address: int) -> Code:
        if self._is_within_jump(address):
            return Code.LEFT_OUT
        if not self._is_handler(address):
            return Code.TEXT if self._lookup(address) is not None else Code.COPY
        heads = (head for head in self._kernel.kprobes.table if not head.is_ftrace)
        codes = (code for head in heads for code in (head.compiled, head.stub))
        jumped_to = any(code is not None and code.contains(address) for code in codes)
        return Code.HANDLER if jumped_to else Code.LEFT_OUT

    def _is_within_jump(self, address: int) -> bool:
        table = self._kernel.kprobes.table
        before = (table.get(address - distance) for distance in range(1, self._arch.call_size))
        return any(head is not None and head.is_patched for head in before)

    def _names(self, addresses: list[int]) -> str:
        return " ".join(map(self._name, addresses))

    def _name(self, address: int) -> str:
        found = self._lookup(address)
        return hex(address) if found is None else f"{found.symbol.name}+{found.offset:#x}"


def exercise(kernel: Kernel) -> None:
    """Run system calls on files and directories, with other tasks and timer interrupts."""
    mirror, syscalls = kernel.guest.processes, kernel.guest.syscalls
    task = mirror.task_of(500, 0, 0)
    fd = syscalls.open(task, "/scratch/chains", 0o102, 0o644)
    syscalls.call(task, "close", fd)
    syscalls.with_path(task, "mkdir", "/scratch/chained", 0o755)
    syscalls.with_path(task, "rmdir", "/scratch/chained")
    syscalls.with_path(task, "unlink", "/scratch/chains")
    mirror.task_of(501, 0, 0)
    kernel.machine.clock.advance(20_000_000)
    syscalls.call(task, "getpid")


FUNCTIONS = (
    *("vfs_mkdir", "vfs_open", "path_openat", "do_filp_open", "ksys_read", "link_path_walk", "dput"),
    *("mutex_unlock", "kmem_cache_alloc", "do_irq", "scheduler_tick", "schedule", "vfs_rmdir"),
)
"""Functions that are probed."""


def probe(kernel: Kernel) -> None:
    """Register return probes and probes with handlers in Python and in guest code, and start tracers."""
    symbols = kernel.image.kallsyms
    for number, name in enumerate(FUNCTIONS):
        symbol = symbols.by_name(name)[0]
        handler: ReturnHandler | None = (lambda _instance, _regs: None) if number % 2 else None
        with suppress(KernelError):
            kernel.register_kretprobe(Kretprobe(symbol_name=name, handler=handler))
        code = kernel.machine.text.original(symbol.address, symbol.size)
        for at in kernel.arch.instruction_boundaries(code, symbol.address)[number % 3 :: 9]:
            insn = code[at - symbol.address :]
            if not (is_call(kernel.arch, insn) or is_return(kernel.arch, insn)):
                with suppress(KernelError):
                    if at % 4 < 2:
                        with kernel.lock:
                            kernel.tracing.kprobe_events.write(b"p %#x\n" % at)
                    else:
                        kernel.register_kprobe(
                            Kprobe(addr=GuestAddr(at), pre_handler=lambda _probe, _regs: None)
                        )
    with kernel.lock:
        kernel.trace_arrays.top.functions.filter.write(b"*open* ")
        kernel.trace.expand()
        for event in {each.event for each in kernel.tracing.kprobe_events.probes()}:
            event.enable(kernel.trace)
        kernel.trace.set_tracer("function_graph")
        other = kernel.trace_arrays.make("other")
        other.functions.filter.write(b"vfs_* ")
        other.array.set_tracer("function")
    if kernel.kprobes.optimizer is not None:
        kernel.kprobes.optimizer.flush()


def compare(arch: str, hook: str | None, one_of: int = 1, strategy: str | None = None) -> Chains:
    """Run exercise() on a new kernel, compare its call chains, and return the results.

    `hook`: return hook of the probes that are registered first; None: no probes. `one_of`: see Chains.
    `strategy` is the optimization policy, or None for that of the profile.

    Raises: the first exception that occurred while an instruction was followed.
    """
    config = MachineConfig(arch=arch, clock="virtual", run_budget=600, return_hook=hook, strategy=strategy)
    with Kernel(config) as kernel:
        if hook is not None:
            probe(kernel)
        chains = Chains(kernel, one_of)
        with kernel.lock:
            exercise(kernel)
    for failure in chains.failures:
        raise failure
    return chains


def main(names: list[str]) -> int:
    """Compare at every instruction, without probes and with each shadow stack; return the exit status.

    `names`: arguments of the command line.
    """
    wrong = 0
    parser = argparse.ArgumentParser(description="Compares call chains with what the CPU did.")
    parser.add_argument("archs", metavar="ARCH", nargs="*", help=f"(default: {' '.join(ARCHITECTURES)})")
    parser.add_argument("--strategy", choices=STRATEGIES, help="optimization policy (default: the profile's)")
    options = parser.parse_args(names)
    archs = options.archs
    if unknown := set(archs) - set(ARCHITECTURES):
        parser.error(f"{' '.join(sorted(unknown))}: unknown architecture; use {', '.join(ARCHITECTURES)}")
    for arch in archs or ARCHITECTURES:
        for hook in (None, *SHADOW_STACKS):
            chains = compare(arch, hook, strategy=options.strategy)
            print(f"{arch} {hook}: {chains.wrong.total()} wrong;", end=" ")
            print("; ".join(f"{count} {code.value}" for code, count in chains.compared.items()), flush=True)
            for example in chains.examples[:5]:
                print(example)
            wrong += chains.wrong.total()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
