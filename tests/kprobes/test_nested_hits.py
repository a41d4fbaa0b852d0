"""Hits of compiled probes within the hit of another probe: each is missed, as in Linux, and none is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.jprobe import Jprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import PROFILES, RETURN_HOOKS, RISCV_PROFILE, Profile, Stepper
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.config import MachineConfig
from tests.kprobes.test_assembly import TEXTS, boundaries, settle
from tests.kprobes.test_jprobe import mirror
from tests.ledger import ledger_mismatches
from tests.sample import share

PLAIN = Profile("plain", ftrace=False, optimizer=False)
LATEST = PROFILES["linux-6.1"]
KERNELS = {
    **{f"x86_64-{name}": ("x86_64", replace(LATEST, return_hook=name)) for name in RETURN_HOOKS},
    "x86_64-optprobes-2009": ("x86_64", PROFILES["optprobes-2009"]),
    "x86_64-kprobes-2010": ("x86_64", PROFILES["kprobes-2010"]),
    "x86_64-stepped": ("x86_64", PLAIN),
    "x86_64-trap-flag": ("x86_64", replace(PLAIN, stepper=Stepper.TRAP_FLAG)),
    "x86_64-boosted": ("x86_64", replace(PLAIN, preemption=False)),
    "i386": ("i386", LATEST),
    "i386-stepped": ("i386", PLAIN),
    "riscv64": ("riscv64", LATEST),
    "riscv64i": ("riscv64i", PROFILES[RISCV_PROFILE]),
}
OUTER = "gcd"
INNER = "int_sqrt"
"""Function that the outer probe's handler calls once at each hit."""
ROUNDS = 5


class Inner(NamedTuple):
    """The probes on the function INNER. Each call of INNER hits all of them."""

    probes: list[Any]
    hits: Callable[[], int]
    unregister: Callable[[], object]
    per_call: int = 1


@pytest.fixture(scope="module", params=KERNELS)
def booted(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    arch, profile = KERNELS[request.param]
    with Kernel(MachineConfig(arch=arch), profile=profile) as kernel:
        kernel.load_module("probing")
        yield kernel


@pytest.fixture
def kernel(booted: Kernel) -> Iterator[Kernel]:
    yield booted
    settle(booted)
    assert [*booted.kprobes] == []
    assert ledger_mismatches(booted.machine.text) == []


def inside(kernel: Kernel, function: str) -> int:
    """Return the offset of the first instruction after the nop of an fentry site."""
    return next(at for at in boundaries(kernel, function) if at >= kernel.arch.call_size)


def settled(kernel: Kernel, calls: int) -> None:
    """Call INNER `calls` times, so that all handlers are compiled. Before each call, the optimizer finishes
    its work.
    """
    for number in range(calls):
        settle(kernel)
        assert kernel.call(INNER, number * number) == number


# Inner probes


def one_probe(kernel: Kernel, offset: int) -> Inner:
    ring = kernel.hit_ring()
    probe = ring.probe(symbol_name=INNER, offset=offset)
    kernel.register_kprobe(probe)
    return Inner([probe], lambda: ring.hits, lambda: kernel.unregister_kprobe(probe))


def several_probes(kernel: Kernel, offset: int) -> Inner:
    """Register two probes and a disabled one at the same address."""
    ring = kernel.hit_ring()
    probes = [ring.probe(symbol_name=INNER, offset=offset, disabled=disabled) for disabled in (0, 0, 1)]
    for probe in probes:
        kernel.register_kprobe(probe)

    def unregister() -> None:
        for probe in probes:
            kernel.unregister_kprobe(probe)

    return Inner(probes, lambda: ring.hits, unregister, 2)


def return_probe(kernel: Kernel, _offset: int) -> Inner:
    ring = kernel.hit_ring()
    probe = ring.return_probe(symbol_name=INNER, maxactive=1)
    kernel.register_kretprobe(probe)
    return Inner([probe], lambda: ring.hits, lambda: kernel.unregister_kretprobe(probe))


def assembly(kernel: Kernel, offset: int) -> Inner:
    probe = Kprobe(symbol_name=INNER, offset=offset, code=TEXTS[kernel.config.arch].count)
    kernel.register_kprobe(probe)
    return Inner([probe], lambda: probe.cells["counter"], lambda: kernel.unregister_kprobe(probe))


INNER_KINDS = {
    "probe": (one_probe, False),
    "probe inside": (one_probe, True),
    "several": (several_probes, False),
    "several inside": (several_probes, True),
    "return": (return_probe, False),
    "assembly": (assembly, False),
    "assembly inside": (assembly, True),
}

# Outer probes


def in_c(kernel: Kernel, handler: str, offset: int = 0) -> Callable[[], object]:
    """Register a probe on OUTER whose handler in C calls INNER; return a function that unregisters it.

    `handler`: the field of the guest's structure that points to the handler.
    """
    is_return = handler.startswith("kretprobe.")
    abi = kernel.image.abi
    memory = kernel.machine.memory
    at = kernel.machine.records.alloc_pages(PAGE_SIZE)
    memory.write(at, bytes(PAGE_SIZE))
    start = kernel.kprobes.symbols.lookup_name(OUTER)
    call = kernel.kprobes.symbols.lookup_name("call")
    assert start is not None
    assert call is not None
    memory.write_word(at + abi["kprobe.addr"], start + offset)
    memory.write_word(at + abi[handler], call)
    kind = "kretprobe" if is_return else "kprobe"
    assert kernel.call(f"register_{kind}", at) == 0

    def unregister() -> None:
        kernel.call(f"unregister_{kind}", at)
        kernel.machine.records.free_pages(at)

    return unregister


OUTER_KINDS: dict[str, Callable[[Kernel], Callable[[], object]]] = {
    "pre_handler": lambda kernel: in_c(kernel, "kprobe.pre_handler"),
    "pre_handler inside": lambda kernel: in_c(kernel, "kprobe.pre_handler", inside(kernel, OUTER)),
    "post_handler": lambda kernel: in_c(kernel, "kprobe.post_handler"),
    "post_handler inside": lambda kernel: in_c(kernel, "kprobe.post_handler", inside(kernel, OUTER)),
    "return handler": lambda kernel: in_c(kernel, "kretprobe.handler"),
    "entry_handler": lambda kernel: in_c(kernel, "kretprobe.entry_handler"),
}


# Tests


def is_compiled(kernel: Kernel, inner: Inner) -> bool:
    """Return True if compiled handlers of the inner probes handle the next hit."""
    head = kernel.kprobes.table.valid(inner.probes[0])
    assert head is not None
    return (head.compiled if head.is_ftrace or head.is_patched else head.stub) is not None


def check_missed(kernel: Kernel, inner: Inner) -> None:
    """Check that each call of OUTER is a missed hit of the inner probes, and each call of INNER is a hit."""
    hits = inner.hits()
    for _ in range(ROUNDS):
        assert kernel.call(OUTER, 12, 18) == 6
        assert kernel.call(INNER, 81) == 9
    assert inner.hits() - hits == ROUNDS * inner.per_call
    assert [probe.nmissed for probe in inner.probes] == [ROUNDS] * len(inner.probes)
    assert is_compiled(kernel, inner)


@pytest.mark.parametrize("outer", OUTER_KINDS)
def test_a_hit_within_a_handler_in_c_is_missed(
    kernel: Kernel, outer: str, request: pytest.FixtureRequest
) -> None:
    """A hit within a handler in C is missed, although the inner probe's handler is compiled.

    The inner probe's handler is compiled before the outer probe is registered, and again afterwards. In a
    short run, each outer probe meets each kind of inner probe, but not in each kernel.
    """
    number = list(KERNELS).index(request.node.callspec.params["booted"]) + list(OUTER_KINDS).index(outer)
    for register, is_inside in share(list(INNER_KINDS.values()), number, 3):
        registered = register(kernel, inside(kernel, INNER) if is_inside else 0)
        settled(kernel, 4)
        assert is_compiled(kernel, registered)
        unregister_outer = OUTER_KINDS[outer](kernel)
        settled(kernel, 4)
        check_missed(kernel, registered)
        unregister_outer()
        registered.unregister()
        settle(kernel)
        assert [*kernel.kprobes] == []


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
@pytest.mark.parametrize("inner", ["probe", "probe inside", "several"])
def test_each_cpu_has_its_own_hits(arch: str, inner: str) -> None:
    register, is_inside = INNER_KINDS[inner]
    with Kernel(MachineConfig(arch=arch, cpus=2)) as kernel, kernel.lock:
        kernel.load_module("probing")
        registered = register(kernel, inside(kernel, INNER) if is_inside else 0)
        OUTER_KINDS["pre_handler"](kernel)
        settled(kernel, 4)
        starts = [kernel.image.kallsyms.lookup_name(name) for name in (OUTER, INNER)]
        hits = registered.hits()
        turns = (1, 0, 1)
        for cpu in turns:
            kernel.machine.switch_to(cpu)
            for start in starts:
                assert start is not None
                kernel.machine.calls.call(start, 81, 18)
        assert registered.hits() - hits == len(turns) * registered.per_call
        assert [probe.nmissed for probe in registered.probes] == [len(turns)] * len(registered.probes)
        assert is_compiled(kernel, registered)
        kernel.machine.switch_to(0)


@pytest.mark.parametrize("booted", ["x86_64-optprobes-2009", "x86_64-kprobes-2010"], indirect=True)
@pytest.mark.parametrize("inner", INNER_KINDS)
def test_a_hit_within_a_jprobe_is_missed(kernel: Kernel, inner: str) -> None:
    target = kernel.image.kallsyms.lookup_name(INNER)
    source = f"mov edi, 49\nmov rax, {target:#x}\ncall rax\nmov rax, {{jprobe_return}}\njmp rax"
    jprobe = Jprobe(mirror(kernel, source), symbol_name=OUTER)
    kernel.register_jprobe(jprobe)
    register, is_inside = INNER_KINDS[inner]
    registered = register(kernel, inside(kernel, INNER) if is_inside else 0)
    settled(kernel, 4)
    check_missed(kernel, registered)
    kernel.unregister_jprobe(jprobe)
    registered.unregister()


@pytest.mark.parametrize("outer", OUTER_KINDS)
def test_an_fprobe_is_hit_within_a_handler(kernel: Kernel, outer: str) -> None:
    """As in Linux, an fprobe is hit, and not missed, within the handler of another probe.

    Mirrors: kernel/trace/fprobe.c:fprobe_handler (v6.1). Only an fprobe that is shared with kprobes checks
    for a running kprobe.
    """
    if kernel.kprobes.sites is None:
        pytest.skip("this kernel has no fentry sites")
    ring = kernel.hit_ring()
    fprobe = ring.fprobe(INNER)
    kernel.register_fprobe(fprobe)
    settled(kernel, 4)
    unregister_outer = OUTER_KINDS[outer](kernel)
    settled(kernel, 4)
    hits = ring.hits
    for _ in range(ROUNDS):
        assert kernel.call(OUTER, 12, 18) == 6
        assert kernel.call(INNER, 81) == 9
    assert ring.hits - hits == 2 * ROUNDS
    assert fprobe.nmissed == 0
    unregister_outer()
    kernel.unregister_fprobe(fprobe)


def test_only_a_handler_in_c_makes_hits_longer(kernel: Kernel) -> None:
    """Compiled code checks for nested hits only while some handler can run probed code; otherwise hits are
    shorter.
    """
    executed = kernel.machine.count_instructions()

    def instructions() -> int:
        settled(kernel, 3)
        before = executed.value
        kernel.call(INNER, 81)
        return executed.value - before

    registered = one_probe(kernel, 0)
    without = instructions()
    unregister_outer = OUTER_KINDS["pre_handler"](kernel)
    assert instructions() - without in range(5)
    unregister_outer()
    assert instructions() == without
    registered.unregister()
