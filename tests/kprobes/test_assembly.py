"""Handlers in assembly run in the guest in every mode, keep all registers, and count in cells."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import OUT_OF_TREE, Profile, RegisterSaving, Stepper
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.kprobes.test_compiled_code import traps
from tests.ledger import ledger_mismatches

X86, RISCV = ("x86_64", "i386"), ("riscv64", "riscv64i")
PLAIN = Profile("plain", ftrace=False, optimizer=False)
OPTIMIZED = Profile("optimized", ftrace=False, strategies=OUT_OF_TREE)
WAYS = {
    "stepped": PLAIN,
    "stepped by TF": replace(PLAIN, stepper=Stepper.TRAP_FLAG),
    "boosted": replace(PLAIN, preemption=False),
    "optimized": OPTIMIZED,
    "optimized, all registers": replace(OPTIMIZED, saving=RegisterSaving.ALL),
    "called": Profile("called"),
    "called, all registers": Profile("called", saving=RegisterSaving.ALL),
    "stepped, nothing compiled": replace(PLAIN, compiled=False),
    "optimized, nothing compiled": replace(OPTIMIZED, compiled=False),
    "called, nothing compiled": Profile("called", compiled=False),
}


class Texts(NamedTuple):
    """Handlers in the assembly language of an architecture."""

    argument: str
    """Name in pt_regs of the register with the first argument."""
    count: str
    add: str
    """Assembly that adds the first argument to `sum`."""
    overwrite: str
    """Assembly that overwrites all registers and flags that a handler may overwrite."""
    fault: str
    """Assembly that counts in `before`, reads unmapped memory, and counts in `behind`."""
    registers: int
    """Number of registers that `overwrite` overwrites."""
    watched: str
    """Name in pt_regs of the register that `watch` adds."""
    watch: str
    """Assembly that adds the register `watched` to `seen`, if possible without a write to another one."""


def _x86(first: str, count: str, word: str, registers: list[str]) -> Texts:
    clobber = "; ".join(f"mov {name}, -1" for name in registers)
    return Texts(
        first.lstrip("re"),
        count,
        f"add [sum], {first}",
        f"{count}; {clobber}; add eax, 1",
        f"inc {word} [before]; xor eax, eax; mov eax, [eax + 8]; inc {word} [behind]",
        len(registers),
        "ax",
        f"add [seen], {registers[0]}",
    )


_LOW = ["ax", "bx", "cx", "dx", "si", "di", "bp"]
_RISCV_REGISTERS = [
    "t0",
    *(f"t{n}" for n in range(1, 7)),
    *(f"s{n}" for n in range(12)),
    *(f"a{n}" for n in range(8)),
]
_RISCV_COUNT = "la t0, counter; li t1, 1; amoadd.d zero, t1, (t0)"
_RISCV = Texts(
    "a0",
    _RISCV_COUNT,
    "ld t0, sum; add t0, t0, a0; sd t0, sum, t1",
    "; ".join([_RISCV_COUNT, *(f"li {name}, -1" for name in _RISCV_REGISTERS)]),
    "li t0, 1; sd t0, before, t1; ld t2, 8(zero); sd t0, behind, t1",
    len(_RISCV_REGISTERS),
    "a5",
    "ld t0, seen; add t0, t0, a5; sd t0, seen, t1",
)
TEXTS = {
    "x86_64": _x86(
        "rdi",
        "inc qword ptr [counter]",
        "qword ptr",
        [*(f"r{name}" for name in _LOW), *(f"r{number}" for number in range(8, 16))],
    ),
    "i386": _x86(
        "eax",
        "add dword ptr [counter], 1; adc dword ptr [counter + 4], 0",
        "dword ptr",
        [f"e{name}" for name in _LOW],
    ),
    "riscv64": _RISCV,
    "riscv64i": _RISCV,
}


MODES = {
    "stepped": ("int3", 2),
    "stepped by TF": ("int3", 2),
    "boosted": ("boosted", 1),
    "optimized": ("optimized", 0),
    "called": ("ftrace", 0),
}
"""Way -> mode of a probe, and number of traps of a hit: the breakpoint, and the end of the step."""
CASES = [
    *((arch, way) for way in WAYS for arch in X86),
    *(
        (arch, way)
        for way in WAYS
        for arch in RISCV
        if "TF" not in way and (arch == "riscv64" or way == "optimized")
    ),
]


@pytest.fixture(scope="module", params=CASES, ids=", ".join)
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    arch, way = request.param
    with Kernel(MachineConfig(arch=arch), profile=WAYS[way]) as kernel:
        yield kernel
        assert ledger_mismatches(kernel.machine.text) == []


@pytest.fixture
def way(kernel: Kernel) -> str:
    return next(name for name, profile in WAYS.items() if profile == kernel.kprobes.profile)


@pytest.fixture
def texts(kernel: Kernel) -> Texts:
    return TEXTS[kernel.config.arch]


def settle(kernel: Kernel) -> None:
    if kernel.kprobes.optimizer is not None:
        kernel.kprobes.optimizer.flush()


def roots(kernel: Kernel, numbers: range) -> list[int]:
    return [kernel.call("int_sqrt", number * number) for number in numbers]


def boundaries(kernel: Kernel, function: str) -> list[int]:
    start = kernel.image.kallsyms.lookup_name(function)
    assert start is not None
    where = kernel.image.kallsyms.lookup(start)
    assert where is not None
    code = kernel.image.read(start, where.symbol.size)
    return [at - start for at in kernel.arch.instruction_boundaries(code, start)]


def test_a_handler_counts_from_the_first_hit_on(kernel: Kernel, texts: Texts) -> None:
    probe = Kprobe(symbol_name="int_sqrt", code=f"{texts.count}; {texts.add}")
    probe.cells["counter"] = 100
    kernel.register_kprobe(probe)
    assert roots(kernel, range(3)) == [0, 1, 2]
    settle(kernel)
    assert roots(kernel, range(3, 8)) == [3, 4, 5, 6, 7]
    assert dict(probe.cells) == {"counter": 108, "sum": sum(n * n for n in range(8))}
    assert probe.cells.per_cpu("counter") == [108]
    probe.cells["counter"] = 0
    kernel.unregister_kprobe(probe)
    assert roots(kernel, range(2)) == [0, 1]
    assert (probe.cells["counter"], probe.failures, probe.nmissed) == (0, 0, 0)


def test_hits_stay_in_the_guest(kernel: Kernel, texts: Texts, way: str) -> None:
    """A hit of an assembly handler takes only the traps of the probe's mode."""
    probe = Kprobe(symbol_name="int_sqrt", code=texts.count)
    kernel.register_kprobe(probe)
    settle(kernel)
    roots(kernel, range(2))
    mode, met = MODES[way.split(",", maxsplit=1)[0]]
    if kernel.config.arch in RISCV and mode == "boosted":
        mode, met = MODES["stepped"]
    assert kernel.kprobes.mode(probe) == mode
    if kernel.kprobes.compiler.enabled:
        assert (traps(kernel, 9), probe.cells["counter"]) == (met, 3)
    kernel.unregister_kprobe(probe)


def test_no_register_is_changed_at_any_instruction(kernel: Kernel, texts: Texts) -> None:
    """At each instruction of int_sqrt, an assembly handler that overwrites all registers changes no result.

    Assembly counts as many hits, and sees the same values, as Python.
    """
    assert texts.registers >= len(kernel.arch.callee_saved)
    counted = 0
    for offset in boundaries(kernel, "int_sqrt"):
        watched: list[int] = []
        python = Kprobe(
            symbol_name="int_sqrt",
            offset=offset,
            pre_handler=lambda _kp, regs, to=watched: to.append(getattr(regs, texts.watched)),
        )
        probes = [
            Kprobe(symbol_name="int_sqrt", offset=offset, code=code)
            for code in (texts.watch, texts.overwrite)
        ]
        try:
            kernel.register_kprobe(python)
        except KernelError:
            continue
        results = roots(kernel, range(5, 9))
        kernel.unregister_kprobe(python)
        for probe in probes:
            kernel.register_kprobe(probe)
            settle(kernel)
            assert roots(kernel, range(5, 9)) == results == [5, 6, 7, 8], f"int_sqrt+{offset:#x}"
            kernel.unregister_kprobe(probe)
        mask = kernel.arch.mask
        assert probes[0].cells["seen"] == sum(watched) & mask, f"int_sqrt+{offset:#x}"
        assert probes[1].cells["counter"] == len(watched), f"int_sqrt+{offset:#x}"
        counted += bool(watched)
    assert counted > 10


def test_handlers_at_one_place_each_see_the_registers_of_the_hit(kernel: Kernel, texts: Texts) -> None:
    seen: list[int] = []
    probes = [
        Kprobe(symbol_name="int_sqrt", code=texts.add),
        Kprobe(symbol_name="int_sqrt", code=texts.overwrite),
        Kprobe(symbol_name="int_sqrt", code=texts.add),
        Kprobe(
            symbol_name="int_sqrt", pre_handler=lambda _kp, regs: seen.append(getattr(regs, texts.argument))
        ),
    ]
    for count in (3, 4):
        kernel.register_kprobes(probes[count - 1 : count] if count == 4 else probes[:3])
        settle(kernel)
        assert roots(kernel, range(1, 5)) == [1, 2, 3, 4]
        assert [probe.cells["sum"] for probe in probes[0:3:2]] == [30 * (count - 2)] * 2
        assert probes[1].cells["counter"] == 4 * (count - 2)
    assert seen == [1, 4, 9, 16]
    kernel.disable_kprobe(probes[0])
    assert roots(kernel, range(5, 6)) == [5]
    assert (probes[0].cells["sum"], probes[2].cells["sum"], seen[-1]) == (60, 85, 25)
    kernel.unregister_kprobes(probes)


def test_a_fault_ends_the_handler_and_nothing_else(kernel: Kernel, texts: Texts) -> None:
    probe = Kprobe(symbol_name="int_sqrt", code=texts.fault)
    kernel.register_kprobe(probe)
    settle(kernel)
    assert roots(kernel, range(6)) == [0, 1, 2, 3, 4, 5]
    assert probe.cells["before"] >= 1
    assert (probe.cells["behind"], probe.failures) == (0, 6)
    kernel.unregister_kprobe(probe)
    assert probe.failures == 6
    kernel.register_kprobe(probe)
    assert probe.failures == 0
    kernel.unregister_kprobe(probe)


def test_with_handlers_in_python_on_both_sides(kernel: Kernel, texts: Texts) -> None:
    calls: list[str] = []
    probe = Kprobe(
        symbol_name="int_sqrt",
        code=texts.count,
        pre_handler=lambda _kp, _regs: calls.append("pre"),
        post_handler=lambda _kp, _regs: calls.append("post"),
    )
    kernel.register_kprobe(probe)
    settle(kernel)
    assert roots(kernel, range(3)) == [0, 1, 2]
    assert (probe.cells["counter"], calls) == (3, ["pre", "post"] * 3)
    kernel.unregister_kprobe(probe)


def test_at_the_entry_of_a_return_probe(kernel: Kernel, texts: Texts) -> None:
    returned: list[int] = []
    probe = Kretprobe(
        symbol_name="int_sqrt",
        code=texts.add,
        handler=lambda _instance, regs: returned.append(kernel.regs_return_value(regs)),
    )
    kernel.register_kretprobe(probe)
    settle(kernel)
    assert roots(kernel, range(4)) == returned == [0, 1, 2, 3]
    assert probe.cells["sum"] == 14
    kernel.unregister_kretprobe(probe)


def test_what_it_took_is_given_back(kernel: Kernel, texts: Texts) -> None:
    cells, probe = kernel.machine.records._cells, Kprobe(symbol_name="int_sqrt", code=texts.count)
    settle(kernel)
    kernel.kprobes.garbage.collect()
    before = cells.used, len(kernel.kprobes.compiler.codes)
    for _ in range(3):
        kernel.register_kprobe(probe)
        roots(kernel, range(2))
        assert (cells.used, len(kernel.kprobes.compiler.codes)) > before
        kernel.unregister_kprobe(probe)
    settle(kernel)
    kernel.kprobes.garbage.collect()
    assert (cells.used, len(kernel.kprobes.compiler.codes)) == before
    assert probe.cells["counter"] == 6


@pytest.fixture(scope="module")
def plain() -> Iterator[Kernel]:
    with Kernel(MachineConfig(cpus=2)) as kernel:
        yield kernel


def test_what_can_not_be_assembled_leaves_nothing_behind(plain: Kernel) -> None:
    probe = Kprobe(symbol_name="int_sqrt", code="inc qword ptr [counter]\n  hlt")
    with pytest.raises(KernelError, match="line 2, column 3: 'hlt': is privileged"):
        plain.register_kprobe(probe)
    assert (probe.addr, probe.failures, len(probe.cells)) == (None, 0, 0)
    probe.code, probe.cells["nowhere"] = "inc qword ptr [counter]", 1
    with pytest.raises(KernelError, match="the code has no cell nowhere"):
        plain.register_kprobe(probe)
    del probe.cells["nowhere"]
    plain.register_kprobe(probe)
    with pytest.raises(KeyError):
        probe.cells["nowhere"] = 1
    with pytest.raises(ValueError, match="in use"):
        del probe.cells["counter"]
    plain.unregister_kprobe(probe)


def test_more_cells_than_there_is_room_for(plain: Kernel) -> None:
    records, probe = plain.machine.records, Kprobe(symbol_name="int_sqrt", code="inc byte ptr [counter]")
    taken = []
    for size in (4096, 8):
        with suppress(HardwareError):
            while True:
                taken.append(records.alloc_percpu(size))
    with pytest.raises(KernelError) as raised:
        plain.register_kprobe(probe)
    for offset in taken:
        records.free_percpu(offset)
    assert raised.value.name == "ENOMEM"


def test_cells_are_each_cpu_s_own(plain: Kernel) -> None:
    probe = Kprobe(symbol_name="int_sqrt", code="inc qword ptr [counter]")
    plain.register_kprobe(probe)
    plain.call("int_sqrt", 4)
    idle = probe.cells.per_cpu("counter").index(0)
    probe.cells._live["counter"][idle][0] = 10
    assert (sorted(probe.cells.per_cpu("counter")), probe.cells["counter"]) == ([1, 10], 11)
    probe.cells["counter"] = -1
    assert probe.cells.per_cpu("counter") == [(1 << 64) - 1, 0]
    plain.unregister_kprobe(probe)
    assert probe.cells["counter"] == (1 << 64) - 1


def test_a_handler_that_never_ends_is_ended() -> None:
    """A handler that loops forever is ended after its run budget, and the probed function continues."""
    with Kernel(MachineConfig(run_budget=0.05)) as kernel:
        probe = Kprobe(
            symbol_name="int_sqrt", code="inc qword ptr [before]; again: jmp again; inc qword ptr [behind]"
        )
        kernel.register_kprobe(probe)
        assert roots(kernel, range(7, 9)) == [7, 8]
        assert (dict(probe.cells), probe.failures) == ({"before": 2, "behind": 0}, 2)
        probe.cells["before"] = 5
        kernel.unregister_kprobe(probe)
        assert kernel.call("int_sqrt", 49) == 7


def test_registration_leaves_the_record_s_handlers_alone(plain: Kernel) -> None:
    """Registering a probe with assembly adds no handlers to its Kprobe object.

    A handler in Python that is set later runs at every hit.
    """
    seen: list[int] = []
    probe = Kprobe(
        "int_sqrt", code="inc qword ptr [before]", post_code="inc qword ptr [behind]", disabled=True
    )
    plain.register_kprobe(probe)
    assert (probe.pre_handler, probe.post_handler, probe.program) == (None, None, None)
    plain.enable_kprobe(probe)
    assert roots(plain, range(7, 10)) == [7, 8, 9]
    plain.unregister_kprobe(probe)
    assert (probe.pre_handler, probe.post_handler, probe.program) == (None, None, None)
    probe.pre_handler = lambda _kprobe, regs: seen.append(regs.di)
    plain.register_kprobe(probe)
    plain.enable_kprobe(probe)
    assert roots(plain, range(4, 7)) == [4, 5, 6]
    assert (dict(probe.cells), seen) == ({"before": 6, "behind": 6}, [16, 25, 36])


def test_a_return_probe_has_no_post_code(plain: Kernel) -> None:
    rp = Kretprobe("int_sqrt", post_code="nop")
    with pytest.raises(KernelError, match="post_code") as raised:
        plain.register_kretprobe(rp)
    assert raised.value.name == "EINVAL"
