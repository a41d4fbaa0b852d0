"""Probes on fentry sites: the 5-byte nop becomes a call of one trampoline for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from emulated_kernel.arch.base import Arch
from emulated_kernel.kprobes.hit import HitHandling
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.slots import SlotText
from emulated_kernel.kprobes.text_poke import TextPoker


class SiteText(SlotText, Protocol):
    def original(self, va: int, size: int, /) -> bytes: ...


class FtraceSites:
    """Arms fentry sites. Mirrors: kernel/kprobes.c:arm_kprobe_ftrace, disarm_kprobe_ftrace (v6.1)."""

    def __init__(self, text: SiteText, poker: TextPoker, arch: Arch, hits: HitHandling) -> None:
        self._text = text
        self._poker = poker
        self._arch = arch
        self._hits = hits
        stub = arch.ftrace_trampoline()
        self.trampoline_size = len(stub.code)
        self.trampoline = text.alloc_text(self.trampoline_size)
        text.poke(self.trampoline, stub.code)
        hits.breakpoints[self.trampoline + stub.trap] = hits.on_call

    def arm(self, kprobe: Kprobe) -> None:
        """Let the site call the probe."""
        site = kprobe.address
        self._hits.call_from(kprobe)
        self._patch(site, self._arch.relative_call(site, self.trampoline), self._call(site))

    def disarm(self, kprobe: Kprobe) -> None:
        site = kprobe.address
        self._patch(site, self._text.original(site, self._arch.jump_size), self._skip(site))
        self._hits.forget_call(kprobe)

    def _patch(self, site: int, insn: bytes, meanwhile: Callable[[Any], None]) -> None:
        """`meanwhile` does what the new instruction does, for a CPU that meets the breakpoint."""
        breakpoints = self._hits.breakpoints
        breakpoints[site] = meanwhile
        self._poker.replace(site, insn)
        del breakpoints[site]

    def _call(self, site: int) -> Callable[[Any], None]:
        word, behind = self._arch.word_size, site + self._arch.jump_size
        memory = self._hits.memory

        def call(regs: Any) -> None:
            memory.write(regs.sp - word, behind.to_bytes(word, "little"))
            regs.sp -= word
            regs.ip = self.trampoline

        return call

    def _skip(self, site: int) -> Callable[[Any], None]:
        def skip(regs: Any) -> None:
            regs.ip = site + self._arch.jump_size

        return skip
