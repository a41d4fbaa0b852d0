"""Hits: what handlers may do and change, nested hits, handlers that raise, and oopses in probed code."""

from __future__ import annotations

import errno
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.traps.trap import BudgetExceeded, GuestFault, HardwareError
from emulated_kernel.util.errors import KernelError
from tests.kprobes.boundaries import all_boundaries
from tests.kprobes.listed import list_lines


def address(kernel: Kernel, name: str) -> int:
    found = kernel.image.kallsyms.lookup_name(name)
    assert found is not None, name
    return found


def dmesg(kernel: Kernel) -> str:
    return "\n".join(message.text for message in kernel.guest.kernel.messages())


def body(kernel: Kernel, name: str) -> list[int]:
    """Return the addresses of a function's instructions that can be probed."""
    return [b.addr for b in all_boundaries(kernel.image) if b.function == name and b.refusal is None]


# What handlers see and change


def test_registers_at_the_hit_and_behind_it(kernel: Kernel) -> None:
    seen: dict[str, tuple[int, int]] = {}
    strlen = address(kernel, "strlen")
    second = body(kernel, "strlen")[1]
    kprobe = Kprobe(
        addr=strlen,
        pre_handler=lambda _, regs: seen.update(pre=(regs.ip, regs.di)),  # type: ignore[func-returns-value]
        post_handler=lambda _, regs: seen.update(post=(regs.ip, regs.di)),
    )
    kernel.register_kprobe(kprobe)
    text = kernel.machine.alloc_pages(16)
    kernel.machine.memory.write(text, b"four\0")
    assert kernel.machine.call(strlen, text) == 4
    # Linux: the handler sees the instruction pointer after int3, which is one byte after the probe.
    assert seen == {"pre": (strlen + 1, text), "post": (second, text)}


def test_handler_changes_an_argument_and_memory(kernel: Kernel) -> None:
    memory = kernel.machine.memory
    other = kernel.machine.alloc_pages(64)
    memory.write(other, b"replaced\0")

    def replace(_kprobe: Kprobe, regs: Any) -> None:
        memory.write(other, b"REPLACED again\0")
        regs.di = other

    kernel.register_kprobe(Kprobe(symbol_name="strlen", pre_handler=replace))
    assert kernel.call("strlen", "x") == len("REPLACED again")


def test_instruction_pointer_is_heeded_only_with_a_true_result(kernel: Kernel) -> None:
    """As in Linux, a handler's change of ip is ignored unless the handler returns true, because the single
    step sets ip.
    """

    def move(_kprobe: Kprobe, regs: Any) -> None:
        regs.ip = 0

    kernel.register_kprobe(Kprobe(symbol_name="strlen", pre_handler=move))
    assert kernel.call("strlen", "abc") == 3


def test_post_handler_changes_the_result(kernel: Kernel) -> None:
    text = kernel.machine.text
    ret = next(addr for addr in body(kernel, "int_sqrt") if text.original(addr, 1) == b"\xc3")

    def double(_kprobe: Kprobe, regs: Any) -> None:
        regs.ax *= 2

    kernel.register_kprobe(Kprobe(addr=ret, post_handler=double))
    assert kernel.call("int_sqrt", 49) == 14


# Reentry


class NestedRegs(SimpleNamespace):
    """Registers of code that a handler runs, just after this code has hit a probe's breakpoint."""


def run_nested(kernel: Kernel, kprobe: Kprobe) -> NestedRegs:
    """Simulate a hit of `kprobe` in code that a handler runs: its breakpoint, then the trap at the end of its
    single step.

    Return the registers.
    """
    regs = NestedRegs(ip=kprobe.address + 1)
    kernel.machine.breakpoints[kprobe.address](regs)  # type: ignore[arg-type]
    head = kernel.kprobes.table.get(kprobe.address)
    assert head is not None
    assert head.insn is not None
    assert head.insn.slot == regs.ip
    assert head.insn.step_end is not None
    regs.ip = head.insn.step_end + 1
    kernel.machine.breakpoints[head.insn.step_end](regs)  # type: ignore[arg-type]
    return regs


def test_a_hit_within_a_handler_is_counted_as_missed(kernel: Kernel) -> None:
    handled: list[str] = []
    stepped = next(a for a in body(kernel, "vfs_read") if _has_slot(kernel, a))
    inner = [Kprobe(addr=stepped, pre_handler=lambda *_: handled.append("inner")) for _ in range(2)]  # type: ignore[func-returns-value]

    def outer_handler(_kprobe: Kprobe, _regs: Any) -> None:
        handled.append("outer")
        regs = run_nested(kernel, inner[0])
        assert regs.ip > stepped

    outer = Kprobe(symbol_name="strlen", pre_handler=outer_handler, post_handler=outer_handler)
    kernel.register_kprobes([outer, inner[0]])
    assert kernel.call("strlen", "abc") == 3
    kernel.register_kprobe(inner[1])
    assert kernel.call("strlen", "abc") == 3
    assert handled == ["outer"] * 4
    assert [probe.nmissed for probe in (outer, *inner)] == [0, 4, 2]
    assert kernel.kprobes.hits.may_interrupt()


def _has_slot(kernel: Kernel, addr: int) -> bool:
    kprobe = Kprobe(addr=addr)
    kernel.register_kprobe(kprobe)
    head = kernel.kprobes.table.valid(kprobe)
    slot = head is not None and head.insn is not None and head.insn.slot is not None
    kernel.unregister_kprobe(kprobe)
    return slot


# Handlers and the guest


def test_a_handler_cannot_call_into_the_guest_nor_change_probes(kernel: Kernel) -> None:
    errors: list[BaseException] = []
    other = Kprobe(symbol_name="vfs_read")
    mount = kernel.mount()

    def handler(kprobe: Kprobe, _regs: Any) -> None:
        attempts = (
            lambda: kernel.call("strlen", "abc"),
            lambda: kernel.register_kprobe(other),
            lambda: kernel.register_kprobes([other]),
            lambda: kernel.unregister_kprobe(kprobe),
            lambda: kernel.unregister_kprobes([kprobe]),
            lambda: kernel.disable_kprobe(kprobe),
            lambda: kernel.enable_kprobe(kprobe),
            lambda: mount.readdir("/scratch"),
            lambda: kernel.machine.call(address(kernel, "strlen"), 0),
            kernel.machine.run,
        )
        for attempt in attempts:
            try:
                attempt()
            except (KernelError, HardwareError) as error:
                errors.append(error)

    kernel.register_kprobe(Kprobe(symbol_name="strlen", pre_handler=handler))
    before = list_lines(kernel.kprobes)
    for _ in range(3):
        errors.clear()
        assert kernel.call("strlen", "abc") == 3
        assert [getattr(error, "errno", None) for error in errors] == [errno.EDEADLK] * 8 + [None] * 2
    assert list_lines(kernel.kprobes) == before
    assert "Oops" not in dmesg(kernel)


class HandlerError(Exception):
    """Error that handlers of these tests raise."""


@pytest.mark.parametrize("kind", ["pre_handler", "post_handler"])
@pytest.mark.parametrize("aggregated", [False, True])
@pytest.mark.parametrize("error", [HandlerError, KeyboardInterrupt])
def test_a_handler_that_raises(
    kernel: Kernel,
    kind: str,
    aggregated: bool,
    error: type[BaseException],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If a handler raises, the guest continues as if the handler had returned 0.

    The Python caller gets the exception after the call.
    """
    others: list[str] = []

    def fail(*_: object) -> None:
        raise error

    def count(*_: object) -> None:
        others.append(kind)

    bad = Kprobe(symbol_name="strlen", **{kind: fail})  # type: ignore[arg-type]
    good = Kprobe(symbol_name="strlen", pre_handler=count, post_handler=count)
    probes = [good, bad] if aggregated else [bad]
    kernel.register_kprobes(probes)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with pytest.raises(error):
                kernel.call("strlen", "abc")
            assert kernel.kprobes.hits.may_interrupt()
    assert len(caplog.records) == 1, "only the first failure of a probe is logged"
    assert caplog.records[0].exc_info is not None
    assert bad.failures == 3
    assert len(others) == (6 if aggregated else 0)
    kernel.unregister_kprobe(bad)
    assert kernel.call("strlen", "abc") == 3
    assert "Oops" not in dmesg(kernel)


def test_a_failure_belongs_to_the_call_it_came_in(kernel: Kernel, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise HandlerError

    kprobe = Kprobe(symbol_name="strlen", pre_handler=fail)
    kernel.register_kprobe(kprobe)
    strlen = address(kernel, "strlen")
    with caplog.at_level(logging.CRITICAL, "emulated_kernel.kprobes.hit.handling"):
        assert kernel.machine.call(strlen, kernel.machine.alloc_pages(16)) == 0
        assert kernel.call("int_sqrt", 81) == 9
        with pytest.raises(HandlerError) as caught:
            kernel.call("strlen", 0)
    assert isinstance(caught.value.__context__, KernelError), "the oops of the call isn't hidden"


# Faults in probed code


def test_oops_in_a_stepped_instruction(kernel: Kernel) -> None:
    """An oops in a stepped copy names the original instruction.

    The task dies in the middle of the hit, and later hits are not missed.
    """
    probes = [Kprobe(addr=addr, post_handler=lambda *_: None) for addr in body(kernel, "strlen")]
    kernel.register_kprobes(probes)
    for _ in range(3):
        with pytest.raises(KernelError) as caught:
            kernel.call("strlen", 0)
        assert caught.value.errno == errno.EFAULT
        assert kernel.kprobes.hits.may_interrupt()
        assert kernel.call("strlen", "abc") == 3
    log = dmesg(kernel)
    assert log.count("Oops") == 3
    assert "RIP: 0010:strlen+0x" in log
    assert all(probe.nmissed == 0 for probe in probes)


def test_a_handler_that_makes_the_instruction_fault(kernel: Kernel) -> None:
    spoilt: list[int] = []

    def spoil(_kprobe: Kprobe, regs: Any) -> None:
        # Only the first time, because printing the oops also calls strlen.
        if not spoilt:
            spoilt.append(regs.di)
            regs.di = 0x1000

    kprobe = Kprobe(symbol_name="strlen", pre_handler=spoil)
    kernel.register_kprobe(kprobe)
    with pytest.raises(KernelError):
        kernel.call("strlen", "abc")
    assert kernel.call("strlen", "abc") == 3


def test_an_oops_while_an_oops_is_reported(kernel: Kernel) -> None:
    """If the report of an oops causes a second oops, both are reported and the task dies.

    The next task that faults is reported as well.
    """
    spoilt: list[int] = []

    def spoil(_kprobe: Kprobe, regs: Any) -> int:
        if spoilt:
            return 0
        spoilt.append(regs.ip)
        regs.ip = 0
        return 1

    kernel.register_kprobe(Kprobe(symbol_name="kallsyms_lookup", pre_handler=spoil))
    for oopses in (2, 3):
        with pytest.raises(KernelError):
            kernel.call("strlen", 0)
        log = dmesg(kernel)
        assert f"[#{oopses}]" in log
        assert f"[#{oopses + 1}]" not in log
        assert kernel.call("strlen", "abc") == 3


def test_emulated_push_on_a_bad_stack_faults_in_its_caller(kernel: Kernel) -> None:
    """If a probed call instruction faults at its push to a bad stack, the trap is the same as without a
    probe.
    """
    machine = kernel.machine
    call = next(
        b.addr
        for b in all_boundaries(kernel.image)
        if b.refusal is None and machine.text.original(b.addr, 1) == b"\xe8"
    )
    kernel.register_kprobe(Kprobe(addr=call))
    stack = machine.memory.find(machine.calls.stack_top)
    assert stack is not None
    start = machine.regs.snapshot()._replace(ip=call, sp=stack.start)
    trap, end = machine.trap_of(start)
    assert (trap.address, trap.vector, trap.error_code, trap.cr2) == (call, 14, 2, stack.start - 8)
    assert end.sp == stack.start
    assert kernel.kprobes.hits.may_interrupt()


def test_a_call_given_up_in_the_middle_of_a_hit(kernel: Kernel) -> None:
    """A call may exceed its budget in the middle of a hit.

    Afterwards calls work, and no hit counts as missed.
    """
    probes = [Kprobe(addr=addr) for addr in body(kernel, "crc32_le")]
    kernel.register_kprobes(probes)
    page = kernel.machine.alloc_pages(16)
    kernel.machine.run_budget = 0.05
    for _ in range(2):
        with pytest.raises((BudgetExceeded, GuestFault)):
            kernel.machine.call(address(kernel, "crc32_le"), 0, page, (1 << 64) - 1)
        assert kernel.kprobes.hits.may_interrupt()
    kernel.machine.call(address(kernel, "crc32_le"), 0, page, 16)
    assert all(probe.nmissed == 0 for probe in probes)


def test_a_hit_that_is_abandoned_within_its_handler(kernel: Kernel) -> None:
    """If a handler abandons the hits of its CPU, the end of the current hit finds no probe to leave.

    The probed function continues without an error.
    """
    ctlblk = kernel.kprobes.hits.ctlblk
    probe = Kprobe(symbol_name="gcd", pre_handler=lambda _kprobe, _regs: ctlblk.abandon())
    behind = Kprobe(symbol_name="gcd", offset=body(kernel, "gcd")[1] - address(kernel, "gcd"))
    behind.post_handler = lambda _kprobe, _regs, *_flags: ctlblk.abandon()
    kernel.register_kprobes([probe, behind])
    assert [kernel.call("gcd", 12, 18) for _ in range(2)] == [6, 6]
    assert (probe.nmissed, behind.nmissed, ctlblk.running) == (0, 0, None)


def test_post_handlers_that_take_flags_get_none_set(kernel: Kernel) -> None:
    """Post-handlers with a parameter `flags` get 0, whether or not another probe is at the place.

    Mirrors: kprobe_post_process (v6.1).
    """
    seen: list[tuple[object, ...]] = []

    class Owner:
        def after(self, kprobe: Kprobe, _regs: object, flags: int) -> None:
            seen.append((kprobe.symbol_name, flags))

    def two(_kprobe: Kprobe, _regs: object, calls: list[tuple[object, ...]] = seen) -> None:
        calls.append(("two",))

    three = Kprobe(symbol_name="int_sqrt", post_handler=Owner().after)
    other = Kprobe(symbol_name="int_sqrt", post_handler=two)
    kernel.register_kprobe(three)
    kernel.call("int_sqrt", 4)
    kernel.register_kprobe(other)
    kernel.call("int_sqrt", 9)
    assert seen == [("int_sqrt", 0), ("two",), ("int_sqrt", 0)]
    kernel.unregister_kprobes([three, other])
