"""Profiles: their switches, and how these change stepping and boosting."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import DEFAULT, PROFILES, Stepper, profile_named
from emulated_kernel.machine.unicorn_engine import Engine
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.kprobes.blacklist import is_blacklisted
from tests.kprobes.optimizer.conftest import GCD_HEAD, Probed
from tests.kprobes.test_compiled_code import traps

TRAP_FLAG = 0x100


def test_presets() -> None:
    assert profile_named(DEFAULT).preemption
    assert {name for name, profile in PROFILES.items() if profile.stepper is Stepper.TRAP_FLAG} == {
        "linux-5.10",
        "kprobes-2010",
        "optprobes-2009",
        "djprobe-2007",
        "djprobe-2007-preempt",
    }
    with pytest.raises(KernelError) as caught:
        profile_named("linux-2.4")
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize("profile", PROFILES)
def test_the_step_is_invisible(boot: Callable[[str], Probed], profile: str) -> None:
    """Handlers see neither the trap flag of the single step nor an ip in the slot."""
    probed = boot(profile)
    seen: list[tuple[str, int, int]] = []
    start = probed.address("gcd", GCD_HEAD)
    probed.probe(
        "gcd",
        GCD_HEAD,
        pre_handler=lambda _kp, regs: seen.append(("pre", regs.ip, regs.flags & TRAP_FLAG)),
        post_handler=lambda _kp, regs: seen.append(("post", regs.ip, regs.flags & TRAP_FLAG)),
    )
    probed.gcd()
    assert seen == [("pre", start + 1, 0), ("post", start + 3, 0)]


@pytest.mark.parametrize("arch", ["x86_64", "i386"])
def test_a_step_by_the_trap_flag_is_one_trap(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step by the trap flag takes one trap in addition to that of the breakpoint.

    Such a step starts no further run of the engine, with handlers in Python or in guest code.
    """
    profile = replace(PROFILES["kprobes-2010"], preemption=True)
    with Kernel(MachineConfig(arch=arch), profile=profile) as kernel:
        starts: list[int] = []
        start = Engine.start

        def counted(engine: Engine, address: int) -> int:
            starts.append(address)
            return start(engine, address)

        head = kernel.arch.call_size
        kernel.call("int_sqrt", 1)
        monkeypatch.setattr(Engine, "start", counted)
        seen: list[str] = []
        handled = Kprobe(
            symbol_name="int_sqrt",
            offset=head,
            pre_handler=lambda *_: seen.append("pre"),
            post_handler=lambda *_: seen.append("post"),
        )
        kernel.register_kprobe(handled)
        assert (traps(kernel, 9), seen) == (2, ["pre", "post"])
        kernel.unregister_kprobe(handled)
        ring = kernel.hit_ring(kernel.arch.registers.arguments[0])
        recorded = ring.probe(symbol_name="int_sqrt", offset=head)
        kernel.register_kprobe(recorded)
        kernel.call("int_sqrt", 9)
        assert (traps(kernel, 9), ring.hits, len(starts)) == (2, 2, 3)
        kernel.unregister_kprobe(recorded)


@pytest.mark.parametrize(("profile", "mode"), [(DEFAULT, "int3"), ("kprobes-2010", "boosted")])
def test_boosting(boot: Callable[[str], Probed], profile: str, mode: str) -> None:
    probed = boot(profile)
    probe = probed.probe("gcd", GCD_HEAD, disabled=True)
    kprobes = probed.kernel.kprobes
    if kprobes.optimizer is not None:
        kprobes.set_optimization(False)
    kprobes.enable_kprobe(probe)
    assert (kprobes.mode(probe), probed.gcd()) == (mode, [("gcd", GCD_HEAD)])
    head = kprobes.table.valid(probe)
    assert head is not None
    assert head.insn is not None
    assert head.insn.slot is not None
    end = probed.kernel.machine.text.current(head.insn.slot + 3, 1)
    assert end == (b"\xe9" if mode == "boosted" else b"\xcc")


def test_a_post_handler_ends_boosting(boot: Callable[[str], Probed]) -> None:
    probed = boot("kprobes-2010")
    first = probed.probe("gcd", GCD_HEAD)
    done: list[int] = []
    second = probed.probe("gcd", GCD_HEAD, post_handler=lambda _kp, regs: done.append(regs.ip))
    assert probed.kernel.kprobes.mode(first) == "int3"
    probed.gcd()
    assert done == [probed.address("gcd", GCD_HEAD + 3)]
    probed.kernel.unregister_kprobe(second)
    assert (probed.kernel.kprobes.mode(first), probed.gcd()) == ("boosted", [("gcd", GCD_HEAD)])


@pytest.mark.parametrize("profile", PROFILES)
def test_a_repeated_string_instruction(boot: Callable[[str], Probed], profile: str) -> None:
    """A repeated string instruction calls each handler once per hit, even though a step by the trap flag
    stops after each repetition.
    """
    probed = boot(profile)
    kernel = probed.kernel
    found = _find_rep(probed)
    assert found is not None, "the image has no repeated string instruction that can be probed"
    symbol, address = found
    hits: list[int] = []
    kprobe = Kprobe(
        addr=address,
        pre_handler=lambda _kp, regs: hits.append(regs.cx),
        post_handler=lambda _kp, regs: hits.append(regs.cx),
    )
    kernel.register_kprobe(kprobe)
    pages = kernel.machine.alloc_pages(4096)
    kernel.machine.memory.write(pages, b"x" * 64)
    _run_rep(kernel, address, pages)
    assert hits == [8, 0], symbol
    assert kernel.machine.memory.read(pages + 2048, 65) == b"x" * 64 + b"\0"


def _find_rep(probed: Probed) -> tuple[str, int] | None:
    image = probed.kernel.image
    for symbol in image.kallsyms.symbols:
        if not symbol.is_text or is_blacklisted(probed.kernel, symbol.address) or symbol.size > 4096:
            continue
        code = image.read(symbol.address, symbol.size)
        at = code.find(b"\xf3\x48\xa5")
        boundaries = probed.kernel.arch.instruction_boundaries(code, symbol.address)
        if at >= 0 and symbol.address + at in boundaries:
            return symbol.name, symbol.address + at
    return None


def _run_rep(kernel: Any, address: int, pages: int) -> None:
    """Run only the string instruction at `address`.

    The instruction copies 8 words from `pages` to the address 2048 bytes higher.
    """
    from emulated_kernel.machine.cpu.registers import RegisterSet

    def stop(regs: Any) -> None:
        regs.ip = machine.model.layout.host_text

    machine = kernel.machine
    behind = address + 3
    saved = machine.text.current(behind, 1)
    machine.text.poke(behind, b"\xcc")
    machine.breakpoints[behind] = stop
    machine.execute(
        RegisterSet(ip=address, sp=machine.calls.stack_top, si=pages, di=pages + 2048, cx=8, flags=0x202)
    )
    del machine.breakpoints[behind]
    machine.text.poke(behind, saved)
