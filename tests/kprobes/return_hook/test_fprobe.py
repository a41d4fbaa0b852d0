"""Fprobes: sets of functions, their entries and exits, and the registers that handlers may read."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from emulated_kernel.arch.architectures import arch_named
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.fprobe import Fprobe, FprobeRegs
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.util.errors import KernelError
from tests.kprobes.return_hook.conftest import Boot
from tests.project.readme import README


def errno_of(action: Callable[[], object]) -> int:
    with pytest.raises(KernelError) as caught:
        action()
    return caught.value.errno or 0


def name(kernel: Kernel, address: int) -> str:
    where = kernel.image.kallsyms.lookup(address)
    assert where is not None
    assert where.offset == 0
    return where.symbol.name


def test_entry_and_exit_of_a_set(kernel: Kernel) -> None:
    seen: list[tuple[str, str, int]] = []

    def entered(_fp: Fprobe, address: int, regs: Any, data: memoryview) -> None:
        data[:8] = regs.di.to_bytes(8, "little")
        seen.append(("entry", name(kernel, address), regs.di))

    def returned(_fp: Fprobe, address: int, regs: Any, data: memoryview) -> None:
        assert data[:8] != bytes(8)
        seen.append(("exit", name(kernel, address), regs.ax))

    fp = Fprobe("[gl]c[dm]", entry_handler=entered, exit_handler=returned, entry_data_size=8)
    kernel.register_fprobe(fp)
    assert {name(kernel, address) for address in fp.functions} == {"gcd", "lcm"}
    assert kernel.call("gcd", 12, 18) == 6
    assert seen == [("entry", "gcd", 12), ("exit", "gcd", 6)]
    seen.clear()
    assert kernel.call("lcm", 4, 6) == 12
    assert [what[:2] for what in seen] == [
        ("entry", "lcm"),
        ("entry", "gcd"),
        ("exit", "gcd"),
        ("exit", "lcm"),
    ]
    kernel.unregister_fprobe(fp)
    assert kernel.machine.text.ledger == {}


def test_all_functions_at_once(kernel: Kernel) -> None:
    """With an fprobe on all functions, no entry is missed.

    Each entry has an exit, except calls that are pending or never return.
    """
    entries: Counter[int] = Counter()
    exits: Counter[int] = Counter()
    fp = Fprobe(
        "*",
        notfilter="*slab*",
        entry_handler=lambda _fp, address, *_: entries.update([address]),
        exit_handler=lambda _fp, address, *_: exits.update([address]),
    )
    kernel.register_fprobe(fp)
    assert len(fp.functions) > 500
    kernel.guest.processes.task_of(600, 0, 0)
    kernel.guest.processes.exit(600)
    assert kernel.call("gcd", 12, 18) == 6
    kernel.unregister_fprobe(fp)
    assert entries.total() > 100
    assert not exits - entries
    assert fp.nmissed == 0
    assert entries.total() - exits.total() < 30
    assert kernel.call("gcd", 12, 18) == 6


def test_entry_handler_decides_and_instances_run_out(boot: Boot) -> None:
    kernel = boot()
    exits: list[int] = []
    fp = Fprobe(
        "[gl]c[dm]",
        entry_handler=lambda _fp, _address, regs, _data: regs.di == 4,
        exit_handler=lambda _fp, _address, regs, _data: exits.append(regs.ax),
        nr_maxactive=1,
    )
    kernel.register_fprobe(fp)
    kernel.call("lcm", 4, 6)
    assert (exits, fp.nmissed) == ([], 0) or (len(exits), fp.nmissed) == (1, 0)
    exits.clear()
    kernel.call("lcm", 6, 10)
    assert (exits, fp.nmissed) == ([30], 1)


@pytest.mark.parametrize("pattern", ["twin", "t[wx]in"])
def test_functions_of_modules(boot: Boot, pattern: str) -> None:
    """The filter of an fprobe matches all functions of a loaded module that have a matching name.

    After the module is unloaded, the fprobe has no functions, even if the module is loaded again.
    """
    kernel = boot()
    fp = Fprobe(pattern)
    assert errno_of(lambda: kernel.register_fprobe(fp)) == errno.EINVAL
    kernel.load_module("twins")
    entries: list[int] = []
    fp.entry_handler = lambda _fp, address, *_: entries.append(address)
    fp.exit_handler = lambda _fp, address, *_: entries.append(-address)
    kernel.register_fprobe(fp)
    results = [kernel.call(function, 5) for function in ("first_twin", "second_twin")]
    first, second = fp.functions
    assert [name(kernel, site) for site in fp.functions] == ["twin", "twin"]
    assert entries == [first, -first, second, -second]
    kernel.unload_module("twins")
    assert fp.functions == ()
    kernel.load_module("twins")
    assert [kernel.call(function, 5) for function in ("first_twin", "second_twin")] == results
    assert len(entries) == 4
    kernel.unregister_fprobe(fp)
    assert kernel.machine.text.ledger == {}


def test_a_removed_function_is_one_of_several(boot: Boot) -> None:
    """When a module is unloaded, an fprobe stays on the kernel's functions."""
    kernel = boot()
    kernel.load_module("twins")
    entries: list[str] = []
    fp = Fprobe("*[ct]*", notfilter="[!gt]*")
    fp.entry_handler = lambda _fp, address, *_: entries.append(name(kernel, address))
    kernel.register_fprobe(fp)
    before = fp.functions
    kernel.call("first_twin", 5)
    assert "twin" in entries
    entries.clear()
    kernel.unload_module("twins")
    assert set(fp.functions) < set(before)
    kernel.call("gcd", 12, 18)
    assert entries.count("gcd") == 1


@pytest.mark.parametrize("exits", [False, True])
def test_a_handler_unregisters_its_own_fprobe(kernel: Kernel, exits: bool) -> None:
    hits: list[int] = []

    def entered(fp: Fprobe, address: int, *_: Any) -> None:
        hits.append(address)
        kernel.fprobes.unregister_fprobe(fp)

    exit_handler = (lambda *_: hits.append(0)) if exits else None
    fp = Fprobe("gcd", entry_handler=entered, exit_handler=exit_handler)
    kernel.register_fprobe(fp)
    assert [kernel.call("gcd", 12, 18) for _ in range(2)] == [6, 6]
    assert len(hits) == 1
    assert kernel.machine.text.ledger == {}


def test_beside_kretprobes_and_disabled(kernel: Kernel) -> None:
    results: list[str] = []
    rp = Kretprobe(symbol_name="gcd", handler=lambda *_: results.append("kretprobe"))
    fp = Fprobe("gcd", exit_handler=lambda *_: results.append("fprobe"))
    kernel.register_kretprobe(rp)
    kernel.register_fprobe(fp)
    assert kernel.call("gcd", 12, 18) == 6
    assert sorted(results) == ["fprobe", "kretprobe"]
    kernel.disable_fprobe(fp)
    kernel.unregister_kretprobe(rp)
    results.clear()
    assert kernel.call("gcd", 12, 18) == 6
    assert results == []
    kernel.enable_fprobe(fp)
    kernel.call("gcd", 12, 18)
    assert results == ["fprobe"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"filter": "nothing_like_it"}, errno.EINVAL),
        ({"filter": "gcd", "notfilter": "g*"}, errno.EINVAL),
        ({"filter": "gcd", "entry_registers": ("nonsense",)}, errno.EOPNOTSUPP),
        (
            {"filter": "gcd", "registers": FprobeRegs.FTRACE_REGS, "entry_registers": ("bx",)},
            errno.EOPNOTSUPP,
        ),
        (
            {"filter": "gcd", "registers": FprobeRegs.FTRACE_REGS, "exit_registers": ("di",)},
            errno.EOPNOTSUPP,
        ),
    ],
)
def test_refused(boot: Boot, options: dict[str, Any], error: int) -> None:
    kernel = boot()
    assert errno_of(lambda: kernel.register_fprobe(Fprobe(**options))) == error
    fp = Fprobe("gcd")
    assert errno_of(lambda: kernel.unregister_fprobe(fp)) == errno.EINVAL
    kernel.register_fprobe(fp)
    assert errno_of(lambda: kernel.register_fprobe(fp)) == errno.EINVAL


def test_partial_registers(boot: Boot) -> None:
    """A handler cannot read or write registers that the fprobe does not save.

    Registers that the fprobe saves can be changed.
    """
    kernel = boot()
    seen: list[int] = []

    def entered(_fp: Fprobe, _address: int, regs: Any, _data: memoryview) -> None:
        seen.append(regs.di)
        regs.si = 8
        with pytest.raises(AttributeError, match="bx isn't saved"):
            _ = regs.bx
        with pytest.raises(AttributeError, match="flags isn't saved"):
            regs.flags = 0

    def returned(_fp: Fprobe, _address: int, regs: Any, _data: memoryview) -> None:
        seen.append(regs.ax)
        with pytest.raises(AttributeError, match="di isn't saved"):
            _ = regs.di

    fp = Fprobe(
        "gcd",
        entry_handler=entered,
        exit_handler=returned,
        registers=FprobeRegs.FTRACE_REGS,
        entry_registers=("di", "si"),
        exit_registers=("ax",),
    )
    kernel.register_fprobe(fp)
    assert kernel.call("gcd", 12, 18) == 4
    assert seen == [12, 4]
    assert fp.failures == 0


def test_a_failing_handler_is_raised_to_the_caller(boot: Boot) -> None:
    kernel = boot()

    def fail(*_: object) -> None:
        raise ValueError("broken")

    fp = Fprobe("gcd", exit_handler=fail)
    kernel.register_fprobe(fp)
    with pytest.raises(ValueError, match="broken"):
        kernel.call("gcd", 12, 18)
    assert fp.failures == 1


def test_without_fentry_sites(boot: Boot) -> None:
    kernel = boot("optprobes-2009")
    assert errno_of(lambda: kernel.register_fprobe(Fprobe("gcd"))) == errno.EOPNOTSUPP


def test_the_docs_say_what_is_saved() -> None:
    text = (README.parent / "docs" / "reference" / "return-hooks.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    archs = [arch_named(name) for name in ("x86_64", "i386", "riscv64")]
    sets = {
        "words of `pt_regs`": [(str(len(arch.pt_regs)),) for arch in archs],
        "`ftrace_regs`, on entry": [arch.ftrace_regs for arch in archs],
        "`fgraph_ret_regs`, on exit": [arch.return_regs for arch in archs],
    }
    for title, wanted in sets.items():
        assert [tuple(cell.split()) for cell in rows[title].split("|")[2:-1]] == wanted


def test_functions_that_run_while_their_sites_are_patched(kernel: Kernel) -> None:
    """Functions can be called between the steps of arming, of disarming, and of compiling handlers at the
    first hit, as by other CPUs.
    """
    within: list[int] = []
    kernel.machine.text.interrupt_cpus = lambda: within.append(kernel.call("lcm", 4, 6))
    exits: list[int] = []
    fp = Fprobe("[gl]c[dm]", exit_handler=lambda _fp, address, _regs, _data: exits.append(address))
    for _ in range(2):
        kernel.register_fprobe(fp)
        kernel.unregister_fprobe(fp)
    assert set(within) == {12}
    assert set(exits) == {kernel.image.kallsyms.lookup_name(name) for name in ("gcd", "lcm")}
    assert fp.failures == 0
    assert kernel.machine.text.ledger == {}
