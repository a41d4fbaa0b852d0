"""Fentry sites: the nop becomes a call of one trampoline, for probes, fprobes and tracers together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from emulated_kernel.arch.base import Arch
from emulated_kernel.kprobes.hit import HitHandling
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.slots import SlotText
from emulated_kernel.kprobes.text_poke import TextPoker

Tracer = Callable[[Any], None]
Tracers = tuple[Tracer, ...]


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
        self._calling: dict[int, int] = {}
        """Sites that hold a call now, and where it leads."""
        self._probed: set[int] = set()
        """Sites of armed probes."""
        self._added: dict[int, Tracers] = {}
        self._traced: dict[int, Tracers] = {}
        self._code: dict[Tracer, int] = {}
        """What sites call instead of the trampoline where nobody but this tracer wants them to."""
        hits.return_at = self.trampoline + self.trampoline_size - arch.return_size
        hits.redirect_call = self._redirect

    def arm(self, kprobe: Kprobe) -> None:
        """Let the site call the probe."""
        site = kprobe.address
        self._hits.call_from(kprobe)
        self._probed.add(site)
        if self._calling.get(site) != self.trampoline:
            self._redirect(kprobe, None)

    def _redirect(self, kprobe: Kprobe, entry: int | None) -> None:
        """Let the site call a compiled handler, or the trampoline."""
        site, target = kprobe.address, self.trampoline if entry is None else entry
        self._calling[site] = target
        self._patch(site, self._arch.relative_call(site, target), self._call(site, target))

    def disarm(self, kprobe: Kprobe) -> None:
        site = kprobe.address
        self._probed.discard(site)
        if not self._is_wanted(site):
            self._calling.pop(site, None)
            self._patch(site, self._text.original(site, self._arch.call_size), self._skip(site))
        self._hits.forget_call(kprobe)
        self._hits.drop_code(kprobe)
        if self._is_wanted(site):
            self._update([site])

    def arm_all(self, kprobes: Sequence[Kprobe]) -> None:
        """`arm` for many probes at once."""
        for kprobe in kprobes:
            self._hits.call_from(kprobe)
            self._probed.add(kprobe.address)
        self._update([kprobe.address for kprobe in kprobes])

    def disarm_all(self, kprobes: Sequence[Kprobe]) -> None:
        """`disarm` for many probes at once."""
        for kprobe in kprobes:
            self._probed.discard(kprobe.address)
        self._update([kprobe.address for kprobe in kprobes])
        for kprobe in kprobes:
            self._hits.forget_call(kprobe)
            self._hits.drop_code(kprobe)

    def add(self, sites: Iterable[int], tracer: Tracer) -> None:
        """Let the sites call a tracer too, newest first and before their probes; not while the guest runs.

        It gets the saved registers, ip behind the site. Mirrors: register_ftrace_function (v6.1).
        """
        sites = list(sites)
        for site in sites:
            self._added[site] = (tracer, *self._added.get(site, ()))
        self._update(sites)

    def remove(self, sites: Iterable[int], tracer: Tracer) -> None:
        """Take back what `add` did. Mirrors: unregister_ftrace_function (v6.1)."""
        sites = list(sites)
        for site in sites:
            left = tuple(other for other in self._added.pop(site) if other is not tracer)
            if left:
                self._added[site] = left
        self._update(sites)

    def set_code(self, tracer: Tracer, entry: int | None) -> None:
        """Sites call guest code that does what an added tracer does; or no longer."""
        if entry is None:
            self._code.pop(tracer, None)
        else:
            self._code[tracer] = entry
        self._update([site for site, tracers in self._added.items() if tracer in tracers])

    def set_traced(self, wanted: Mapping[int, Tracers]) -> None:
        """Let exactly these sites call these tracers, beside what was added; not while the guest runs.

        Mirrors: kernel/trace/ftrace.c:ftrace_run_update_code (v6.1).
        """
        before, self._traced = self._traced, dict(wanted)
        self._update(before.keys() | wanted.keys())

    def users(self) -> Mapping[int, tuple[int, bool]]:
        """Of each site that calls: how many want it to, and whether a probe is among them."""
        return {
            site: (len(self._tracers(site)) + (site in self._probed), site in self._probed)
            for site in self._calling
        }

    def _tracers(self, site: int) -> Tracers:
        return (*self._added.get(site, ()), *self._traced.get(site, ()))

    def _target(self, site: int) -> int:
        """Where a site's call is to lead, but for a probe's own code."""
        if not self._code or site in self._probed:
            return self.trampoline
        tracers = self._tracers(site)
        if len(tracers) != 1:
            return self.trampoline
        return self._code.get(tracers[0], self.trampoline)

    def _is_wanted(self, site: int) -> bool:
        return site in self._probed or site in self._added or site in self._traced

    def _update(self, sites: Iterable[int]) -> None:
        """Tracers are known before the text calls them, and until it has stopped."""
        calls = {site for site in sites if self._is_wanted(site)}
        stops = set(sites) - calls
        for site in calls:
            self._hits.trace_call(site, self._tracers(site))
        targets = {site: self._target(site) for site in calls}
        changed = {site: target for site, target in targets.items() if self._calling.get(site) != target}
        stopping = stops & self._calling.keys()
        self._start_and_stop(changed, stopping)
        self._calling.update(changed)
        for site in stopping:
            del self._calling[site]
        for site in stops:
            self._hits.trace_call(site, ())

    def _start_and_stop(self, starting: Mapping[int, int], stopping: set[int]) -> None:
        breakpoints = self._hits.breakpoints
        insns = {site: self._arch.relative_call(site, target) for site, target in starting.items()}
        breakpoints.update({site: self._call(site, target) for site, target in starting.items()})
        for site in stopping:
            insns[site] = self._text.original(site, self._arch.call_size)
            breakpoints[site] = self._skip(site)
        self._poker.replace_all(insns)
        for site in insns:
            del breakpoints[site]

    def _patch(self, site: int, insn: bytes, meanwhile: Callable[[Any], None]) -> None:
        """`meanwhile` does what the new instruction does, for a CPU that meets the breakpoint."""
        breakpoints = self._hits.breakpoints
        breakpoints[site] = meanwhile
        self._poker.replace(site, insn)
        del breakpoints[site]

    def _call(self, site: int, target: int) -> Callable[[Any], None]:
        word, behind = self._arch.word_size, site + self._arch.call_size
        memory, link = self._hits.memory, self._arch.call_link

        def push_and_go(regs: Any) -> None:
            memory.write(regs.sp - word, behind.to_bytes(word, "little"))
            regs.sp -= word
            regs.ip = target

        def link_and_go(regs: Any) -> None:
            assert link is not None
            setattr(regs, link, behind)
            regs.ip = target

        return push_and_go if link is None else link_and_go

    def _skip(self, site: int) -> Callable[[Any], None]:
        def skip(regs: Any) -> None:
            regs.ip = site + self._arch.call_size

        return skip
