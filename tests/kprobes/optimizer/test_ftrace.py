"""Probes on fentry sites: the function itself calls the handlers, and its text has no breakpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emulated_kernel.kprobes.kprobe import Kprobe
from tests.kprobes.optimizer.conftest import Probed

NOP5 = bytes.fromhex("0f1f440000")


def test_call_and_nop(probed: Probed) -> None:
    assert probed.text("gcd", 0) == NOP5
    probe = probed.probe("gcd")
    assert probed.text("gcd", 0)[0] == 0xE8
    assert probed.kernel.kprobes.mode(probe) == "ftrace"
    assert probed.flags() == {"gcd+0x0": "[FTRACE]"}
    assert probed.gcd() == [("gcd", 0)]
    probed.kernel.unregister_kprobe(probe)
    assert (probed.text("gcd", 0), probed.gcd()) == (NOP5, [])


def test_registers_are_those_of_the_entry(probed: Probed) -> None:
    """At a hit of an fentry site, ip is one byte after the start of the site, as after a breakpoint. orig_ax
    is 0, as ftrace leaves it.
    """
    seen: list[dict[str, int]] = []

    def look(_kprobe: Kprobe, regs: Any) -> None:
        names = ("ip", "di", "si", "sp", "cs", "ss", "orig_ax", "flags")
        seen.append({name: getattr(regs, name) for name in names})

    probed.probe("gcd", pre_handler=look)
    probed.gcd()
    (regs,) = seen
    assert regs["ip"] == probed.address("gcd", 1)
    assert (regs["di"], regs["si"], regs["cs"], regs["ss"], regs["orig_ax"]) == (12, 18, 0x10, 0x18, 0)
    assert regs["sp"] == probed.kernel.machine.calls.stack_top
    assert regs["flags"] & 2


def test_handlers_change_arguments_and_the_way_on(probed: Probed) -> None:
    machine = probed.kernel.machine
    ret = probed.text("gcd", 0, 256).index(b"\xc3")

    def change(_kprobe: Kprobe, regs: Any) -> None:
        regs.di, regs.si = 35, 49

    def leave(_kprobe: Kprobe, regs: Any) -> int:
        regs.ax, regs.ip = 77, probed.address("gcd", ret)
        return 1

    changing = probed.probe("gcd", pre_handler=change)
    assert machine.call(probed.address("gcd"), 1, 1) == 7
    probed.kernel.unregister_kprobe(changing)
    probed.probe("gcd", pre_handler=leave)
    assert machine.call(probed.address("gcd"), 1, 1) == 77


def test_post_handler(probed: Probed) -> None:
    """On an fentry site, a post-handler runs directly after the pre-handler.

    The post-handler's ip is after the nop, as if the nop had been stepped.
    """
    order: list[tuple[str, int]] = []
    probe = probed.probe(
        "gcd",
        pre_handler=lambda _kp, regs: order.append(("pre", regs.ip)),
        post_handler=lambda _kp, regs: order.append(("post", regs.ip)),
    )
    probed.gcd()
    start = probe.address
    assert order == [("pre", start + 1), ("post", start + 5)]


def test_aggregate(probed: Probed) -> None:
    order: list[str] = []
    probes = [
        probed.probe("gcd", pre_handler=lambda _kp, _regs, name=name: order.append(name)) for name in "abc"
    ]
    probed.gcd()
    assert order == ["c", "b", "a"]
    probed.kernel.disable_kprobe(probes[1])
    assert probed.flags() == {"gcd+0x0": "[FTRACE],[DISABLED][FTRACE],[FTRACE]"}
    order.clear()
    probed.gcd()
    assert order == ["c", "a"]
    for probe in probes:
        probed.kernel.disable_kprobe(probe)
    assert probed.text("gcd", 0) == NOP5
    probed.kernel.enable_kprobe(probes[1])
    order.clear()
    probed.gcd()
    assert order == ["b"]
    probed.kernel.unregister_kprobe(probes[1])
    assert probed.text("gcd", 0) == NOP5


def test_all_disarmed(probed: Probed) -> None:
    probed.probe("gcd")
    probed.kernel.kprobes.set_enabled(False)
    assert (probed.text("gcd", 0), probed.gcd(), probed.flags()) == (NOP5, [], {"gcd+0x0": "[FTRACE]"})
    probed.kernel.kprobes.set_enabled(True)
    assert probed.gcd() == [("gcd", 0)]


def test_a_hit_in_a_handler_is_missed(probed: Probed) -> None:
    """While a CPU is in a handler, a hit of an fentry site counts as missed, and the function continues."""
    probe = probed.probe("gcd")
    hits = probed.kernel.kprobes.hits
    hits.ctlblk.set_running(probe)
    assert (probed.gcd(), probe.nmissed) == ([], 1)
    hits.ctlblk.set_running(None)
    assert (probed.gcd(), probe.nmissed) == ([("gcd", 0)], 1)


def test_without_ftrace_a_site_is_a_nop(boot: Callable[[str], Probed]) -> None:
    """Without ftrace, a probe on an fentry site first writes a breakpoint and is then jump-optimized, as on
    any other instruction.
    """
    probed = boot("optprobes-2009")
    probe = probed.probe("gcd")
    assert (probed.flags(), probed.text("gcd", 0, 1)) == ({"gcd+0x0": "[OPTIMIZED]"}, b"\xcc")
    assert probed.gcd() == [("gcd", 0)]
    probed.settle()
    assert (probed.text("gcd", 0, 1), probed.gcd()) == (b"\xe9", [("gcd", 0)])
    assert probed.kernel.kprobes.mode(probe) == "optimized"
