"""Jprobes, which Linux had up to 4.14, and fault handlers, which Linux had up to 5.13."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.jprobe import Jprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import Profile
from emulated_kernel.machine.traps.trap import GuestFault
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.kprobes.listed import list_lines
from tests.ledger import ledger_mismatches


@pytest.fixture(params=["kprobes-2010", "optprobes-2009"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(profile=request.param)) as kernel:
        yield kernel
        assert ledger_mismatches(kernel.machine.text) == []


def mirror(kernel: Kernel, source: str) -> int:
    """Assemble a function into guest memory and return its address.

    In `source`, `{cells}` is memory for the function, and `{jprobe_return}` is what a jprobe's function must
    call at its end.
    """
    from keystone import KS_ARCH_X86, KS_MODE_32, KS_MODE_64, Ks

    assert kernel.components.engine.jprobes is not None
    text = kernel.machine.text
    at = text.alloc_text(128)
    names = {
        "cells": hex(cells(kernel)),
        "jprobe_return": hex(kernel.components.engine.jprobes.jprobe_return),
    }
    mode = KS_MODE_64 if kernel.machine.model.bits == 64 else KS_MODE_32
    code, _ = Ks(KS_ARCH_X86, mode).asm(source.format(**names), at)
    text.poke(at, bytes(code))
    return at


def cells(kernel: Kernel) -> int:
    found = kernel.image.kallsyms.lookup_name("saved_command_line") or kernel.image.kallsyms.lookup_name(
        "__log_buf"
    )
    assert found is not None
    return found


MIRROR = """
    mov rax, {cells}
    mov [rax], rdi
    mov [rax + 8], rsi
    xor edi, edi
    xor esi, esi
    mov qword ptr [rsp], 0
    mov qword ptr [rsp + 8], 0
    push rbx
    mov ebx, 77
    stc
    mov rax, {jprobe_return}
    call rax
"""
"""Assembly of a function that records its arguments and calls jprobe_return().

The function also overwrites registers, flags, and the probed function's stack.
"""


MIRROR_32 = """
    mov ecx, {cells}
    mov [ecx], eax
    mov [ecx + 4], edx
    xor eax, eax
    xor edx, edx
    mov dword ptr [esp], 0
    mov dword ptr [esp + 4], 0
    push ebx
    mov ebx, 77
    stc
    mov eax, {jprobe_return}
    call eax
"""


def noted(kernel: Kernel) -> list[int]:
    """Return the arguments that the jprobe's function recorded."""
    word = kernel.machine.memory.word_size
    return [kernel.machine.memory.read_word(cells(kernel) + at) for at in (0, word)]


def test_the_mirror_sees_the_arguments_and_spoils_nothing(kernel: Kernel) -> None:
    _check_mirror(kernel, MIRROR)


def test_on_i386() -> None:
    with Kernel(MachineConfig(arch="i386", profile="kprobes-2010")) as kernel:
        _check_mirror(kernel, MIRROR_32)


def _check_mirror(kernel: Kernel, source: str) -> None:
    jprobe = Jprobe(mirror(kernel, source), symbol_name="gcd")
    kernel.register_jprobe(jprobe)
    for a, b in ((12, 18), (35, 49)):
        assert kernel.call("gcd", a, b) == {12: 6, 35: 7}[a]
        assert noted(kernel) == [a, b]
    assert kernel.kprobes.hits.may_interrupt()
    kernel.disable_jprobe(jprobe)
    assert kernel.call("gcd", 9, 6) == 3
    assert noted(kernel) == [35, 49]
    kernel.enable_jprobe(jprobe)
    assert kernel.call("gcd", 9, 6) == 3
    assert noted(kernel) == [9, 6]
    kernel.unregister_jprobe(jprobe)
    assert kernel.machine.text.ledger == {}
    assert kernel.call("gcd", 12, 18) == 6


def test_probes_hit_by_the_mirror_are_missed(kernel: Kernel) -> None:
    """A probe that the jprobe's function hits is missed, because the hit of the jprobe lasts until
    jprobe_return.
    """
    hits: list[int] = []
    inner = Kprobe(symbol_name="int_sqrt", pre_handler=lambda _kprobe, _regs: hits.append(1))
    kernel.register_kprobe(inner)
    target = kernel.image.kallsyms.lookup_name("int_sqrt")
    source = f"mov edi, 49\nmov rax, {target:#x}\ncall rax\nmov rax, {{jprobe_return}}\njmp rax"
    kernel.register_jprobe(Jprobe(mirror(kernel, source), symbol_name="gcd"))
    assert kernel.call("gcd", 12, 18) == 6
    assert (hits, inner.nmissed) == ([], 1)
    assert kernel.call("int_sqrt", 81) == 9
    assert hits == [1]


def test_beside_kprobes(kernel: Kernel) -> None:
    """If kprobes are at the function of a jprobe, their handlers run before the jprobe's function.

    Nothing could run after jprobe_return. A second jprobe on the function is refused.
    """
    hits: list[str] = []
    probes = [
        Kprobe(symbol_name="gcd", pre_handler=lambda _kprobe, _regs, name=name: hits.append(name))
        for name in "ab"
    ]
    jprobe = Jprobe(mirror(kernel, MIRROR), symbol_name="gcd")
    kernel.register_kprobe(probes[0])
    kernel.register_jprobe(jprobe)
    kernel.register_kprobe(probes[1])
    if kernel.kprobes.optimizer is not None:
        kernel.kprobes.optimizer.work.flush()
    assert kernel.call("gcd", 12, 18) == 6
    assert hits == ["b", "a"]
    assert kernel.machine.memory.read_u64(cells(kernel)) == 12
    with pytest.raises(KernelError) as caught:
        kernel.register_jprobe(Jprobe(jprobe.entry, symbol_name="gcd"))
    assert caught.value.errno == errno.EEXIST
    kernel.unregister_jprobe(jprobe)
    assert kernel.call("gcd", 12, 18) == 6
    assert hits == ["b", "a"] * 2


def test_a_hit_that_ends_in_its_handler_is_not_the_jprobes_open_one(kernel: Kernel) -> None:
    """After a jprobe is unregistered, a pre-handler can skip the function: this ends its own hit, and no hit
    is missed.

    A hit of a jprobe, in contrast, lasts until jprobe_return.
    """
    jprobe = Jprobe(mirror(kernel, MIRROR), symbol_name="gcd")
    skips: list[bool] = []

    def skip(_kprobe: Kprobe, regs: Any) -> int:
        if not skips:
            return 0
        regs.ip = kernel.machine.memory.read_word(regs.sp)
        regs.sp += 8
        regs.ax = 5
        return 1

    probe = Kprobe(symbol_name="gcd", pre_handler=skip)
    kernel.register_kprobe(probe)
    kernel.register_jprobe(jprobe)
    assert kernel.call("gcd", 12, 18) == 6
    kernel.unregister_jprobe(jprobe)
    skips.append(True)
    for _ in range(3):
        assert kernel.call("gcd", 12, 18) == 5
        assert kernel.kprobes.hits.may_interrupt()
    assert probe.nmissed == 0


def test_arrays_are_all_or_nothing(kernel: Kernel) -> None:
    entry = mirror(kernel, MIRROR)
    jprobes = [Jprobe(entry, symbol_name=name) for name in ("gcd", "int_sqrt")]
    for bad, number in (([], errno.EINVAL), ([*jprobes, Jprobe(entry, symbol_name="none")], errno.ENOENT)):
        with pytest.raises(KernelError) as caught:
            kernel.register_jprobes(bad)
        assert caught.value.errno == number
        assert list(kernel.kprobes) == []
        assert kernel.machine.text.ledger == {}
    kernel.register_jprobes(jprobes)
    kinds = [line.split()[1:3] for line in list_lines(kernel.kprobes)]
    assert sorted(kinds) == [["j", "gcd+0x0"], ["j", "int_sqrt+0x0"]]
    kernel.unregister_jprobes(jprobes)
    assert list(kernel.kprobes) == []


def test_only_on_entries(kernel: Kernel) -> None:
    with pytest.raises(KernelError) as caught:
        kernel.register_jprobe(Jprobe(1, addr=(kernel.image.kallsyms.lookup_name("gcd") or 0) + 5))
    assert caught.value.errno == errno.EINVAL


class TestFaultHandler:
    def test_of_the_step(self, kernel: Kernel) -> None:
        """If the fault handler returns 1 for a fault of the single step, the guest continues after the
        instruction.

        If it returns 0, the guest gets the fault.
        """
        seen: list[int] = []
        answer = [1]

        def fault(_kprobe: Kprobe, regs: Any, vector: int) -> int:
            seen.append(vector)
            if answer[0]:
                regs.di, regs.ax = (kernel.image.kallsyms.lookup_name("linux_banner") or 0), 0
            return answer[0]

        # The first load of strlen faults. The post_handler prevents boosting.
        kprobe = Kprobe(
            symbol_name="strlen", offset=5, fault_handler=fault, post_handler=lambda _kprobe, _regs: None
        )
        kernel.register_kprobe(kprobe)
        assert kernel.machine.call(kprobe.address - 5, 0) > 0
        assert seen[:1] == [14]
        answer[0] = 0
        with pytest.raises(GuestFault) as caught:
            kernel.machine.call(kprobe.address - 5, 0)
        assert caught.value.trap.address == kprobe.address
        assert kernel.kprobes.hits.may_interrupt()

    @pytest.mark.parametrize("answer", [0, 1])
    def test_of_a_handler(self, kernel: Kernel, answer: int, caplog: pytest.LogCaptureFixture) -> None:
        """If a handler reads bad memory, the fault handler is called.

        If the fault handler returns 1, the failure is neither logged nor counted.
        """
        seen: list[int] = []

        def read(_kprobe: Kprobe, _regs: Any) -> None:
            kernel.machine.memory.read(0x10, 8)

        def fault(_kprobe: Kprobe, _regs: Any, vector: int) -> int:
            seen.append(vector)
            return answer

        kprobe = Kprobe(symbol_name="gcd", pre_handler=read, fault_handler=fault)
        kernel.register_kprobe(kprobe)
        address = kprobe.address
        assert kernel.machine.call(address, 12, 18) == 6
        assert (seen, kprobe.nmissed, kprobe.failures) == ([14], 1, 1 - answer)
        assert bool(caplog.records) is not bool(answer)
        caplog.clear()
        kernel.kprobes.hits.failures.take()


def test_the_default_kernel_has_neither() -> None:
    with Kernel() as kernel:
        for action in (
            lambda: kernel.register_jprobe(Jprobe(1, symbol_name="gcd")),
            lambda: kernel.register_kprobe(Kprobe(symbol_name="gcd", fault_handler=lambda *_args: 1)),
            lambda: kernel.register_kprobe(Kprobe(symbol_name="gcd", break_handler=lambda *_args: 1)),
        ):
            with pytest.raises(KernelError) as caught:
                action()
            assert caught.value.errno == errno.EOPNOTSUPP
        assert list(kernel.kprobes) == []


# In Python


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_a_handler_in_python_gets_as_many_arguments_as_it_takes(arch: str) -> None:
    """A jprobe's handler in Python gets as many arguments as it has parameters.

    On i386, arguments of bsearch after the third are on the stack.
    """
    profile = Profile("jprobes", jprobes=True)
    with Kernel(MachineConfig(arch=arch), profile=profile) as kernel:
        seen: list[tuple[int, ...]] = []

        def mirror_of_bsearch(key: int, base: int, num: int, size: int, compare: int) -> None:
            seen.append((key, base, num, size, compare))

        jprobe = Jprobe(handler=mirror_of_bsearch, symbol_name="bsearch")
        kernel.register_jprobe(jprobe)
        kernel.call("bsearch", 11, 22, 0, 44, 55)
        assert seen == [(11, 22, 0, 44, 55)]
        first: list[int] = []
        with pytest.raises(KernelError) as caught:
            kernel.register_jprobe(Jprobe(handler=first.append, symbol_name="bsearch"))
        assert caught.value.errno == errno.EEXIST
        kernel.unregister_jprobe(jprobe)
        kernel.call("bsearch", 1, 2, 0, 4, 5)
        assert len(seen) == 1
        assert kernel.machine.text.ledger == {}
