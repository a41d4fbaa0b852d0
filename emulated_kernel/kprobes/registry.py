"""Kprobes: registration, enabling and arming of probes, in Linux's order of checks."""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from emulated_kernel.abi import GuestAddr
from emulated_kernel.arch.analysed import AnalysedImage
from emulated_kernel.arch.base import Arch
from emulated_kernel.errors import KernelError
from emulated_kernel.kprobes import listing, report
from emulated_kernel.kprobes.arming import ArmedText, Arming, Breakpoints
from emulated_kernel.kprobes.batch import register_all
from emulated_kernel.kprobes.compiled import Compiler
from emulated_kernel.kprobes.djprobe import Djprobes
from emulated_kernel.kprobes.ftrace import FtraceSites
from emulated_kernel.kprobes.garbage import TextGarbage
from emulated_kernel.kprobes.gone import GoneCode
from emulated_kernel.kprobes.hit import HitHandling, HitMachine
from emulated_kernel.kprobes.jprobe import Jprobes
from emulated_kernel.kprobes.kprobe import AggregatorProbe, DetourBuffer, Kprobe, KprobeFlag
from emulated_kernel.kprobes.optimizer import OptimizedText, Optimizer
from emulated_kernel.kprobes.out_of_line import Copies
from emulated_kernel.kprobes.profile import DEFAULT, PROFILES, Profile, Saving
from emulated_kernel.kprobes.table import ProbeTable
from emulated_kernel.kprobes.text_poke import TextPoker


class ProbedText(ArmedText, OptimizedText, Protocol):
    """What the registry needs of the machine's text."""


class ProbedMachine(HitMachine, Protocol):
    @property
    def text(self) -> ProbedText: ...

    def stands(self) -> Sequence[tuple[int, int]]: ...


class ProbedImage(AnalysedImage, Protocol):
    """The tables of the kernel binary that decide what can be probed."""

    @property
    def blacklist(self) -> Sequence[tuple[int, int, str]]: ...

    @property
    def bugs(self) -> Iterable[int]: ...


class Kprobes:
    """All probes of one kernel. Callers hold the kernel's control lock.

    Mirrors: kernel/kprobes.c (v6.1).
    """

    def __init__(
        self,
        machine: ProbedMachine,
        image: ProbedImage,
        arch: Arch,
        log: Callable[[str], None],
        profile: Profile = PROFILES[DEFAULT],
    ) -> None:
        self.profile = profile
        self._image = image
        self._symbols = image.kallsyms
        self._log = log
        self._bits = arch.bits
        self._jump_size, self._call_size = arch.jump_size, arch.call_size
        self._table = ProbeTable(arch.bits)
        self._read_tables()
        self._build(machine, image, arch)

    def _read_tables(self) -> None:
        image = self._image
        self._text_ranges = sorted(image.text_ranges)
        self.blacklist = tuple(image.blacklist)
        self._blacklist_sorted = sorted(self.blacklist)
        self._bugs = frozenset(image.bugs)
        self._jump_labels = frozenset(
            code + offset for code, *_ in image.jump_labels for offset in range(self._jump_size)
        )
        self._traceable = frozenset(image.mcount)
        self._fentry = self._traceable if self.profile.ftrace else frozenset()

    def _build(self, machine: ProbedMachine, image: ProbedImage, arch: Arch) -> None:
        """The parts of the engine that the profile asks for."""
        text, profile = machine.text, self.profile
        self.poker = TextPoker(text, arch.breakpoint)
        rules = arch.optimization_rules(image, ftrace=profile.ftrace)
        live_at = rules.live_at if profile.saving is Saving.LIVENESS else None
        self.garbage = TextGarbage()
        self.compiler = Compiler(text, arch, machine.breakpoints, live_at, self.garbage)
        self.compiler.enabled = profile.compiled
        self.hits = HitHandling(machine, arch, profile, self.compiler)
        self.hits.is_patching = lambda: self.poker.is_busy
        if arch.call_link is not None:
            self.hits.is_in_jump = self._is_in_jump
            self.hits.is_patching = lambda: self.poker.is_busy or self._any_in_jump(machine)
        self.hits.redirect = lambda head, jump: self.poker.replace(head.address, jump)
        self._copies = Copies(text, image, arch, self.hits, profile, self.garbage)
        self.slots = self._copies.slots
        breakpoints = Breakpoints(text, arch, self.poker)
        self.optimizer: Optimizer | None = None
        if profile.optimizer and (profile.out_of_tree or not arch.optprobes_out_of_tree):
            kind = Optimizer
            if profile.djprobe is not None:
                kind, rules = Djprobes, arch.djprobe_rules(image)
            self.optimizer = kind(
                self._table,
                rules,
                arch,
                text,
                self.poker,
                self.hits,
                breakpoints.clear,
                self._copies.release,
                self.garbage,
            )
        self.jprobes = Jprobes(self, machine, arch) if profile.jprobes else None
        self.sites = sites = FtraceSites(text, self.poker, arch, self.hits) if profile.ftrace else None
        self.trampoline = None if sites is None else (sites.trampoline, sites.trampoline_size)
        """Address and size in bytes of what armed fentry sites call."""
        self._arming = Arming(self._table, breakpoints, sites, self.optimizer, self._log)
        self._gone = GoneCode(self._table, self._arming, self._copies, self.optimizer)

    def _any_in_jump(self, machine: ProbedMachine) -> bool:
        """Whether a CPU is to go on with the rest of a jump: within a hit nobody can let it do that first."""
        return any(self._is_in_jump(ip) for ip, _ in machine.stands())

    def _is_in_jump(self, ip: int) -> bool:
        """Of an optimized probe, or in an fentry site, be there a call or nops."""
        for start in range(ip - self._call_size + 1, ip):
            head = self._table.get(start)
            if start in self._fentry or (isinstance(head, AggregatorProbe) and head.is_optimized):
                return True
        return False

    def tables_changed(self) -> None:
        """A module came or went: look at the image's tables again."""
        self._read_tables()
        self._copies.read_tables()
        if self.optimizer is not None:
            self.optimizer.tables_changed()

    def kill_within(self, spans: Sequence[tuple[int, int]]) -> None:
        """See GoneCode.kill_within."""
        self._gone.kill_within(spans)

    def __iter__(self) -> Iterator[Kprobe]:
        """The users' probes, aggregators resolved, in the order of kprobes/list."""
        for probe in chain.from_iterable(self._table.buckets()):
            yield from probe.members if isinstance(probe, AggregatorProbe) else [probe]

    # Registration

    def register_kprobe(self, kprobe: Kprobe) -> None:
        """Register a probe, and arm it unless it is disabled or all probes are disarmed.

        Raises: KernelError EINVAL (contradicting place, registered already, blacklisted, not text),
        ENOENT (unknown symbol or outside of any), EILSEQ (not at an instruction), ENOMEM.
        Mirrors: kernel/kprobes.c:register_kprobe (v6.1).
        """
        addr, on_entry = self.locate(kprobe)
        if self._table.valid(kprobe) is not None:
            raise KernelError(errno.EINVAL, "the probe is registered already")
        self._check_address_safe(addr)
        self._check_handlers(kprobe)
        given = kprobe.addr
        kprobe.addr, kprobe.nmissed, kprobe.failures = addr, 0, 0
        kprobe.flags = KprobeFlag.DISABLED if kprobe.disabled else KprobeFlag.NONE
        if on_entry:
            kprobe.flags |= KprobeFlag.ON_FUNC_ENTRY
        if addr in self._fentry:
            kprobe.flags |= KprobeFlag.FTRACE
        try:
            self._insert(kprobe)
        except KernelError:
            kprobe.addr = given
            raise

    def _check_handlers(self, kprobe: Kprobe) -> None:
        """Raises: KernelError EOPNOTSUPP for what this kernel's struct kprobe doesn't have."""
        profile = self.profile
        if kprobe.fault_handler is not None and not profile.fault_handlers:
            raise KernelError(errno.EOPNOTSUPP, f"{profile.name} has no fault handlers")
        if kprobe.break_handler is not None and not profile.jprobes:
            raise KernelError(errno.EOPNOTSUPP, f"{profile.name} has no jprobes")
        if kprobe.length and profile.djprobe is None:
            raise KernelError(errno.EOPNOTSUPP, f"{profile.name} has no djprobes")

    def _insert(self, kprobe: Kprobe) -> None:
        if self.optimizer is not None:
            self.optimizer.check_conflicts(kprobe)
        old = self._table.get(kprobe.address)
        if old is not None:
            self._register_aggregate(old, kprobe)
            return
        if not kprobe.is_ftrace:
            self._copies.prepare(kprobe)
        self._table.put(kprobe)
        if not self.all_disarmed and not kprobe.is_disabled:
            self._arming.arm(kprobe)
        self._try_to_optimize(kprobe)

    def _try_to_optimize(self, kprobe: Kprobe) -> None:
        """A probe that can be optimized gets an aggregator, be it alone or disabled.

        Mirrors: kernel/kprobes.c:try_to_optimize_kprobe (v6.1).
        """
        if self.optimizer is None or kprobe.is_ftrace or not self.optimizer.wants(kprobe):
            return
        head = AggregatorProbe(addr=kprobe.address, report=self.hits.report)
        self.optimizer.prepare(head)
        kprobe.obstacle = head.obstacle
        if head.detour is not None:
            self._put_aggregator(head, kprobe)
            self.optimizer.optimize(head)

    def register_kprobes(self, kprobes: Sequence[Kprobe]) -> None:
        """Register all or none. Raises: as register_kprobe; EINVAL for an empty sequence."""
        register_all(kprobes, self.register_kprobe, self.unregister_kprobe)

    def unregister_kprobe(self, kprobe: Kprobe) -> None:
        """Disarm and forget a probe; one that isn't registered loses its address, as in Linux.

        Mirrors: kernel/kprobes.c:__unregister_kprobe_top, __unregister_kprobe_bottom (v6.1).
        """
        head = self._table.valid(kprobe)
        if head is None:
            kprobe.addr = None
            return
        self._disable(kprobe, head)
        if isinstance(head, AggregatorProbe):
            self._remove_member(head, kprobe)
        else:
            self._table.remove(head)
            self._copies.release(head)
        if kprobe.symbol_name is not None:
            # Linux keeps it, and refuses to register the structure again until its owner has cleared it.
            kprobe.addr = None

    def _remove_member(self, head: AggregatorProbe, kprobe: Kprobe) -> None:
        head.members.remove(kprobe)
        kprobe.insn = None
        self._refresh(head)
        optimizer = self.optimizer
        if not head.members:
            if not head.is_disabled:
                # A jump was reused for a disabled probe. Linux: it stays in the text for good.
                self._disarm(head)
            # Linux: a jump that is still there keeps the aggregator until the worker has taken it back.
            if optimizer is None or not optimizer.is_queued(head):
                self._table.remove(head)
                self._release(head)
        elif optimizer is not None and not self.all_disarmed:
            optimizer.optimize(head)

    def _release(self, head: AggregatorProbe) -> None:
        if self.optimizer is not None:
            self.optimizer.free(head)
        else:
            self._copies.release(head)

    def unregister_kprobes(self, kprobes: Sequence[Kprobe]) -> None:
        for kprobe in kprobes:
            self.unregister_kprobe(kprobe)

    def _register_aggregate(self, old: Kprobe, kprobe: Kprobe) -> None:
        """A further probe at an address. Mirrors: kernel/kprobes.c:register_aggr_kprobe (v6.1)."""
        head = old if isinstance(old, AggregatorProbe) else self._aggregate(old)
        if kprobe.break_handler is not None and head.break_handler is not None:
            raise KernelError(errno.EEXIST, f"{kprobe.address:#x} has a jprobe already")
        if head.is_unused and self.optimizer is not None:
            # On its way out, with a jump still in the text. Mirrors: reuse_unused_kprobe (v6.1).
            head.flags &= ~KprobeFlag.DISABLED
            self.optimizer.optimize(head)
        if head.is_gone:
            self._gone.revive(head)
        kprobe.insn, kprobe.cost, kprobe.obstacle = head.insn, head.cost, head.obstacle
        if kprobe.needs_breakpoint and self.optimizer is not None:
            self.optimizer.unoptimize(head, force=True)
        # Newest first; a jprobe doesn't come back to the others.
        head.members.insert(0 if kprobe.break_handler is None else len(head.members), kprobe)
        self._refresh(head)
        if head.is_disabled and not kprobe.is_disabled:
            head.flags &= ~KprobeFlag.DISABLED
            self._refresh(head)
            if not self.all_disarmed:
                self._arming.arm(head)

    def _aggregate(self, first: Kprobe) -> AggregatorProbe:
        head = AggregatorProbe(addr=first.address, report=self.hits.report)
        wanted = self.optimizer is not None and not first.is_gone and self.optimizer.wants(first)
        if self.optimizer is not None and not first.is_ftrace and wanted:
            self.optimizer.prepare(head)
        self._put_aggregator(head, first)
        return head

    def _put_aggregator(self, head: AggregatorProbe, first: Kprobe) -> None:
        """Put an aggregator in the place of a single probe, armed as it was.

        Mirrors: kernel/kprobes.c:init_aggr_kprobe (v6.1).
        """
        # Compiled, it leads to the handlers of that probe alone.
        self.hits.drop_code(first)
        head.flags = first.flags
        head.insn, head.cost = first.insn, first.cost
        head.members.append(first)
        self._table.put(head)
        self._refresh(head)

    def _refresh(self, head: Kprobe) -> None:
        """Let what happens at hits follow a change of the probes at an address or of their flags."""
        if isinstance(head, AggregatorProbe):
            head.refresh_handlers()
        self.hits.drop_code(head)
        self._copies.fit(head)
        self.hits.install(head)

    def handler_changed(self, kprobe: Kprobe) -> None:
        """What the probe's `program` makes differs from now on, or whether it makes any."""
        head = self._table.valid(kprobe)
        if head is not None:
            self.hits.drop_code(head)
            self.hits.install(head)

    def locate(self, kprobe: Kprobe) -> tuple[GuestAddr, bool]:
        """The address meant, and whether it is a function's entry. Raises: KernelError EINVAL, ENOENT.

        Mirrors: kernel/kprobes.c:_kprobe_addr (v6.1).
        """
        name, addr = kprobe.symbol_name, kprobe.addr
        if (name is None) == (addr is None):
            raise KernelError(errno.EINVAL, "give a symbol name or an address, not both and not neither")
        if name is not None:
            addr = self._symbols.lookup_name(name)
            if addr is None:
                raise KernelError(errno.ENOENT, f"no symbol named {name}")
        assert addr is not None
        addr += kprobe.offset
        where = self._symbols.lookup(addr)
        if where is None:
            raise KernelError(errno.ENOENT, f"{addr:#x} is in no symbol")
        kprobe.place = "" if where.module else listing.place(kprobe, addr, where, self._bits)
        return GuestAddr(addr), where.offset == 0

    def on_func_entry(self, symbol: str, offset: int) -> bool:
        """Whether a place is a function's entry. Raises: KernelError ENOENT.

        Mirrors: kernel/kprobes.c:kprobe_on_func_entry (v6.1).
        """
        return self.locate(Kprobe(symbol_name=symbol, offset=offset))[1]

    def function_entry(self, kprobe: Kprobe) -> GuestAddr:
        """The address of a probe that has to be on a function's entry. Raises: KernelError EINVAL, ENOENT."""
        address, on_entry = self.locate(kprobe)
        if not on_entry:
            raise KernelError(errno.EINVAL, f"{address:#x} is not the entry of a function")
        return address

    def has_fentry(self, addr: int) -> bool:
        """Whether ftrace can call from there."""
        return addr in self._fentry

    def follows_convention(self, addr: int) -> bool:
        """Whether the function is known to be C, whose callers expect of it what the convention says.

        What has a site for fentry is; with it the compiler relies on no more (-fipa-ra is off).
        """
        return addr in self._traceable

    def _check_address_safe(self, addr: int) -> None:
        """Mirrors: check_kprobe_address_safe (v6.1), but no reference keeps the module: nothing else runs."""
        if not _in_ranges(self._text_ranges, addr):
            raise KernelError(errno.EINVAL, f"{addr:#x} is not kernel text")
        if self.is_blacklisted(addr):
            raise KernelError(errno.EINVAL, f"{addr:#x} is blacklisted")
        if addr in self._jump_labels:
            raise KernelError(errno.EINVAL, f"{addr:#x} is a jump label")
        if addr in self._bugs:
            raise KernelError(errno.EINVAL, f"{addr:#x} is a BUG() site")
        # Linux: up to v5.17; later ones let a breakpoint be written into what ftrace patches as a whole.
        if any(addr - distance in self._fentry for distance in range(1, self._call_size)):
            raise KernelError(errno.EILSEQ, f"{addr:#x} is within an fentry site")

    def is_blacklisted(self, addr: int) -> bool:
        """Mirrors: kernel/kprobes.c:within_kprobe_blacklist (v6.1)."""
        return _in_ranges(self._blacklist_sorted, addr)

    def commit_kprobes(self) -> None:
        """Write the jumps of registered djprobes. Raises: KernelError EOPNOTSUPP (no djprobes), EBUSY.

        Source: "Djprobe" (Ottawa Linux Symposium 2007), section 3.4.
        """
        if not isinstance(self.optimizer, Djprobes):
            raise KernelError(errno.EOPNOTSUPP, f"{self.profile.name} has no djprobes")
        self.optimizer.commit()

    # Enabling and arming

    def enable_kprobe(self, kprobe: Kprobe) -> None:
        """Raises: KernelError EINVAL when the probe isn't registered or its code is gone.

        Mirrors: kernel/kprobes.c:enable_kprobe (v6.1).
        """
        head = self._table.valid(kprobe)
        if head is None:
            raise KernelError(errno.EINVAL, "the probe isn't registered")
        if kprobe.is_gone:
            raise KernelError(errno.EINVAL, "the probed code is gone")
        if head is not kprobe:
            kprobe.flags &= ~KprobeFlag.DISABLED
            self._refresh(head)
        if not self.all_disarmed and head.is_disabled:
            head.flags &= ~KprobeFlag.DISABLED
            self._refresh(head)
            self._arming.arm(head)

    def disable_kprobe(self, kprobe: Kprobe) -> None:
        """Raises: KernelError EINVAL when the probe isn't registered."""
        head = self._table.valid(kprobe)
        if head is None:
            raise KernelError(errno.EINVAL, "the probe isn't registered")
        self._disable(kprobe, head)

    def _disable(self, kprobe: Kprobe, head: Kprobe) -> None:
        """Mirrors: kernel/kprobes.c:__disable_kprobe (v6.1)."""
        if kprobe.is_disabled:
            return
        if head is not kprobe:
            kprobe.flags |= KprobeFlag.DISABLED
            self._refresh(head)
        if head is kprobe or (isinstance(head, AggregatorProbe) and all(m.is_disabled for m in head.members)):
            self._disarm(head)

    def _disarm(self, head: Kprobe) -> None:
        if not self.all_disarmed and not head.is_disabled:
            self._arming.disarm(head)
        head.flags |= KprobeFlag.DISABLED
        self._refresh(head)

    @property
    def all_disarmed(self) -> bool:
        return self._table.all_disarmed

    def arm_all(self) -> None:
        """See Arming.arm_all."""
        self._arming.arm_all()

    def disarm_all(self) -> None:
        """See Arming.disarm_all."""
        self._arming.disarm_all()

    def is_armed(self, kprobe: Kprobe) -> bool:
        """Whether text is patched for this probe's address."""
        head = self._table.valid(kprobe)
        return head is not None and not head.is_disabled and not self.all_disarmed

    def head(self, kprobe: Kprobe) -> Kprobe | None:
        """The table's entry for a registered probe: itself, or its aggregator."""
        return self._table.valid(kprobe)

    def is_optimized(self, kprobe: Kprobe) -> bool:
        """Whether a jump to the probe's detour stands in the text."""
        head = self._table.valid(kprobe)
        return isinstance(head, AggregatorProbe) and head.is_patched

    def runs_in_detour(self, kprobe: Kprobe) -> bool:
        """Whether hits go on in the probe's detour: by the jump, or by the breakpoint before it."""
        head = self._table.valid(kprobe)
        return isinstance(head, AggregatorProbe) and head.is_optimized

    def detour(self, kprobe: Kprobe) -> DetourBuffer | None:
        """The detour of the probe's address, used or only prepared."""
        head = self._table.valid(kprobe)
        return head.detour if isinstance(head, AggregatorProbe) else None

    def mode(self, kprobe: Kprobe) -> str:
        """How hits of a probe are taken now."""
        return report.mode(self, kprobe)

    def reason(self, kprobe: Kprobe) -> str:
        """Why the probe isn't in a better mode: the address and the rule; empty in the best one."""
        return report.reason(self, kprobe)

    @property
    def can_optimize(self) -> bool:
        """CONFIG_OPTPROBES."""
        return self.optimizer is not None

    @property
    def optimization(self) -> bool:
        """sysctl debug.kprobes-optimization."""
        return self.optimizer is not None and self.optimizer.allowed

    def set_optimization(self, allowed: bool) -> None:
        """Raises: KernelError EOPNOTSUPP without an optimizer.

        Mirrors: kernel/kprobes.c:proc_kprobes_optimization_handler (v6.1).
        """
        if self.optimizer is None:
            raise KernelError(errno.EOPNOTSUPP, "built without jump optimization")
        if allowed == self.optimizer.allowed:
            return
        self.optimizer.allow(allowed)
        self._log(report.OPTIMIZATION_MESSAGES[allowed])

    def set_optimized(self, kprobe: Kprobe, wanted: bool) -> None:
        """Unoptimize and hold the probes of an address, or ask for their optimization again.

        Raises: KernelError EINVAL (not registered), EOPNOTSUPP (unsafe, or a post_handler needs the step's
        end).
        """
        head = self._table.valid(kprobe)
        if head is None:
            raise KernelError(errno.EINVAL, "the probe isn't registered")
        optimizer = self.optimizer
        if optimizer is not None and wanted and head is kprobe and not kprobe.is_gone:
            optimizer.ask(kprobe)
            self._try_to_optimize(kprobe)
            head = self._table.valid(kprobe)
        if optimizer is not None and isinstance(head, AggregatorProbe) and head.detour is not None:
            optimizer.hold(head, not wanted)
            if not wanted or head.post_handler is None:
                return
        if wanted:
            raise KernelError(errno.EOPNOTSUPP, self.reason(kprobe))

    # What debugfs shows

    @property
    def enabled(self) -> bool:
        """kprobes/enabled: whether probes are armed at all."""
        return not self.all_disarmed

    def set_enabled(self, enabled: bool) -> None:
        """Arm or disarm all probes."""
        if enabled:
            self.arm_all()
        else:
            self.disarm_all()

    def list_text(self) -> list[str]:
        """Lines of kprobes/list."""
        return "".join(self.list_records(0)).splitlines(keepends=True)

    def list_records(self, start: int) -> Iterator[str]:
        """The lines of each hash bucket from one on, which is how Linux reads them."""
        for probes in self._table.buckets(start):
            yield listing.bucket_text(probes, self._symbols, self._bits)

    def blacklist_text(self) -> list[str]:
        """Lines of kprobes/blacklist."""
        return listing.blacklist_lines(self.blacklist, self._bits)


def _in_ranges(ranges: Sequence[tuple[int, ...] | tuple[int, int, str]], addr: int) -> bool:
    """Whether one of the sorted, disjoint half-open ranges holds `addr`."""
    at = bisect_right(ranges, addr, key=lambda r: r[0]) - 1
    return at >= 0 and ranges[at][0] <= addr < ranges[at][1]
