"""Returns in guest code: no traps, one count for each call, and cooperation with handlers in Python."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.hit_ring import HitRing
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import Profile, RegisterSaving, TrampolineForm
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from tests.kprobes.return_hook.conftest import Boot, dmesg
from tests.kprobes.return_hook.test_kretprobe import PER_TASK, accounted, address, recurse
from tests.kprobes.return_hook.test_tasks import sleepers
from tests.kprobes.return_hook.test_transparency import ways_with_stacks

NATIVE = ("rethook", "objpool", "instances", "fgraph", "unified")
STRATEGIES = ("optprobe", "optprobe-riscv")
WAYS = {
    "ftrace": Profile("ftrace"),
    "optimized": Profile("optimized", ftrace=False, strategies=STRATEGIES),
    "optimized, all registers": Profile(
        "optimized", ftrace=False, strategies=STRATEGIES, saving=RegisterSaving.ALL
    ),
    "boosted": Profile("boosted", preemption=False, ftrace=False, optimizer=False),
    "stepped": Profile("stepped", ftrace=False, optimizer=False, trampoline=TrampolineForm.BREAKPOINT),
}
TRAPS = {"ftrace": 0, "optimized": 0, "optimized, all registers": 0, "boosted": 1, "stepped": 3}
"""Mode -> breakpoints that a call hits: at the entry, at the end of the step, and in the trampoline."""


@pytest.fixture(params=NATIVE)
def stack(request: pytest.FixtureRequest) -> str:
    """Return the name of a shadow stack that guest code can work on."""
    return str(request.param)


@contextmanager
def counted_traps(kernel: Kernel) -> Iterator[list[int]]:
    """Yield a list of the addresses of breakpoints that the guest hits."""
    met: list[int] = []
    breakpoints = kernel.machine.breakpoints
    before = dict(breakpoints)

    def counting(address: int, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        def handle(regs: Any) -> None:
            met.append(address)
            handler(regs)

        return handle

    for address_, handler in before.items():
        breakpoints[address_] = counting(address_, handler)
    yield met
    for address_, handler in before.items():
        if address_ in breakpoints:
            breakpoints[address_] = handler


def hooked(kernel: Kernel, symbol: str, **options: Any) -> tuple[Kretprobe, HitRing]:
    """Register a return probe with a handler in guest code. Return the probe and the ring of its hits."""
    ring = kernel.hit_ring(kernel.arch.registers.return_value)
    rp = ring.return_probe(symbol_name=symbol, **options)
    kernel.register_kretprobe(rp)
    if kernel.kprobes.optimizer is not None:
        kernel.kprobes.optimizer.flush()
    return rp, ring


# Counts


@pytest.mark.parametrize(("way", "stack"), ways_with_stacks(WAYS))
@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_a_hooked_call_stays_in_the_guest(arch: str, way: str, stack: str) -> None:
    with Kernel(MachineConfig(arch=arch, return_hook=stack), profile=WAYS[way]) as kernel:
        rp, ring = hooked(kernel, "int_sqrt")
        target = address(kernel, "int_sqrt")
        for number in range(2):
            kernel.machine.call(target, number * number)
        with counted_traps(kernel) as met:
            assert [kernel.machine.call(target, number**2) for number in range(50)] == list(range(50))
        # RISC-V has no booster.
        traps = 2 if (arch, way) == ("riscv64", "boosted") else TRAPS[way]
        assert len(met) == 50 * traps
        assert (rp.returns, rp.nmissed, ring.hits) == (52, 0, 52)
        assert [entry.registers for entry in ring.entries()][-50:] == [(number,) for number in range(50)]
        assert rp.hook is not None
        assert (rp.hook.active, rp.hook.high_water) == (0, 1)
        kernel.unregister_kretprobe(rp)
        assert (rp.returns, rp.nmissed) == (52, 0)


@pytest.mark.parametrize("in_python", [False, True])
def test_a_number_in_the_guest_shows_missed_calls(boot: Boot, stack: str, in_python: bool) -> None:
    """The number is current, whether guest code or Python misses the call. Bytes around it do not change."""
    kernel = boot(return_hook=stack)
    around = kernel.machine.alloc_pages(64)
    kernel.machine.memory.write(around, bytes.fromhex("11111111 00000000 22222222"))
    more = {"entry_handler": lambda _instance, _regs: 0} if in_python else {}
    rp, _ = hooked(kernel, "bsearch", maxactive=2, instances_missed_at=around + 4, **more)
    for number in range(1, 4):
        recurse(kernel, 5)
        missed = 0 if stack in PER_TASK else 4 * number
        assert rp.instances_missed == missed
        shown = missed.to_bytes(4, "little").hex()
        assert kernel.machine.memory.read(around, 12).hex() == f"11111111{shown}22222222"


@pytest.mark.parametrize(("maxactive", "depth"), [(1, 0), (1, 5), (4, 3), (4, 4), (4, 9), (30, 20)])
def test_recursion_deeper_than_maxactive(boot: Boot, stack: str, maxactive: int, depth: int) -> None:
    """At any depth of recursion, entries are equal to returns that were seen plus calls that were missed."""
    kernel = boot(return_hook=stack)
    rp, ring = hooked(kernel, "bsearch", maxactive=maxactive)
    for _ in range(2):
        recurse(kernel, 0)
    recurse(kernel, depth)
    kept = depth + 1 if stack in PER_TASK else min(maxactive, depth + 1)
    assert (rp.returns, rp.nmissed, ring.hits) == (2 + kept, depth + 1 - kept, 2 + kept)
    assert rp.hook is not None
    assert (rp.hook.active, rp.hook.high_water) == (0, kept)
    rp.nmissed = 0
    recurse(kernel, depth)
    assert (rp.returns, rp.nmissed) == (2 + 2 * kept, depth + 1 - kept)


def test_a_full_array_of_a_task_is_a_miss(boot: Boot) -> None:
    kernel = boot(return_hook="fgraph")
    rp, ring = hooked(kernel, "bsearch")
    recurse(kernel, 0)
    recurse(kernel, 200)
    assert (rp.returns, rp.nmissed) == (1 + 4096 // 32, 201 - 4096 // 32)
    assert ring.hits == rp.returns


# With Python


def test_both_may_end_what_the_other_began(boot: Boot, stack: str) -> None:
    """Python ends calls that guest code has begun, and the reverse: the compiled handler is dropped and
    compiled again while calls are pending.
    """
    kernel = boot(return_hook=stack)
    mount = kernel.mount()
    rp, ring = hooked(kernel, "vfs_read")
    pipe, clients = sleepers(mount, 4)
    assert rp.hook is not None
    assert rp.hook.code is not None
    mount.give_up(clients[0], pipe, errno.EINTR)
    kernel.kretprobes.handler_changed(rp)
    assert rp.hook.code is None
    mount.give_up(clients[1], pipe, errno.EINTR)
    clients += [Client(800, 0, 0), Client(801, 0, 0)]
    for client in clients[4:]:
        with pytest.raises(WouldBlock):
            mount.read(client, pipe, 100, 0)
    assert rp.hook.code is not None
    for client in clients[2:]:
        mount.give_up(client, pipe, errno.EINTR)
    assert (rp.returns, ring.hits, rp.hook.active, rp.nmissed, rp.hook.high_water) == (6, 6, 0, 0, 4)


def test_unregistered_while_calls_of_guest_code_are_pending(boot: Boot, stack: str) -> None:
    kernel = boot(return_hook=stack)
    mount = kernel.mount()
    rp, ring = hooked(kernel, "vfs_read")
    pipe, clients = sleepers(mount, 3)
    kernel.unregister_kretprobe(rp)
    for client in clients:
        mount.give_up(client, pipe, errno.EINTR)
    assert (rp.returns, ring.hits) == (0, 0)
    assert not [line for line in dmesg(kernel) if "BUG" in line or "Oops" in line]
    kernel.kretprobes.hooks.select_return_hook("rethook")


def test_two_hooks_on_a_call(boot: Boot, stack: str) -> None:
    """If two hooks are on a function, both see all returns. The newer hook finds the trampoline as return
    address, so Python handles both.

    After the newer hook is unregistered, guest code handles the other one.
    """
    kernel = boot(return_hook=stack)
    first, ring = hooked(kernel, "int_sqrt")
    second, another = hooked(kernel, "int_sqrt")
    for number in range(5):
        assert kernel.call("int_sqrt", number * number) == number
    assert (first.returns, second.returns, ring.hits, another.hits) == (5, 5, 5, 5)
    kernel.unregister_kretprobe(second)
    kernel.call("int_sqrt", 1)
    kernel.call("int_sqrt", 1)
    with counted_traps(kernel) as met:
        kernel.machine.call(address(kernel, "int_sqrt"), 4)
    assert (met, first.returns, ring.hits) == ([], 8, 8)


def test_tail_calls_return_through_both(boot: Boot, stack: str) -> None:
    kernel = boot(return_hook=stack)
    probes = [hooked(kernel, name) for name in ("kfree", "__free_pages")]
    for _ in range(4):
        kernel.call("kfree", kernel.call("__kmalloc", 1 << 16, 0xCC0))
    for rp, ring in probes:
        assert accounted(rp) == rp.returns == ring.hits >= 4


def test_a_handler_in_python_leaves_the_entry_to_the_guest(boot: Boot, stack: str) -> None:
    """With a return handler in Python, the entry causes no trap.

    The return traps, and its trampoline saves all registers for the handler.
    """
    kernel = boot(return_hook=stack)
    seen: list[int] = []
    rp = Kretprobe(symbol_name="int_sqrt", handler=lambda _instance, regs: seen.append(regs.ax))
    kernel.register_kretprobe(rp)
    target = address(kernel, "int_sqrt")
    for _ in range(2):
        kernel.machine.call(target, 9)
    with counted_traps(kernel) as met:
        kernel.machine.call(target, 16)
    assert (seen, len(met)) == ([3, 3, 4], 1)


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_the_data_of_a_call_begins_as_zeros(boot: Boot, arch: str, stack: str) -> None:
    """The data of a call is zero at first, even if an earlier call wrote to the same node.

    Only the return traps.
    """
    found: list[bytes] = []

    def handler(instance: Any, _regs: Any) -> None:
        found.append(bytes(instance.data))
        instance.data[:] = b"\xff" * 20

    kernel = boot(arch=arch, return_hook=stack)
    rp = Kretprobe(symbol_name="int_sqrt", handler=handler, data_size=20, maxactive=1)
    kernel.register_kretprobe(rp)
    kernel.call("int_sqrt", 4)
    with counted_traps(kernel) as met:
        assert [kernel.call("int_sqrt", number * number) for number in range(4)] == [0, 1, 2, 3]
    assert len(met) == 4
    assert found == [bytes(20)] * 5
    kernel.unregister_kretprobe(rp)


@pytest.mark.parametrize(("data_size", "entries"), [(64, 0), (65, 4)])
def test_more_data_than_guest_code_clears(boot: Boot, data_size: int, entries: int) -> None:
    found: list[bytes] = []
    kernel = boot()
    rp = Kretprobe(
        symbol_name="int_sqrt",
        handler=lambda instance, _regs: found.append(bytes(instance.data)),
        data_size=data_size,
    )
    kernel.register_kretprobe(rp)
    kernel.call("int_sqrt", 4)
    with counted_traps(kernel) as met:
        assert [kernel.call("int_sqrt", number * number) for number in range(4)] == [0, 1, 2, 3]
    assert len(met) == 4 + entries
    assert found == [bytes(data_size)] * 5


def test_a_kprobe_in_python_at_the_entry_takes_both(boot: Boot, stack: str) -> None:
    kernel = boot(return_hook=stack)
    rp, ring = hooked(kernel, "int_sqrt")
    seen: list[int] = []
    other = Kprobe(symbol_name="int_sqrt", pre_handler=lambda _kprobe, regs: seen.append(regs.di))
    kernel.register_kprobe(other)
    for number in range(3):
        kernel.call("int_sqrt", number)
    assert (seen, rp.returns, ring.hits) == ([0, 1, 2], 3, 3)


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_breakpoints_for_trampolines(arch: str) -> None:
    """If probes are stepped, one trampoline has a breakpoint for handlers in guest code, and another has a
    breakpoint for Python.

    The call then returns to its caller.
    """
    with Kernel(MachineConfig(arch=arch), profile=WAYS["stepped"]) as kernel:
        (first, ring), (second, another) = (hooked(kernel, "int_sqrt") for _ in range(2))
        for number in range(4):
            assert kernel.call("int_sqrt", number * number) == number
        trampoline = kernel.kretprobes.hooks.trampoline
        assert trampoline.native not in (0, trampoline.address)
        assert (first.returns, second.returns, ring.hits, another.hits) == (4, 4, 4, 4)
        kernel.unregister_kretprobe(second)
        assert [kernel.call("int_sqrt", number * number) for number in range(3)] == [0, 1, 2]
        assert (first.returns, ring.hits) == (7, 7)
        name = kernel.tracing.symbols.lookup(trampoline.native)
        assert name is not None
        assert name.name == "arch_rethook_trampoline"


# Tasks


def test_a_task_that_ends_in_a_call_hooked_by_guest_code(boot: Boot, stack: str) -> None:
    kernel = boot(return_hook=stack)
    guest = kernel.guest
    rp, _ = hooked(kernel, "do_exit", maxactive=1)
    for pid in range(600, 606):
        guest.processes.task_of(pid, 0, 0)
        guest.processes.exit(pid)
    guest.processes.task_of(606, 0, 0)
    assert rp.hook is not None
    assert (rp.hook.active, rp.returns, rp.nmissed, rp.hook.flushed) == (0, 0, 0, 6)


def test_a_call_given_up_leaves_nothing_pending(boot: Boot, stack: str) -> None:
    kernel = boot(return_hook=stack)
    rp, _ = hooked(kernel, "strlen")
    target = address(kernel, "strlen")
    for flushed in range(1, 5):
        with pytest.raises(Exception, match="fault"):
            kernel.machine.call(target, 0x5000)
        assert rp.hook is not None
        assert (rp.hook.active, rp.hook.flushed, accounted(rp)) == (0, flushed, flushed)


def test_a_stack_trace_shows_the_caller(boot: Boot, stack: str) -> None:
    """The stack trace of an oops in a call that guest code hooked shows no trampoline and no unknown
    caller.
    """
    kernel = boot(return_hook=stack)
    rp, _ = hooked(kernel, "crc32_le")
    for _ in range(2):
        kernel.call("crc32_le", 0, "four", 4)
    assert rp.hook is not None
    assert rp.hook.code is not None
    with pytest.raises(KernelError):
        kernel.call("crc32_le", 0, 0x5000, 4)
    log = dmesg(kernel)
    trace = log[next(number for number, line in enumerate(log) if "Call Trace" in line) :]
    assert not any("rethook" in line or "unknown" in line for line in trace)
    kernel.guest.processes.worker()
    assert (rp.hook.active, rp.hook.flushed) == (0, 1)
