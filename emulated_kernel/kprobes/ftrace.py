"""Fentry sites: the nop becomes a call of one trampoline, for probes, fprobes and tracers together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from emulated_kernel.arch.base import Arch
from emulated_kernel.kprobes.handlers.compiler import Compiler
from emulated_kernel.kprobes.hit import HitHandling
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.split_jumps import SplitJumps
from emulated_kernel.lock import ControlLock
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.text.text_poke import TextPoker

Tracer = Callable[[Any], None]
Tracers = tuple[Tracer, ...]


class FtraceSites:
    """Arms fentry sites. Mirrors: kernel/kprobes.c:arm_kprobe_ftrace, disarm_kprobe_ftrace (v6.1)."""

    def __init__(
        self,
        machine: ProbedMachine,
        arch: Arch,
        hits: HitHandling,
        compiler: Compiler,
        poker: TextPoker,
        split_jumps: SplitJumps,
        lock: ControlLock,
    ) -> None:
        self._lock = lock
        text = machine.text
        self._text = text
        self._memory = machine.memory
        self._breakpoints = machine.breakpoints
        self._arch = arch
        self._hits = hits
        self._compiler = compiler
        self._poker = poker
        self._split_jumps = split_jumps
        stub = arch.ftrace_trampoline()
        self.trampoline_size = len(stub.code)
        self.trampoline = text.alloc_text(self.trampoline_size)
        """Address of what armed sites call."""
        text.poke(self.trampoline, stub.code)
        self.return_at = self.trampoline + self.trampoline_size - arch.return_size
        """Address of a return instruction, at which compiled handlers go on."""
        self._calls: dict[int, Callable[[Any], object]] = {}
        """What a call does, by the address behind its site: tracers, then the probe."""
        self._breakpoints[self.trampoline + stub.trap] = self._make_on_call()
        self._callers: dict[int, Kprobe] = {}
        """Site to the probe that its calls go to."""
        self._probed: set[int] = set()
        """Sites of armed probes."""
        self._calling: dict[int, int] = {}
        """By site that holds a call now, the call's target."""
        self._added: dict[int, Tracers] = {}
        self._traced: dict[int, Tracers] = {}
        self._code: dict[Tracer, int] = {}
        """By tracer, the code that sites call instead of the trampoline where it is the only user."""

    # What a call does

    def _make_on_call(self) -> Callable[[Any], None]:
        """In the trampoline: the saved ip is behind the site, and is where it returns to."""
        find, frame_at = self._calls.get, self._hits.frame_at

        def call(regs: Any) -> None:
            frame = frame_at(regs.sp)
            hit = find(frame.ip)
            if hit is not None:
                hit(frame)

        return call

    def install(self, kprobe: Kprobe) -> None:
        """What the probe does at a call has changed, if it is armed."""
        if kprobe.address in self._callers:
            self._callers[kprobe.address] = kprobe
            self._route(kprobe.address, self._tracers(kprobe.address))

    def _route(self, site: int, tracers: Tracers) -> None:
        """Let calls from a site go to these tracers, then to its probe."""
        behind, kprobe = site + self._arch.call_size, self._callers.get(site)
        if kprobe is not None and not tracers:
            self._calls[behind] = partial(self._first_by_call, kprobe, behind)
        elif kprobe is not None:
            # Compiled handlers, which the site calls by itself, would hide the calls from the tracers.
            self.drop_code(kprobe)
            self._calls[behind] = _each(*tracers, partial(self._hits.on_call, kprobe, behind))
        elif tracers:
            self._calls[behind] = _each(*tracers)
        else:
            self._calls.pop(behind, None)

    def _first_by_call(self, kprobe: Kprobe, behind: int, frame: Any) -> None:
        """The first hit since the handlers have changed; they become guest code, if they can be."""
        if not kprobe.may_compile or kprobe.is_disabled:
            self._calls[behind] = partial(self._hits.on_call, kprobe, behind)
            self._hits.on_call(kprobe, behind, frame)
            return
        route = self._calls[behind]
        if (
            self._hits.on_call(kprobe, behind, frame)
            and self._calls.get(behind) is route
            and kprobe.compiled is None
            and self._split_jumps.may_patch()
        ):
            self._compiler.keep_sample(kprobe, frame)
            self.compile_call(kprobe)

    def compile_call(self, kprobe: Kprobe) -> None:
        """From the next hit on the site calls the handlers themselves, if they can be guest code."""
        code = kprobe.compiled = self._compiler.call(kprobe, self.return_at)
        kprobe.is_python = code is None
        if code is not None:
            self._redirect(kprobe.address, code.entry)

    def drop_code(self, kprobe: Kprobe) -> None:
        """Let Python take the hits again, until the next one: what the handlers do has changed."""
        kprobe.is_python = False
        code, kprobe.compiled = kprobe.compiled, None
        if code is not None:
            if kprobe.address in self._callers:
                self._redirect(kprobe.address, self.trampoline)
            self._compiler.retire(code)

    # Probes

    def arm(self, kprobe: Kprobe) -> None:
        """Let the site call the probe."""
        site = kprobe.address
        self._callers[site] = kprobe
        self._probed.add(site)
        self._route(site, self._tracers(site))
        if self._calling.get(site) != self.trampoline:
            self._redirect(site, self.trampoline)

    def disarm(self, kprobe: Kprobe) -> None:
        """Let the site call tracers alone, or be nops again."""
        site = kprobe.address
        self._probed.discard(site)
        if not self._is_wanted(site):
            self._calling.pop(site, None)
            self._patch(site, self._text.original(site, self._arch.call_size), self._skip(site))
        self._forget(kprobe)
        if self._is_wanted(site):
            self._update([site])

    def _forget(self, kprobe: Kprobe) -> None:
        """The text has stopped to call the probe."""
        site = kprobe.address
        self._callers.pop(site, None)
        self._route(site, self._tracers(site))
        self.drop_code(kprobe)

    def arm_all(self, kprobes: Sequence[Kprobe]) -> None:
        """`arm` for many probes at once."""
        for kprobe in kprobes:
            self._callers[kprobe.address] = kprobe
            self._probed.add(kprobe.address)
        self._update([kprobe.address for kprobe in kprobes])

    def disarm_all(self, kprobes: Sequence[Kprobe]) -> None:
        """`disarm` for many probes at once."""
        for kprobe in kprobes:
            self._probed.discard(kprobe.address)
        self._update([kprobe.address for kprobe in kprobes])
        for kprobe in kprobes:
            self._forget(kprobe)

    # Tracers

    def add(self, sites: Iterable[int], tracer: Tracer) -> None:
        """Let the sites call a tracer too, newest first and before their probes; not while the guest runs.

        It gets the saved registers, ip behind the site. Mirrors: register_ftrace_function (v6.1).
        """
        self._lock.assert_held()
        sites = list(sites)
        for site in sites:
            self._added[site] = (tracer, *self._added.get(site, ()))
        self._update(sites)

    def remove(self, sites: Iterable[int], tracer: Tracer) -> None:
        """Take back what `add` did. Mirrors: unregister_ftrace_function (v6.1)."""
        self._lock.assert_held()
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
        self._lock.assert_held()
        before, self._traced = self._traced, dict(wanted)
        self._update(before.keys() | wanted.keys())

    def users(self) -> Mapping[int, tuple[int, Kprobe | None]]:
        """Of each site that calls: how many want it to, and the probe among them."""
        probes = {site: self._callers[site] if site in self._probed else None for site in self._calling}
        return {
            site: (len(self._tracers(site)) + (probe is not None), probe) for site, probe in probes.items()
        }

    def _tracers(self, site: int) -> Tracers:
        return (*self._added.get(site, ()), *self._traced.get(site, ()))

    def _target(self, site: int) -> int:
        """Target of a site's call, a probe's own code left aside."""
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
            self._route(site, self._tracers(site))
        targets = {site: self._target(site) for site in calls}
        changed = {site: target for site, target in targets.items() if self._calling.get(site) != target}
        stopping = stops & self._calling.keys()
        self._start_and_stop(changed, stopping)
        self._calling.update(changed)
        for site in stopping:
            del self._calling[site]
        for site in stops:
            self._route(site, ())

    def _start_and_stop(self, starting: Mapping[int, int], stopping: set[int]) -> None:
        breakpoints = self._breakpoints
        insns = {site: self._arch.relative_call(site, target) for site, target in starting.items()}
        breakpoints.update({site: self._call(site, target) for site, target in starting.items()})
        for site in stopping:
            insns[site] = self._text.original(site, self._arch.call_size)
            breakpoints[site] = self._skip(site)
        self._poker.replace_all(insns)
        for site in insns:
            del breakpoints[site]

    def _redirect(self, site: int, target: int) -> None:
        """Let the site call a compiled handler, or the trampoline."""
        self._calling[site] = target
        self._patch(site, self._arch.relative_call(site, target), self._call(site, target))

    def _patch(self, site: int, insn: bytes, meanwhile: Callable[[Any], None]) -> None:
        """`meanwhile` does what the new instruction does, for a CPU that meets the breakpoint."""
        breakpoints = self._breakpoints
        breakpoints[site] = meanwhile
        self._poker.replace(site, insn)
        del breakpoints[site]

    def _call(self, site: int, target: int) -> Callable[[Any], None]:
        word, behind = self._arch.word_size, site + self._arch.call_size
        memory, link = self._memory, self._arch.call_link

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


def _each(*calls: Callable[[Any], object]) -> Callable[[Any], None]:
    """In this order, for the last one may send the task elsewhere."""

    def call(frame: Any) -> None:
        for handle in calls:
            handle(frame)

    return call
