"""Probes in the RISC-V kernels: by step, emulation, call from an fentry site, or jump, and at returns.

The jumps are those of the profile riscv-optprobes-2023.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.arch.riscv.insn import Handling, RiscvInsn, RiscvOpcode, decode_all
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import Profile
from emulated_kernel.kprobes.regs import RiscvRegs
from emulated_kernel.machine.cpu.riscv import CAUSE_LOAD_FAULT, CAUSE_STORE_FAULT
from emulated_kernel.machine.text.stale_fetch import Prefetch
from emulated_kernel.machine.traps.trap import GuestFault
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.kprobes.blacklist import is_blacklisted
from tests.kprobes.listed import list_lines
from tests.ledger import ledger_mismatches
from tests.sample import share

OPTPROBES = "riscv-optprobes-2023"
EBREAK, C_EBREAK = bytes.fromhex("73001000"), bytes.fromhex("0290")
FUNCTIONS = [("gcd", (1071, 462)), ("int_sqrt", (1000000,)), ("lcm", (21, 6)), ("hex_to_bin", (ord("c"),))]


@pytest.fixture(scope="module", params=["riscv64", "riscv64i"])
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def kernel(arch: str) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=arch)) as kernel:
        yield kernel


@pytest.fixture(scope="module")
def patched(arch: str) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=arch, profile=OPTPROBES)) as kernel:
        yield kernel


def instructions(kernel: Kernel, function: str) -> list[tuple[int, RiscvInsn]]:
    start = kernel.image.kallsyms.lookup_name(function)
    assert start is not None
    where = kernel.image.kallsyms.lookup(start)
    assert where is not None
    code = kernel.image.read(start, where.symbol.size)
    return list(decode_all(code, start, compressed=kernel.config.arch == "riscv64"))


def text(kernel: Kernel, addr: int, size: int) -> bytes:
    return kernel.machine.text.current(addr, size)


def check_untouched(kernel: Kernel) -> None:
    assert kernel.machine.text.ledger == {}
    assert ledger_mismatches(kernel.machine.text) == []


def settle(kernel: Kernel) -> None:
    assert kernel.kprobes.optimizer is not None
    kernel.kprobes.optimizer.work.flush()


def passes(kernel: Kernel, function: str, arguments: tuple[int, ...]) -> Counter[int]:
    """Return instruction -> number of its executions in a call of the function."""
    counts: Counter[int] = Counter()
    entry = 0
    for addr, _ in instructions(kernel, function):
        probe = Kprobe(addr=addr, pre_handler=lambda kprobe, _: counts.update([kprobe.address]))
        try:
            kernel.register_kprobe(probe)
        except KernelError as error:
            assert error.errno == errno.EILSEQ  # noqa: PT017
            counts[addr] = counts[entry]
            continue
        entry = entry or addr
        kernel.call(function, *arguments)
        kernel.unregister_kprobe(probe)
    return counts


def test_every_instruction_is_probed_or_refused_by_a_rule(kernel: Kernel) -> None:
    """Registration refuses blacklisted places, jump labels, BUG sites, system instructions, fences, and the
    inside of ftrace's nops.

    All other instructions can be probed.
    """
    image = kernel.image
    labels = {label.code + byte for label in image.jump_labels for byte in range(4)}
    inside = {site + byte for site in image.mcount for byte in range(1, 8)}
    (span,) = image.text_ranges
    seen, wrong = Counter[str](), []
    functions, at = [], span.start
    while at < span.end:
        where = image.kallsyms.lookup(at)
        assert where is not None
        end = min(where.symbol.address + where.symbol.size, span.end)
        functions.append(range(at, end))
        at = end
    for function in share(functions, kernel.config.arch == "riscv64", 2):
        at = function.start
        code = image.read(at, len(function))
        for addr, insn in decode_all(code, at, compressed=kernel.config.arch == "riscv64"):
            if is_blacklisted(kernel, addr) or addr in labels or addr in image.bugs:
                expected = errno.EINVAL
            elif addr in inside:
                expected = errno.EILSEQ
            elif insn.handling is Handling.REJECTED and addr not in image.mcount:
                expected = errno.EINVAL
            else:
                expected = 0
            probe = Kprobe(addr=addr, disabled=True)
            found = 0
            try:
                kernel.register_kprobe(probe)
                kernel.unregister_kprobe(probe)
            except KernelError as error:
                found = error.errno or -1
            seen["refused" if expected else "probed"] += 1
            if found != expected:
                wrong.append((hex(addr), found, expected))
    assert wrong == []
    assert seen["probed"] > 0.8 * seen.total()
    check_untouched(kernel)


@pytest.mark.parametrize(("function", "arguments"), FUNCTIONS)
def test_each_instruction_of_a_function(kernel: Kernel, function: str, arguments: tuple[int, ...]) -> None:
    """A probe on each instruction of a function writes a breakpoint as long as the instruction.

    Its handler sees the address of the instruction, and the result of the function does not change.
    """
    expected = kernel.call(function, *arguments)
    for addr, insn in instructions(kernel, function):
        seen: list[int] = []
        probe = Kprobe(addr=addr, pre_handler=lambda _, regs: seen.append(regs.ip))  # noqa: B023
        try:
            kernel.register_kprobe(probe)
        except KernelError:
            continue
        if addr not in kernel.image.mcount:
            assert text(kernel, addr, insn.length) == (C_EBREAK if insn.length == 2 else EBREAK)
        assert kernel.call(function, *arguments) == expected, hex(addr)
        assert set(seen) <= {addr}
        kernel.unregister_kprobe(probe)
    check_untouched(kernel)


@pytest.mark.parametrize(("function", "arguments"), FUNCTIONS)
@pytest.mark.parametrize("compiled", [False, True], ids=["python", "compiled"])
def test_each_place_that_can_be_optimized(
    kernel: Kernel, patched: Kernel, function: str, arguments: tuple[int, ...], compiled: bool
) -> None:
    expected, counts = kernel.call(function, *arguments), passes(kernel, function, arguments)
    cell = patched.machine.alloc_pages(8)
    jumps = 0
    for addr, insn in instructions(patched, function):
        hits: list[int] = []

        def emit(builder: ProgramBuilder, _way: EntryKind) -> bool:
            builder.emit(ir.AddToAbsolute(cell, 1))
            return True

        probe = Kprobe(addr=addr, pre_handler=lambda _, regs: hits.append(regs.ip))  # noqa: B023
        probe.program = emit if compiled else None
        try:
            patched.register_kprobe(probe)
        except KernelError:
            continue
        settle(patched)
        mode = patched.kprobes.mode(probe)
        if mode == "optimized":
            jumps += 1
            assert "[OPTIMIZED]" in "".join(list_lines(patched.kprobes))
            assert text(patched, addr, 1)[0] & 0x7F == 0x17, "no auipc"
        patched.machine.memory.write(cell, bytes(8))
        for _ in range(3):
            assert patched.call(function, *arguments) == expected, hex(addr)
        in_guest = int.from_bytes(patched.machine.memory.read(cell, 8), "little")
        assert len(hits) + in_guest == 3 * counts[addr], (hex(addr), mode)
        assert set(hits) <= {addr}
        patched.kprobes.disable_kprobe(probe)
        settle(patched)
        assert text(patched, addr, insn.length) == patched.image.read(addr, insn.length)
        patched.unregister_kprobe(probe)
        settle(patched)
    assert jumps >= (function in ("gcd", "int_sqrt"))
    check_untouched(patched)


def test_a_jump_is_taken_back_to_an_ebreak(patched: Kernel) -> None:
    """A jump becomes a breakpoint again when optimization is switched off.

    The region's other bytes are then the original ones.
    """
    start = patched.image.kallsyms.lookup_name("gcd")
    assert start is not None
    for addr, insn in instructions(patched, "gcd"):
        probe = Kprobe(addr=addr, pre_handler=lambda *_: None)
        patched.register_kprobe(probe)
        settle(patched)
        if patched.kprobes.mode(probe) == "optimized":
            patched.kprobes.set_optimization(False)
            rest = patched.image.read(addr + insn.length, 10 - insn.length)
            expected = (C_EBREAK if insn.length == 2 else EBREAK) + rest
            assert text(patched, addr, 10) == expected
            patched.kprobes.set_optimization(True)
            settle(patched)
            assert patched.kprobes.mode(probe) == "optimized"
        patched.unregister_kprobe(probe)
        settle(patched)
    check_untouched(patched)


class Fetched(Prefetch):
    """A watcher of text that collects all contents that a CPU may have fetched from an address."""

    def __init__(self, kernel: Kernel, address: int) -> None:
        super().__init__(kernel.machine.text, kernel.machine.model.fetch_unit)
        self.address = address
        self.seen: set[bytes] = set()

    def synchronised(self) -> None:
        self.seen |= self.windows(self.address)
        super().synchronised()


def test_no_cpu_fetches_half_a_breakpoint(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU may fetch four bytes in two pieces.

    Therefore a four-byte ebreak is written and removed by way of the two-byte ebreak.
    """
    image, machine = kernel.image, kernel.machine
    for addr, insn in instructions(kernel, "gcd"):
        watch = Fetched(kernel, addr)
        monkeypatch.setattr(machine.text, "watcher", watch)
        probe = Kprobe(addr=addr, pre_handler=lambda *_: None)
        try:
            kernel.register_kprobe(probe)
        except KernelError:
            continue
        kernel.unregister_kprobe(probe)
        if addr not in image.mcount:
            whole = (image.read(addr, insn.length), *machine.model.breakpoints)
            assert [code.hex() for code in watch.seen if not code.startswith(whole)] == []
            assert len(watch.seen) > 1
    check_untouched(kernel)


def test_linux_6_1_has_no_optprobes(kernel: Kernel) -> None:
    assert kernel.kprobes.optimizer is None
    with pytest.raises(KernelError) as caught:
        kernel.kprobes.set_optimization(True)
    assert caught.value.errno == errno.EOPNOTSUPP


def test_returns(kernel: Kernel) -> None:
    """A return handler sees the result and the caller, although the link register holds the trampoline's
    address during the call.
    """
    seen: list[tuple[int, int]] = []

    def returned(_instance: Any, regs: Any) -> None:
        seen.append((regs.a0, regs.ip))

    probe = Kretprobe(symbol_name="gcd", handler=returned)
    kernel.register_kretprobe(probe)
    assert kernel.call("lcm", 21, 6) == 42
    assert [value for value, _ in seen] == [3]
    caller = kernel.image.kallsyms.lookup(seen[0][1])
    assert caller is not None
    assert caller.symbol.name == "lcm"
    kernel.unregister_kretprobe(probe)
    assert probe.nmissed == 0
    check_untouched(kernel)


def test_a_call_from_an_fentry_site(kernel: Kernel) -> None:
    """A probe on an fentry site turns the nops into a call (auipc and jalr) with t0 as link register."""
    start = kernel.image.kallsyms.lookup_name("gcd")
    assert start in kernel.image.mcount
    seen: list[tuple[int, int, int]] = []
    probe = Kprobe[RiscvRegs](
        symbol_name="gcd", pre_handler=lambda _, regs: seen.append((regs.ip, regs.a0, regs.a1))
    )
    kernel.register_kprobe(probe)
    assert "".join(list_lines(kernel.kprobes)).count("[FTRACE]") == 1
    assert text(kernel, start, 8) == kernel.arch.relative_call(start, kernel.kprobes.trampoline[0])
    assert kernel.call("gcd", 12, 18) == 6
    assert seen == [(start, 12, 18)]
    kernel.unregister_kprobe(probe)
    check_untouched(kernel)


def test_a_step_faults_as_the_instruction_does(kernel: Kernel) -> None:
    """With a probe on the faulting load, strlen(NULL) faults at the probed address, and the next hit is
    handled.
    """
    loads = [addr for addr, insn in instructions(kernel, "strlen") if insn.opcode == RiscvOpcode.LOAD]
    hits: list[int] = []
    probe = Kprobe(addr=loads[0], pre_handler=lambda _, regs: hits.append(regs.ip))
    kernel.register_kprobe(probe)
    start = kernel.image.kallsyms.lookup_name("strlen")
    assert start is not None
    for _ in range(2):
        with pytest.raises(GuestFault) as caught:
            kernel.machine.call(start, 0)
        assert caught.value.trap.address == loads[0]
    assert hits == [loads[0]] * 2
    assert kernel.call("gcd", 12, 18) == 6
    kernel.unregister_kprobe(probe)
    check_untouched(kernel)


class TestFaultHandlers:
    """On RISC-V, fault handlers get scause as the number of the trap."""

    @pytest.fixture
    def kernel(self, arch: str) -> Iterator[Kernel]:
        profile = Profile("faults", fault_handlers=True, ftrace=False)
        with Kernel(MachineConfig(arch=arch), profile=profile) as kernel:
            yield kernel

    def test_of_the_step(self, kernel: Kernel) -> None:
        causes: list[int] = []

        def fault(_kprobe: Kprobe, _regs: Any, cause: int) -> int:
            causes.append(cause)
            return 0

        start = kernel.image.kallsyms.lookup_name("strlen")
        assert start is not None
        loads = [at for at, insn in instructions(kernel, "strlen") if insn.opcode == RiscvOpcode.LOAD]
        kernel.register_kprobe(
            Kprobe(addr=loads[0], fault_handler=fault, post_handler=lambda _kprobe, _regs: None)
        )
        with pytest.raises(GuestFault):
            kernel.machine.call(start, 0x10)
        assert causes == [CAUSE_LOAD_FAULT]

    @pytest.mark.parametrize("writes", [False, True])
    def test_of_a_handler(self, kernel: Kernel, writes: bool) -> None:
        causes: list[int] = []

        def access(_kprobe: Kprobe, _regs: Any) -> None:
            if writes:
                kernel.machine.memory.write(0x10, b"data")
            kernel.machine.memory.read(0x10, 8)

        def fault(_kprobe: Kprobe, _regs: Any, cause: int) -> int:
            causes.append(cause)
            return 1

        kernel.register_kprobe(Kprobe(symbol_name="gcd", pre_handler=access, fault_handler=fault))
        assert kernel.call("gcd", 12, 18) == 6
        assert causes == [CAUSE_STORE_FAULT if writes else CAUSE_LOAD_FAULT]
