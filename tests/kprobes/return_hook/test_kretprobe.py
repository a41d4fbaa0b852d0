"""Kretprobes on each shadow stack: refused registrations, calls that are seen, and what handlers get."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe, KretprobeInstance
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import PROFILES
from emulated_kernel.util.errors import KernelError
from tests.kprobes.listed import list_lines
from tests.kprobes.return_hook.conftest import Boot, dmesg, profiles_with_stacks

PER_TASK = ("fgraph", "unified")
"""Shadow stacks without instances, which therefore cannot run out."""
Seen = list[tuple[Any, ...]]


def address(kernel: Kernel, symbol: str) -> int:
    found = kernel.image.kallsyms.lookup_name(symbol)
    assert found is not None
    return found


def symbol_at(kernel: Kernel, addr: int) -> str:
    where = kernel.image.kallsyms.lookup(addr)
    return "trampoline" if where is None else where.symbol.name


def accounted(rp: Kretprobe) -> int:
    """Return the sum of a kretprobe's seen, missed, flushed and pending calls."""
    assert rp.hook is not None
    return rp.returns + rp.nmissed + rp.hook.flushed + rp.hook.active


def errno_of(action: Callable[[], object]) -> int:
    with pytest.raises(KernelError) as caught:
        action()
    return caught.value.errno or 0


# Registration


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ({"symbol_name": "gcd", "offset": 5}, errno.EINVAL),
        ({"symbol_name": "no_such_function"}, errno.ENOENT),
        ({"symbol_name": "gcd", "addr": 1}, errno.EINVAL),
        ({}, errno.EINVAL),
        ({"symbol_name": "__switch_to"}, errno.EINVAL),
        ({"symbol_name": "rethook_flush_task"}, errno.EINVAL),
        ({"symbol_name": "asm_host_interrupt"}, errno.EINVAL),
        ({"symbol_name": "panic.cold"}, errno.EINVAL),
        ({"symbol_name": "init_task"}, errno.EINVAL),
        ({"symbol_name": "gcd", "data_size": 4097}, errno.E2BIG),
        ({"symbol_name": "gcd", "data_size": 4096, "maxactive": 8192}, errno.ENOMEM),
    ],
)
def test_refused(boot: Boot, place: dict[str, Any], error: int) -> None:
    kernel = boot()
    if place.get("symbol_name") == "panic.cold":
        place = {"symbol_name": next(s.name for s in kernel.image.kallsyms.symbols if ".cold" in s.name)}
    rp = Kretprobe(**place)
    assert errno_of(lambda: kernel.register_kretprobe(rp)) == error
    assert rp.hook is None
    assert list_lines(kernel.kprobes) == []
    kernel.kretprobes.hooks.select_return_hook("fgraph")


def test_registered_twice(boot: Boot) -> None:
    kernel = boot()
    rp = Kretprobe(addr=address(kernel, "gcd"))
    kernel.register_kretprobe(rp)
    hook = rp.hook
    assert errno_of(lambda: kernel.register_kretprobe(rp)) == errno.EINVAL
    assert rp.hook is hook


@pytest.mark.parametrize(
    ("profile", "cpus", "expected"),
    [
        ("linux-6.1", 1, 10),
        ("linux-6.1", 8, 16),
        ("linux-6.1-nopreempt", 1, 1),
        ("linux-6.1-nopreempt", 4, 4),
    ],
)
def test_default_maxactive(boot: Boot, profile: str, cpus: int, expected: int) -> None:
    kernel = boot(profile, cpus=cpus)
    probes = [Kretprobe(symbol_name="gcd", maxactive=number) for number in (0, -1)]
    kernel.register_kretprobes(probes)
    assert [rp.maxactive for rp in probes] == [expected, expected]


def test_batch_is_all_or_none(kernel: Kernel) -> None:
    batch = [Kretprobe(symbol_name="gcd"), Kretprobe(symbol_name="strlen"), Kretprobe(symbol_name="nothing")]
    assert errno_of(lambda: kernel.register_kretprobes(batch)) == errno.ENOENT
    assert errno_of(lambda: kernel.register_kretprobes([])) == errno.EINVAL
    assert list_lines(kernel.kprobes) == []
    kernel.register_kretprobes(batch[:2])
    listed = {tuple(line.split()[1:]) for line in list_lines(kernel.kprobes)}
    assert listed == {("r", "gcd+0x0", "[FTRACE]"), ("r", "strlen+0x0", "[FTRACE]")}
    kernel.unregister_kretprobes(batch[:2])
    assert list_lines(kernel.kprobes) == []


# What handlers see


@pytest.mark.parametrize(("profile", "stack"), profiles_with_stacks(1))
def test_result_and_caller(boot: Boot, profile: str, stack: str) -> None:
    kernel = boot(profile, stack)
    if stack == "unified" and not PROFILES[profile].ftrace:
        # This return hook works only at fentry sites.
        probe = Kretprobe(symbol_name="gcd")
        assert errno_of(lambda: kernel.register_kretprobe(probe)) == errno.EOPNOTSUPP
        assert list_lines(kernel.kprobes) == []
        return
    seen: Seen = []
    callers: list[int] = []

    def returned(instance: KretprobeInstance, regs: Any) -> None:
        assert regs.sp == instance.frame + 8
        seen.append((regs.ax, instance.ret_addr, regs.ip))

    kernel.register_kretprobe(Kretprobe(symbol_name="gcd", handler=returned))
    # The newest kprobe runs first, and finds the original return address on the stack.
    read = kernel.machine.memory.read_u64
    kernel.register_kprobe(
        Kprobe(symbol_name="gcd", pre_handler=lambda _kprobe, regs: callers.append(read(regs.sp)))
    )
    assert kernel.call("gcd", 12, 18) == 6
    assert seen == [(6, callers[0], callers[0])]


def test_the_result_can_be_changed(kernel: Kernel) -> None:
    def returned(_instance: KretprobeInstance, regs: Any) -> None:
        regs.ax = 1234

    rp = Kretprobe(symbol_name="gcd", handler=returned)
    kernel.register_kretprobe(rp)
    assert kernel.call("gcd", 12, 18) == 1234
    kernel.unregister_kretprobe(rp)
    assert kernel.call("gcd", 12, 18) == 6


def test_data_is_the_calls_own(kernel: Kernel) -> None:
    """Nested calls of a function have separate data: each return handler finds the data that its own call's
    entry handler wrote.
    """
    results: list[bytes] = []

    def entered(instance: KretprobeInstance, regs: Any) -> None:
        assert bytes(instance.data) == bytes(12)
        instance.data[:8] = regs.sp.to_bytes(8, "little")

    def returned(instance: KretprobeInstance, regs: Any) -> None:
        assert int.from_bytes(instance.data[:8], "little") == instance.frame == regs.sp - 8
        results.append(bytes(instance.data))

    kernel.register_kretprobe(
        Kretprobe(symbol_name="bsearch", entry_handler=entered, handler=returned, data_size=12)
    )
    recurse(kernel, 4)
    assert len(set(results)) == 5


def test_entry_handler_decides(kernel: Kernel) -> None:
    seen: Seen = []
    rp = Kretprobe(
        symbol_name="gcd",
        maxactive=1,
        entry_handler=lambda _instance, regs: regs.di % 2,
        handler=lambda _instance, regs: seen.append((regs.ax,)),
    )
    kernel.register_kretprobe(rp)
    assert [kernel.call("gcd", number, 0) for number in range(6)] == list(range(6))
    assert seen == [(0,), (2,), (4,)]
    assert (rp.nmissed, rp.returns) == (0, 3)
    assert rp.hook is not None
    assert rp.hook.active == 0


def test_several_on_one_function(kernel: Kernel) -> None:
    """The handler of the oldest probe runs first. All handlers but the last see the trampoline as the caller.

    With the hash table of Linux before rethooks, all handlers see the caller.
    """
    seen: Seen = []
    for number in range(3):
        kernel.register_kretprobe(
            Kretprobe(
                symbol_name="gcd",
                handler=lambda instance, regs, number=number: seen.append(
                    (number, symbol_at(kernel, instance.ret_addr), symbol_at(kernel, regs.ip), regs.ax)
                ),
            )
        )
    assert kernel.call("gcd", 12, 18) == 6
    caller = seen[-1][1]
    assert caller != "trampoline"
    older = caller if kernel.kretprobes.hooks.return_hook == "instances" else "trampoline"
    assert seen == [
        (0, older, caller, 6),
        (1, older, caller, 6),
        (2, caller, caller, 6),
    ]


def test_kprobe_and_kretprobe_on_one_entry(kernel: Kernel) -> None:
    """Entry handlers run newest first.

    A kprobe that is older than the kretprobe finds the trampoline as the return address on the stack.
    """
    seen: list[str] = []
    memory = kernel.machine.memory

    def on_entry(_kprobe: Kprobe, regs: Any) -> None:
        seen.append(symbol_at(kernel, memory.read_u64(regs.sp)))

    kernel.register_kprobe(Kprobe(symbol_name="gcd", pre_handler=on_entry))
    kernel.register_kretprobe(Kretprobe(symbol_name="gcd", handler=lambda *_: seen.append("returned")))
    kernel.register_kprobe(Kprobe(symbol_name="gcd", pre_handler=on_entry))
    kernel.call("gcd", 1, 1)
    assert seen == [seen[0], "trampoline", "returned"]
    assert seen[0] != "trampoline"


def test_a_tail_call_returns_through_both(kernel: Kernel) -> None:
    """kfree jumps to __free_pages, whose return is also the return of kfree.

    The handler of __free_pages runs first.
    """
    seen: list[str] = []
    for name in ("kfree", "__free_pages"):
        handler = lambda _instance, _regs, name=name: seen.append(name)  # noqa: E731
        kernel.register_kretprobe(Kretprobe(symbol_name=name, handler=handler))
    block = kernel.call("__kmalloc", 1 << 16, 0xCC0)
    assert block
    kernel.call("kfree", block)
    assert seen[-2:] == ["__free_pages", "kfree"]


# Recursion, and instances running out


def recurse(kernel: Kernel, depth: int) -> None:
    """Let bsearch call its comparison function, which calls bsearch again, `depth` times."""
    machine = kernel.machine
    stub = machine.text.alloc_text(64)
    code = bytes.fromhex("48ff0f 781d ba01000000 b901000000 49b8") + stub.to_bytes(8, "little")
    code += bytes.fromhex("48b8") + address(kernel, "bsearch").to_bytes(8, "little") + bytes.fromhex("ffd0")
    jump_from = 5
    code = code[:4] + bytes([len(code) - jump_from]) + code[5:] + bytes.fromhex("31c0c3")
    machine.text.poke(stub, code)
    words = machine.alloc_pages(64)
    machine.memory.write_word(words, depth)
    kernel.call("bsearch", words, words, 1, 1, stub)
    assert machine.memory.read_u64(words) == (1 << 64) - 1


@pytest.mark.parametrize(("maxactive", "depth"), [(1, 0), (1, 5), (4, 3), (4, 4), (4, 9), (30, 20)])
def test_recursion_deeper_than_maxactive(boot: Boot, stack: str, maxactive: int, depth: int) -> None:
    kernel = boot(return_hook=stack)
    rp = Kretprobe(symbol_name="bsearch", handler=lambda *_: None, maxactive=maxactive)
    kernel.register_kretprobe(rp)
    recurse(kernel, depth)
    kept = min(maxactive, depth + 1) if stack not in PER_TASK else depth + 1
    assert (rp.returns, rp.instances_missed, rp.nmissed) == (kept, depth + 1 - kept, depth + 1 - kept)
    assert rp.hook is not None
    assert (rp.hook.active, rp.hook.high_water) == (0, kept)
    recurse(kernel, 0)
    assert rp.returns == kept + 1


def test_a_full_array_of_a_task_is_a_miss(boot: Boot) -> None:
    kernel = boot(return_hook="fgraph")
    rp = Kretprobe(symbol_name="bsearch", handler=lambda *_: None, data_size=256)
    kernel.register_kretprobe(rp)
    recurse(kernel, 20)
    assert rp.returns == 4096 // (256 + 32)
    assert accounted(rp) == 21


# Life


def test_disabled_and_enabled(kernel: Kernel) -> None:
    rp = Kretprobe(symbol_name="gcd", handler=lambda *_: None, disabled=True)
    kernel.register_kretprobe(rp)
    for expected, switch in ((0, kernel.enable_kretprobe), (1, kernel.disable_kretprobe), (1, None)):
        kernel.call("gcd", 1, 1)
        assert rp.returns == expected
        if switch is not None:
            switch(rp)
    stranger = Kretprobe(symbol_name="gcd")
    assert errno_of(lambda: kernel.enable_kretprobe(stranger)) == errno.EINVAL


def test_a_failing_handler_is_reported_and_the_call_returns(kernel: Kernel) -> None:
    def fail(_instance: KretprobeInstance, _regs: Any) -> None:
        raise ValueError("broken")

    rp = Kretprobe(symbol_name="gcd", handler=fail)
    kernel.register_kretprobe(rp)
    with pytest.raises(ValueError, match="broken"):
        kernel.call("gcd", 12, 18)
    assert (rp.returns, rp.failures) == (1, 1)
    kernel.unregister_kretprobe(rp)
    assert kernel.call("gcd", 12, 18) == 6


def test_a_return_that_nobody_knows_is_a_bug_of_the_guest(kernel: Kernel, stack: str) -> None:
    """A task that returns to a trampoline without a record of the call oopses with Linux's message.

    Other calls continue.
    """
    hooks = kernel.kretprobes.hooks
    block, another = (kernel.call("__kmalloc", 64, 0xCC0) for _ in range(2))
    rp = Kretprobe(symbol_name="kfree", handler=lambda *_: None)
    kernel.register_kretprobe(rp)
    thief = Kprobe(
        symbol_name="__slab_free",
        pre_handler=lambda *_: hooks.flush(kernel.guest.kernel.current_task()),
    )
    kernel.register_kprobe(thief)
    assert errno_of(lambda: kernel.call("kfree", block)) == errno.EFAULT
    log = "\n".join(dmesg(kernel))
    if stack == "instances":
        assert "kretprobe BUG!: Processing kretprobe 0 @ 0" in log
    else:
        assert "rethook: Return address not found! Maybe there is a bug in the kernel" in log
    assert "kernel BUG at" in log
    kernel.unregister_kprobe(thief)
    seen = rp.returns
    kernel.call("kfree", another)
    assert rp.returns == seen + 1


def test_a_call_given_up_leaves_nothing_pending(kernel: Kernel) -> None:
    """A call from the host that ends in a fault counts as flushed, because its stack is given up."""
    rp = Kretprobe(symbol_name="strlen", handler=lambda *_: None)
    kernel.register_kretprobe(rp)
    machine = kernel.machine
    with pytest.raises(Exception, match="fault"):
        machine.call(address(kernel, "strlen"), 0x5000)
    assert rp.hook is not None
    assert (rp.hook.active, rp.hook.flushed, accounted(rp)) == (0, 1, 1)
    kernel.unregister_kretprobe(rp)
    kernel.kretprobes.hooks.select_return_hook("rethook")


# The choice of the shadow stack


def test_switched_only_while_no_probe_has_a_hook(kernel: Kernel, stack: str) -> None:
    hooks = kernel.kretprobes.hooks
    rp = Kretprobe(symbol_name="gcd", disabled=True)
    kernel.register_kretprobe(rp)
    assert errno_of(lambda: hooks.select_return_hook("objpool")) == errno.EBUSY
    assert errno_of(lambda: hooks.select_return_hook("nothing")) == errno.EINVAL
    assert hooks.stack.name == stack
    kernel.unregister_kretprobe(rp)
    hooks.select_return_hook("objpool")
    kernel.register_kretprobe(rp)
    kernel.enable_kretprobe(rp)
    kernel.call("gcd", 1, 1)
    assert rp.returns == 1


def test_unknown_return_hook(boot: Boot) -> None:
    assert errno_of(lambda: boot(return_hook="nothing")) == errno.EINVAL
