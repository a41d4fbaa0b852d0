"""Kprobes: registration, enabling and arming of probes, in Linux's order of checks."""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from emulated_kernel.abi import GuestAddr
from emulated_kernel.arch.base import Arch
from emulated_kernel.errors import KernelError
from emulated_kernel.kprobes import listing
from emulated_kernel.kprobes.hit import HitHandling, HitMachine
from emulated_kernel.kprobes.kprobe import AggregatorProbe, Kprobe, KprobeFlag, OutOfLine
from emulated_kernel.kprobes.slots import InsnSlots, SlotText


class ProbedText(SlotText, Protocol):
    """What the registry needs of the machine's text."""

    def original(self, va: int, size: int) -> bytes: ...

    def poke_batch(self, pokes: Iterable[tuple[int, bytes]]) -> None: ...


class ProbedMachine(HitMachine, Protocol):
    @property
    def text(self) -> ProbedText: ...


class Symbols(listing.Lookup, Protocol):
    def lookup_name(self, name: str, /) -> int | None: ...


class ProbedImage(Protocol):
    """The tables of the kernel binary that decide what can be probed."""

    @property
    def kallsyms(self) -> Symbols: ...

    @property
    def text_ranges(self) -> Sequence[tuple[int, int]]: ...

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
    ) -> None:
        self._text = machine.text
        self._symbols = image.kallsyms
        self._arch = arch
        self._log = log
        self._text_ranges = sorted(image.text_ranges)
        self.blacklist = tuple(image.blacklist)
        self._blacklist_sorted = sorted(self.blacklist)
        self._bugs = frozenset(image.bugs)
        self._table: dict[int, Kprobe] = {}
        self.slots = InsnSlots(machine.text, arch.max_insn_size)
        self.hits = HitHandling(machine, arch)
        self.all_disarmed = False

    def __iter__(self) -> Iterator[Kprobe]:
        """The users' probes, aggregators resolved, in the order of kprobes/list."""
        for probe in listing.in_list_order(self._table.values()):
            yield from probe.members if isinstance(probe, AggregatorProbe) else [probe]

    # Registration

    def register_kprobe(self, kprobe: Kprobe) -> None:
        """Register a probe, and arm it unless it is disabled or all probes are disarmed.

        Raises: KernelError EINVAL (contradicting place, registered already, blacklisted, not text),
        ENOENT (unknown symbol or outside of any), EILSEQ (not at an instruction), ENOMEM.
        Mirrors: kernel/kprobes.c:register_kprobe (v6.1).
        """
        addr, on_entry = self._kprobe_addr(kprobe)
        if self._valid(kprobe) is not None:
            raise KernelError(errno.EINVAL, "the probe is registered already")
        self._check_address_safe(addr)
        given = kprobe.addr
        kprobe.addr, kprobe.nmissed, kprobe.failures = addr, 0, 0
        kprobe.flags = KprobeFlag.DISABLED if kprobe.disabled else KprobeFlag.NONE
        if on_entry:
            kprobe.flags |= KprobeFlag.ON_FUNC_ENTRY
        try:
            self._insert(kprobe)
        except KernelError:
            kprobe.addr = given
            raise

    def _insert(self, kprobe: Kprobe) -> None:
        old = self._table.get(kprobe.address)
        if old is not None:
            self._register_aggregate(old, kprobe)
            return
        self._prepare(kprobe)
        self._table[kprobe.address] = kprobe
        if not self.all_disarmed and not kprobe.is_disabled:
            self._arm(kprobe)

    def register_kprobes(self, kprobes: Sequence[Kprobe]) -> None:
        """Register all or none. Raises: as register_kprobe; EINVAL for an empty sequence."""
        if not kprobes:
            raise KernelError(errno.EINVAL, "no probes given")
        for done, kprobe in enumerate(kprobes):
            try:
                self.register_kprobe(kprobe)
            except KernelError:
                self.unregister_kprobes(kprobes[:done])
                raise

    def unregister_kprobe(self, kprobe: Kprobe) -> None:
        """Disarm and forget a probe. Linux ignores one that isn't registered; so do we.

        Mirrors: kernel/kprobes.c:__unregister_kprobe_top, __unregister_kprobe_bottom (v6.1).
        """
        head = self._valid(kprobe)
        if head is None:
            return
        self._disable(kprobe, head)
        if isinstance(head, AggregatorProbe):
            head.members.remove(kprobe)
            head.refresh_handlers()
            kprobe.insn = None
        if not isinstance(head, AggregatorProbe) or not head.members:
            del self._table[head.address]
            self._release(head)
        if kprobe.symbol_name is not None:
            # Linux keeps it, and refuses to register the structure again until its owner has cleared it.
            kprobe.addr = None

    def unregister_kprobes(self, kprobes: Sequence[Kprobe]) -> None:
        for kprobe in kprobes:
            self.unregister_kprobe(kprobe)

    def _register_aggregate(self, old: Kprobe, kprobe: Kprobe) -> None:
        """A further probe at an address. Mirrors: kernel/kprobes.c:register_aggr_kprobe (v6.1)."""
        head = old if isinstance(old, AggregatorProbe) else self._aggregate(old)
        kprobe.insn, kprobe.cost = head.insn, head.cost
        head.members.insert(0, kprobe)
        head.refresh_handlers()
        if head.is_disabled and not kprobe.is_disabled:
            head.flags &= ~KprobeFlag.DISABLED
            if not self.all_disarmed:
                self._arm(head)

    def _aggregate(self, first: Kprobe) -> AggregatorProbe:
        """Put an aggregator in the place of a single probe, armed as it was."""
        head = AggregatorProbe(addr=first.address, report=self.hits.report)
        head.flags = first.flags
        head.insn, head.cost = first.insn, first.cost
        head.members.append(first)
        head.refresh_handlers()
        # The dict keeps the place of the first registration, and so the order of kprobes/list.
        self._table[first.address] = head
        self.hits.install(head)
        return head

    def _kprobe_addr(self, kprobe: Kprobe) -> tuple[GuestAddr, bool]:
        """The address meant, and whether it is a function's entry.

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
        return GuestAddr(addr), where.offset == 0

    def on_func_entry(self, symbol: str, offset: int) -> bool:
        """Whether a place is a function's entry. Raises: KernelError ENOENT.

        Mirrors: kernel/kprobes.c:kprobe_on_func_entry (v6.1).
        """
        return self._kprobe_addr(Kprobe(symbol_name=symbol, offset=offset))[1]

    def _check_address_safe(self, addr: int) -> None:
        """Mirrors: kernel/kprobes.c:check_kprobe_address_safe (v6.1)."""
        if not _in_ranges(self._text_ranges, addr):
            raise KernelError(errno.EINVAL, f"{addr:#x} is not kernel text")
        if self.is_blacklisted(addr):
            raise KernelError(errno.EINVAL, f"{addr:#x} is blacklisted")
        if addr in self._bugs:
            raise KernelError(errno.EINVAL, f"{addr:#x} is a BUG() site")

    def is_blacklisted(self, addr: int) -> bool:
        """Mirrors: kernel/kprobes.c:within_kprobe_blacklist (v6.1)."""
        return _in_ranges(self._blacklist_sorted, addr)

    def _prepare(self, kprobe: Kprobe) -> None:
        """Check the instruction boundary and make the out-of-line copy.

        Mirrors: arch/x86/kernel/kprobes/core.c:arch_prepare_kprobe (v6.1).
        """
        addr = kprobe.address
        where = self._symbols.lookup(addr)
        assert where is not None
        start = where.symbol.address
        body = self._text.original(start, where.symbol.size)
        if addr not in self._arch.instruction_boundaries(body, start):
            raise KernelError(errno.EILSEQ, f"{addr:#x} is not the start of an instruction")
        slot = self.slots.get()
        try:
            prepared = self._arch.prepare(body[where.offset :], addr, slot)
        except KernelError:
            self.slots.put(slot)
            raise
        if prepared.emulate is not None:
            self.slots.put(slot)
            kprobe.insn = OutOfLine(prepared, None)
        else:
            self._text.poke(slot, prepared.slot_bytes)
            kprobe.insn = OutOfLine(prepared, slot)
        self.hits.install(kprobe)

    def _release(self, kprobe: Kprobe) -> None:
        self.hits.remove(kprobe)
        if kprobe.insn is not None and kprobe.insn.slot is not None:
            self.slots.put(kprobe.insn.slot)
        kprobe.insn = None

    # Enabling and arming

    def _valid(self, kprobe: Kprobe) -> Kprobe | None:
        """The table's entry that this very probe belongs to. Mirrors: __get_valid_kprobe (v6.1)."""
        if kprobe.addr is None:
            return None
        head = self._table.get(kprobe.addr)
        if head is kprobe or (isinstance(head, AggregatorProbe) and any(m is kprobe for m in head.members)):
            return head
        return None

    def enable_kprobe(self, kprobe: Kprobe) -> None:
        """Raises: KernelError EINVAL when the probe isn't registered or its code is gone.

        Mirrors: kernel/kprobes.c:enable_kprobe (v6.1).
        """
        head = self._valid(kprobe)
        if head is None:
            raise KernelError(errno.EINVAL, "the probe isn't registered")
        if kprobe.is_gone:
            raise KernelError(errno.EINVAL, "the probed code is gone")
        if head is not kprobe:
            kprobe.flags &= ~KprobeFlag.DISABLED
        if not self.all_disarmed and head.is_disabled:
            head.flags &= ~KprobeFlag.DISABLED
            self._arm(head)

    def disable_kprobe(self, kprobe: Kprobe) -> None:
        """Raises: KernelError EINVAL when the probe isn't registered."""
        head = self._valid(kprobe)
        if head is None:
            raise KernelError(errno.EINVAL, "the probe isn't registered")
        self._disable(kprobe, head)

    def _disable(self, kprobe: Kprobe, head: Kprobe) -> None:
        """Mirrors: kernel/kprobes.c:__disable_kprobe (v6.1)."""
        if kprobe.is_disabled:
            return
        kprobe.flags |= KprobeFlag.DISABLED
        if head is kprobe:
            if not self.all_disarmed:
                self._disarm(head)
        elif isinstance(head, AggregatorProbe) and all(m.is_disabled for m in head.members):
            if not self.all_disarmed and not head.is_disabled:
                self._disarm(head)
            head.flags |= KprobeFlag.DISABLED

    def _arm(self, head: Kprobe) -> None:
        self._text.poke(head.address, self._arch.breakpoint)

    def _disarm(self, head: Kprobe) -> None:
        self._text.poke(head.address, self._text.original(head.address, len(self._arch.breakpoint)))

    def arm_all(self) -> None:
        """Arm every probe that isn't disabled. Mirrors: kernel/kprobes.c:arm_all_kprobes (v6.1)."""
        if not self.all_disarmed:
            return
        self.all_disarmed = False
        breakpoint_ = self._arch.breakpoint
        self._text.poke_batch((p.address, breakpoint_) for p in self._table.values() if not p.is_disabled)
        self._log("kprobes: Kprobes globally enabled")

    def disarm_all(self) -> None:
        """Disarm every probe. Mirrors: kernel/kprobes.c:disarm_all_kprobes (v6.1)."""
        if self.all_disarmed:
            return
        self.all_disarmed = True
        size = len(self._arch.breakpoint)
        self._text.poke_batch(
            (p.address, self._text.original(p.address, size))
            for p in self._table.values()
            if not p.is_disabled
        )
        self._log("kprobes: Kprobes globally disabled")

    def is_armed(self, kprobe: Kprobe) -> bool:
        """Whether a breakpoint stands in the text for this probe."""
        head = self._valid(kprobe)
        return head is not None and not head.is_disabled and not self.all_disarmed

    def mode(self, kprobe: Kprobe) -> str:
        """How hits of a probe are taken now: int3, disarmed or gone."""
        if kprobe.is_gone:
            return "gone"
        return "int3" if self.is_armed(kprobe) else "disarmed"

    def reason(self, kprobe: Kprobe) -> str:
        """Why the probe isn't in a better mode: the address and the rule."""
        if kprobe.is_disabled:
            return f"0x{kprobe.address:x}: the probe is disabled"
        if self.all_disarmed:
            return f"0x{kprobe.address:x}: all probes are disarmed, see kprobes/enabled"
        if kprobe.post_handler is not None:
            return f"0x{kprobe.address:x}: a post_handler needs the step's end"
        return f"0x{kprobe.address:x}: this kernel is built without jump optimization"

    can_optimize = False
    """CONFIG_OPTPROBES: this engine has no optimizer."""
    optimization = False

    def set_optimization(self, allowed: bool) -> None:
        """Raises: KernelError EOPNOTSUPP when optimization is asked for."""
        if allowed:
            raise KernelError(errno.EOPNOTSUPP, "built without jump optimization")

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
        return listing.list_lines(self._table.values(), self._symbols)

    def blacklist_text(self) -> list[str]:
        """Lines of kprobes/blacklist."""
        return listing.blacklist_lines(self.blacklist)


def _in_ranges(ranges: Sequence[tuple[int, ...] | tuple[int, int, str]], addr: int) -> bool:
    """Whether one of the sorted, disjoint half-open ranges holds `addr`."""
    at = bisect_right(ranges, addr, key=lambda r: r[0]) - 1
    return at >= 0 and ranges[at][0] <= addr < ranges[at][1]
