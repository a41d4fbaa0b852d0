"""Proof for fentry sites. A site's nop becomes a call of the trampoline or of guest code, and a nop again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.codegen.guest_code import CompiledCode
from emulated_kernel.kprobes.kprobe import Kprobe
from stress.exhaustion.compiled import CompiledProof, enabled
from stress.exhaustion.proof import Group, Place
from stress.exhaustion.standing import CpuState, OtherCpu
from tests.kprobes.blacklist import is_blacklisted
from tests.kprobes.optimizer.conftest import Probed


def fentry_sites(probed: Probed) -> Iterator[tuple[str, int, int]]:
    """Yield (symbol, offset, address) of every fentry site that can be probed."""
    kernel = probed.kernel
    for address in sorted(kernel.image.mcount):
        where = kernel.image.kallsyms.lookup(address)
        if where is not None and not is_blacklisted(kernel, address):
            yield where.symbol.name, where.offset, address


class SiteProof(CompiledProof):
    """Proof that checks fentry sites."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # The frame has a return address above it and flags below it.
        self.bench.frame *= 2

    def length(self, _address: int) -> int:
        """Return the size in bytes of the call at a fentry site."""
        return self.probed.kernel.arch.call_size

    def live_after(self, address: int, end: int | None) -> LiveRegisters:
        """Return the registers and flags that must have the same values after a site.

        The link register may differ.
        """
        live = super().live_after(address, end)
        return replace(live, registers=live.registers - {self.probed.kernel.arch.call_link})

    def place(self, address: int, cpus: Sequence[OtherCpu]) -> Place:
        """Return a Place for the fentry site at `address`; its run() checks all stages with `cpus`."""
        return SitePlace(self, address, cpus)


@dataclass
class SitePlace(Place):
    """One fentry site, with the CPUs that are about to enter the function."""

    proof: SiteProof
    codes: list[CompiledCode] = field(default_factory=list, init=False)

    def run(self) -> None:
        """Arm a site, compile its handler repeatedly and disarm it; check all CPUs in each step."""
        kernel, compiler = self.kernel, self.kernel.kprobes.compiler
        sites = kernel.kprobes.sites
        assert sites is not None
        self.trampoline = sites.trampoline
        self.probe = Kprobe(addr=self.address, pre_handler=self._note_hit, program=self.proof.emit)
        garbage = kernel.kprobes.garbage
        self.scheduler.occupied_of = lambda spans: spans
        self.in_jump = self._inside_jump()
        self._watched("arming", lambda: kernel.register_kprobe(self.probe))
        inside = [
            self._inside(cpu, sites.trampoline, sites.trampoline_size, "trampoline") for cpu in self.cpus
        ]
        self._all("armed", inside)
        self._all_at_once(inside)
        for stage in ("compiling", "compiling again"):
            self._watched(stage, self._compile, inside)
            self._join(inside, self.codes[-1])
            self._all(f"done {stage}", inside)
            self._watched("changing the handler", lambda: kernel.kprobes.handler_changed(self.probe), inside)
            self._all("changed", inside)
        self._watched("compiling once more", self._compile, inside)
        self._join(inside, self.codes[-1])
        self._watched("disarming", lambda: kernel.unregister_kprobe(self.probe), inside, hits=0)
        leaving = [[self._leaving(standing) for standing in group] for group in inside]
        self._all("disarmed", leaving, hits=0)
        self.scheduler.occupied_of = lambda _spans: ()
        garbage.work.flush()
        if compiler.codes:
            self._note("disarmed", "code isn't freed")

    def _all_at_once(self, inside: Group) -> None:
        """Disarm and arm the site in the same way as kprobes/enabled, which switches all sites at once.

        `inside`: states of CPUs in the trampoline.
        """
        kprobes = self.kernel.kprobes
        sites, head = kprobes.sites, kprobes.table.valid(self.probe)
        assert sites is not None
        assert head is not None
        self._watched("disarming all", lambda: sites.disarm([head]), inside, hits=0)
        self._all(
            "all disarmed", [[self._leaving(standing) for standing in group] for group in inside], hits=0
        )
        self._watched("arming all", lambda: sites.arm([head]), inside)
        self._all("all armed", inside)

    def _inside_jump(self) -> Group:
        """Return the states of CPUs that have executed a part of the nop or call. A nop causes no hit."""
        size = self.kernel.arch.call_size
        calls = self.kernel.machine.text.current(self.address, size) in self._jumps()
        return [self._after_each(cpu, size, "call" if calls else "nop", calls) for cpu in self.cpus]

    def _note_hit(self, kprobe: Kprobe, _regs: object) -> None:
        self.probed.hits.append(("site", kprobe.address))

    def _head(self) -> AggrKprobe:
        head = self.kernel.kprobes.table.valid(self.probe)
        assert head is not None
        return head

    def _compile(self) -> None:
        with enabled(self.kernel.kprobes.compiler):
            assert self.kernel.kprobes.sites is not None
            self.kernel.kprobes.sites.compile_call(self._head())
        compiled = self._head().compiled
        assert compiled is not None
        self.codes.append(compiled)

    def _join(self, inside: Group, code: CompiledCode) -> None:
        for cpu, group in zip(self.cpus, inside, strict=True):
            group.extend(self._inside(cpu, code.address, code.size, "code"))

    def _leaving(self, standing: CpuState) -> CpuState:
        in_code = any(code.contains(standing.ip) for code in self.codes)
        return standing if in_code else replace(standing, hits=0)

    def _jumps(self) -> dict[bytes, int]:
        """Return a map bytes of a possible call at the site -> destination of the call."""
        head = self.kernel.kprobes.table.get(self.address)
        compiled = None if head is None else head.compiled
        codes = {*self.codes, *([compiled] if compiled is not None else [])}
        call = self.kernel.arch.relative_call
        return {call(self.address, to): to for to in (self.trampoline, *(code.entry for code in codes))}

    def _stale(self, cpu: OtherCpu, at_start: CpuState, window: bytes) -> str | None:
        # A call is a hit even if the probe is unregistered meanwhile.
        if window.startswith(tuple(self._jumps())):
            at_start = replace(at_start, hits=1)
        return super()._stale(cpu, at_start, window)
