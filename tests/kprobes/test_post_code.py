"""Assembly handlers that run after an instruction, at returns, or for an fprobe: they run in the guest, in
every mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.fprobe import Fprobe
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import RETURN_HOOKS, TrampolineForm
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.kprobes.test_assembly import (
    MODES,
    PLAIN,
    RISCV,
    TEXTS,
    WAYS,
    X86,
    Texts,
    boundaries,
    roots,
    settle,
)
from tests.kprobes.test_compiled_code import traps
from tests.ledger import ledger_mismatches
from tests.sample import share

ARCHITECTURES = (*X86, RISCV[0])
ALL_WAYS = {
    **{way: profile for way, profile in WAYS.items() if "called, all" not in way},
    "stepped, returning to a breakpoint": replace(PLAIN, trampoline=TrampolineForm.BREAKPOINT),
}
CASES = [(arch, way) for way in ALL_WAYS for arch in ARCHITECTURES if arch in X86 or "TF" not in way]


@pytest.fixture(scope="module", params=CASES, ids=", ".join)
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    arch, way = request.param
    with Kernel(MachineConfig(arch=arch), profile=ALL_WAYS[way]) as kernel:
        yield kernel
        assert ledger_mismatches(kernel.machine.text) == []


@pytest.fixture(scope="module", params=ARCHITECTURES)
def traced(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Yield a kernel with fentry sites."""
    with Kernel(MachineConfig(arch=request.param)) as kernel:
        yield kernel
        assert ledger_mismatches(kernel.machine.text) == []


def texts_of(kernel: Kernel) -> Texts:
    return TEXTS[kernel.config.arch]


def way_of(kernel: Kernel) -> str:
    return next(name for name, profile in ALL_WAYS.items() if profile == kernel.kprobes.profile)


def result(kernel: Kernel) -> str:
    """Return assembly that adds a function's result to the cell `sum`."""
    texts = texts_of(kernel)
    return texts.add.replace("rdi", "rax") if kernel.config.arch == "x86_64" else texts.add


def used(kernel: Kernel) -> tuple[int, int]:
    """Return the numbers of cells and of pieces of guest code in use."""
    settle(kernel)
    kernel.kprobes.garbage.collect()
    return kernel.machine.records._cells.used, len(kernel.kprobes.compiler.codes)


# After the instruction


def test_behind_each_instruction(kernel: Kernel) -> None:
    """`post_code` sees the same registers as a post-handler in Python, at as many hits, and changes no
    register of the function.
    """
    texts, mask, seen_somewhere = texts_of(kernel), kernel.arch.mask, 0
    places = boundaries(kernel, "int_sqrt")
    for offset in places if way_of(kernel) == "stepped" else share(places, 1, 4):
        watched: list[int] = []
        python = Kprobe(
            symbol_name="int_sqrt",
            offset=offset,
            post_handler=lambda _kp, regs, to=watched: to.append(getattr(regs, texts.watched)),
        )
        try:
            kernel.register_kprobe(python)
        except KernelError:
            continue
        results = roots(kernel, range(5, 9))
        kernel.unregister_kprobe(python)
        both = Kprobe(symbol_name="int_sqrt", offset=offset, code=texts.count, post_code=texts.watch)
        over = Kprobe(symbol_name="int_sqrt", offset=offset, post_code=texts.overwrite)
        for probe in (both, over):
            kernel.register_kprobe(probe)
            settle(kernel)
            assert roots(kernel, range(5, 9)) == results == [5, 6, 7, 8], f"int_sqrt+{offset:#x}"
            assert kernel.kprobes.mode(probe) in ("int3", "ftrace")
            kernel.unregister_kprobe(probe)
            assert (probe.post_handler, probe.failures, probe.nmissed) == (None, 0, 0)
        assert both.cells["seen"] == sum(watched) & mask, f"int_sqrt+{offset:#x}"
        assert both.cells["counter"] == over.cells["counter"] == len(watched), f"int_sqrt+{offset:#x}"
        seen_somewhere += bool(watched)
    assert seen_somewhere > 3


def test_a_step_ends_without_a_trap_more(kernel: Kernel) -> None:
    """On x86, `post_code` adds no trap to a hit.

    On RISC-V, a stepped hit takes one trap more, because a jump back from the handler would need a register.
    """
    way = way_of(kernel)
    probe = Kprobe(symbol_name="int_sqrt", post_code=texts_of(kernel).count)
    kernel.register_kprobe(probe)
    roots(kernel, range(2))
    mode, met = MODES["called" if kernel.kprobes.profile.ftrace else "stepped"]
    if kernel.config.arch in RISCV and mode == "int3":
        # The way back from the handler is a trap, because a jump to the function would need a register.
        met += 1
    assert kernel.kprobes.mode(probe) == mode
    if kernel.kprobes.compiler.enabled and "TF" not in way:
        assert traps(kernel, 9) == met
        assert probe.cells["counter"] == 3
    kernel.unregister_kprobe(probe)


def test_behind_with_others_at_one_place(kernel: Kernel) -> None:
    texts, calls = texts_of(kernel), list[str]()
    probes = [
        Kprobe(symbol_name="int_sqrt", post_code=texts.count),
        Kprobe(symbol_name="int_sqrt", post_code=texts.overwrite),
        Kprobe(symbol_name="int_sqrt", code=texts.count, post_handler=lambda *_: calls.append("post")),
    ]
    for probe in probes:
        kernel.register_kprobe(probe)
        settle(kernel)
        assert roots(kernel, range(1, 4)) == [1, 2, 3]
    assert [probe.cells["counter"] for probe in probes] == [9, 6, 3]
    kernel.disable_kprobe(probes[2])
    kernel.disable_kprobe(probes[0])
    assert roots(kernel, range(1, 3)) == [1, 2]
    assert [probe.cells["counter"] for probe in probes] == [9, 8, 3]
    assert calls == ["post"] * 3
    kernel.unregister_kprobes(probes)


# At returns


def test_at_returns(kernel: Kernel) -> None:
    """`code` and `return_code` of a return probe share their cells.

    Hits take no trap if the entry is a jump or a call.
    """
    before, count = used(kernel), texts_of(kernel).count
    probe = Kretprobe(symbol_name="int_sqrt", code=count, return_code=f"{result(kernel)}; {count}")
    kernel.register_kretprobe(probe)
    settle(kernel)
    assert roots(kernel, range(6)) == [0, 1, 2, 3, 4, 5]
    assert dict(probe.cells) == {"counter": 12, "sum": 15}
    way, compiled = way_of(kernel), kernel.kprobes.compiler.enabled
    if compiled and way.partition(",")[0] in ("optimized", "called"):
        assert traps(kernel, 36) == 0
        assert probe.cells["sum"] == 21
    kernel.unregister_kretprobe(probe)
    assert roots(kernel, range(2)) == [0, 1]
    assert (probe.cells["sum"] >= 15, probe.failures, probe.nmissed) == (True, 0, 0)
    # The trampoline in guest code stays.
    assert used(kernel)[0] == before[0]
    assert used(kernel)[1] <= before[1] + 1


def test_at_returns_with_a_handler_in_python(kernel: Kernel) -> None:
    """Handlers in assembly and in Python share a return, and see the same registers.

    One handler reads a register that the calling convention does not preserve.
    """
    texts, seen = texts_of(kernel), list[int]()
    watch = texts.watch.replace("rax", "rcx").replace("eax", "ecx")
    name = "cx" if watch != texts.watch else texts.watched
    probes = [
        Kretprobe(symbol_name="int_sqrt", return_code=texts.overwrite),
        Kretprobe(symbol_name="int_sqrt", return_code=watch),
        Kretprobe(
            symbol_name="int_sqrt",
            return_code=result(kernel),
            handler=lambda _instance, regs: seen.append(getattr(regs, name)),
        ),
    ]
    kernel.register_kretprobes(probes)
    settle(kernel)
    assert roots(kernel, range(4, 9)) == [4, 5, 6, 7, 8]
    assert len(seen) == probes[0].cells["counter"] == 5
    assert probes[1].cells["seen"] == sum(seen) & kernel.arch.mask
    assert probes[2].cells["sum"] == 30
    kernel.unregister_kretprobes(probes[2:])
    # Only probes without a handler in Python are left at the address.
    assert roots(kernel, range(4, 9)) == [4, 5, 6, 7, 8]
    kernel.unregister_kretprobes(probes[:1])
    assert roots(kernel, range(4, 9)) == [4, 5, 6, 7, 8]
    assert (probes[0].cells["counter"], probes[1].cells["seen"]) == (10, 3 * sum(seen) & kernel.arch.mask)
    kernel.unregister_kretprobes(probes[1:2])


def test_a_fault_at_a_return(kernel: Kernel) -> None:
    probe = Kretprobe(symbol_name="int_sqrt", return_code=texts_of(kernel).fault)
    kernel.register_kretprobe(probe)
    assert roots(kernel, range(4)) == [0, 1, 2, 3]
    assert probe.cells["before"] >= 1
    assert (probe.cells["behind"], probe.failures) == (0, 4)
    kernel.unregister_kretprobe(probe)
    assert probe.failures == 4


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("stack", RETURN_HOOKS)
def test_on_every_shadow_stack(stack: str, arch: str) -> None:
    with Kernel(MachineConfig(arch=arch, return_hook=stack)) as kernel:
        count = texts_of(kernel).count
        probe = Kretprobe(symbol_name="int_sqrt", code=count, return_code=f"{result(kernel)}; {count}")
        kernel.register_kretprobe(probe)
        assert roots(kernel, range(3)) == [0, 1, 2]
        assert traps(kernel, 9) == 0
        assert dict(probe.cells) == {"counter": 8, "sum": 6}
        assert (probe.returns, probe.failures) == (4, 0)
        kernel.unregister_kretprobe(probe)


# Fprobes


def test_of_an_fprobe(traced: Kernel) -> None:
    before, texts = used(traced), texts_of(traced)
    fp = Fprobe("int_sqrt*", code=f"{texts.count}; {texts.add}", return_code=texts.count)
    fp.cells["counter"] = 100
    traced.register_fprobe(fp)
    assert roots(traced, range(3)) == [0, 1, 2]
    assert traps(traced, 9) == 0
    assert dict(fp.cells) == {"counter": 108, "sum": 14}
    with traced.lock:
        traced.fprobes.disable_fprobe(fp)
    assert roots(traced, range(2)) == [0, 1]
    assert fp.cells["counter"] == 108
    with traced.lock:
        traced.fprobes.enable_fprobe(fp)
    assert roots(traced, range(2)) == [0, 1]
    traced.unregister_fprobe(fp)
    assert roots(traced, range(2)) == [0, 1]
    assert (dict(fp.cells), fp.failures, fp.nmissed) == ({"counter": 112, "sum": 15}, 0, 0)
    assert used(traced)[0] == before[0]
    assert used(traced)[1] <= before[1] + 1


def test_of_an_fprobe_beside_others(traced: Kernel) -> None:
    """If Python calls the users of a site, the guest first runs their assembly handlers."""
    texts, seen = texts_of(traced), list[str]()
    fps = [
        Fprobe("int_sqrt", code=texts.overwrite),
        Fprobe("int_sqrt", return_code=texts.overwrite),
        Fprobe(
            "int_sqrt",
            code=texts.count,
            return_code=result(traced),
            entry_handler=lambda *_: seen.append("entry"),
            exit_handler=lambda *_: seen.append("exit"),
            entry_data_size=16,
        ),
    ]
    kprobe = Kprobe(symbol_name="int_sqrt", code=texts.count, post_code=texts.count)
    for fp in fps:
        traced.register_fprobe(fp)
    traced.register_kprobe(kprobe)
    assert roots(traced, range(1, 4)) == [1, 2, 3]
    assert [fp.cells["counter"] for fp in fps] == [3, 3, 3]
    assert (fps[2].cells["sum"], kprobe.cells["counter"], seen) == (6, 6, ["entry", "exit"] * 3)
    with traced.lock:
        traced.fprobes.disable_fprobe(fps[2])
    traced.unregister_fprobe(fps[0])
    assert roots(traced, range(1, 3)) == [1, 2]
    assert [fp.cells["counter"] for fp in fps] == [3, 5, 3]
    assert kprobe.cells["counter"] == 10
    traced.unregister_kprobe(kprobe)
    for fp in fps[1:]:
        traced.unregister_fprobe(fp)
    assert roots(traced, range(1, 3)) == [1, 2]
    assert [fp.failures for fp in fps] == [0] * 3


def test_an_fprobe_s_fault(traced: Kernel) -> None:
    fp = Fprobe("int_sqrt", code=texts_of(traced).fault, return_code=texts_of(traced).fault)
    traced.register_fprobe(fp)
    assert roots(traced, range(3)) == [0, 1, 2]
    traced.unregister_fprobe(fp)
    assert (fp.failures, fp.cells["before"] >= 1, fp.cells["behind"]) == (6, True, 0)


REGISTER: dict[type, Any] = {
    Kprobe: Kernel.register_kprobe,
    Kretprobe: Kernel.register_kretprobe,
    Fprobe: Kernel.register_fprobe,
}
UNREGISTER: dict[type, Any] = {
    Kprobe: Kernel.unregister_kprobe,
    Kretprobe: Kernel.unregister_kretprobe,
    Fprobe: Kernel.unregister_fprobe,
}


def test_messages_name_the_text(traced: Kernel) -> None:
    """An error names the text with the fault, and a refused registration leaves nothing allocated."""
    before = used(traced)
    for probe, name in (
        (Kprobe(symbol_name="int_sqrt", post_code="nosuch"), "post_code"),
        (Kretprobe(symbol_name="int_sqrt", return_code="nosuch"), "return_code"),
        (Fprobe("int_sqrt", return_code="nosuch"), "return_code"),
        (Fprobe("int_sqrt", code="nosuch"), "code"),
    ):
        with pytest.raises(KernelError, match=f"^.Errno 22. {name}, line 1, column 1: 'nosuch'") as raised:
            REGISTER[type(probe)](traced, probe)
        assert (raised.value.name, probe.failures, len(probe.cells)) == ("EINVAL", 0, 0)
    assert used(traced) == before
    assert roots(traced, range(2)) == [0, 1]


# Without memory for guest code


def no_text(_size: int, _starts: range | None = None) -> int:
    raise HardwareError("none left")


@pytest.mark.parametrize("where", ["code", "post_code", "kretprobe", "fprobe", "fprobe at exit"])
def test_hits_without_room_are_missed(traced: Kernel, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for guest code, only the probes with assembly handlers miss the hits.

    Handlers in Python at the same place are called.
    """
    count, seen = texts_of(traced).count, list[str]()
    probes: dict[str, tuple[Any, type]] = {
        "code": (Kprobe(symbol_name="int_sqrt", code=count), Kprobe),
        "post_code": (Kprobe(symbol_name="int_sqrt", post_code=count), Kprobe),
        "kretprobe": (Kretprobe(symbol_name="int_sqrt", return_code=count), Kretprobe),
        "fprobe": (Fprobe("int_sqrt", code=count), Fprobe),
        "fprobe at exit": (Fprobe("int_sqrt", return_code=count), Fprobe),
    }
    probe, beside = probes[where]
    python: Any = {
        Kprobe: lambda: Kprobe(symbol_name="int_sqrt", pre_handler=lambda *_: seen.append("hit")),
        Kretprobe: lambda: Kretprobe(symbol_name="int_sqrt", handler=lambda *_: seen.append("hit")),
        Fprobe: lambda: Fprobe("int_sqrt", exit_handler=lambda *_: seen.append("hit")),
    }[beside]()
    for each in (probe, python):
        REGISTER[beside](traced, each)
    with monkeypatch.context() as full:
        full.setattr(traced.machine.text, "alloc_text", no_text)
        assert roots(traced, range(3)) == [0, 1, 2]
        assert (probe.nmissed, probe.cells["counter"], python.nmissed, len(seen)) == (3, 0, 0, 3)
    assert roots(traced, range(3)) == [0, 1, 2]
    assert (probe.nmissed, probe.cells["counter"], python.nmissed, len(seen)) == (3, 3, 0, 6)
    for each in (probe, python):
        UNREGISTER[beside](traced, each)
    assert (probe.nmissed, probe.failures) == (3, 0)
