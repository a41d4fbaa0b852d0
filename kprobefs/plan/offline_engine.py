"""OfflineEngine: checks definitions of kprobe events as ProbeEngine does, for a kernel that does not run."""

from __future__ import annotations

from typing import Any, cast

from emulated_kernel.arch.probe_checks import ProbeChecker
from emulated_kernel.kprobes.aggr_kprobe import KPROBE
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe, check_returns
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.probe_places import ProbePlaces
from emulated_kernel.kprobes.return_hook.hook_sets import never_returning
from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.registry import EventRegistry
from emulated_kernel.trace.probes.dynamic_events import EventCommands
from emulated_kernel.trace.probes.kprobe_events import KprobeEvents
from emulated_kernel.trace.probes.trace_kprobe import ProbeEngine
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.text.error_log import CommandError, ErrorLog, ErrorTexts
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.limits import Limits
from kprobefs.measure.verdicts import Judge
from kprobefs.plan.planned_kernel import PlannedKernel


class OfflineKprobes:
    """A registry of kprobes that checks whether addresses can be probed, and arms nothing."""

    def __init__(self, judge: Judge) -> None:
        self._checker = judge.checker
        self.places = ProbePlaces(judge.subject.tables.kallsyms, judge.checker)

    @property
    def probe_checker(self) -> ProbeChecker[Any]:
        """The code that decides whether an address can be probed and optimized."""
        return self._checker

    def register_kprobe(self, kprobe: Kprobe[Any], kind: str = KPROBE, /) -> None:  # noqa: ARG002 - armed
        """Check that a probe's address can be probed, and store the address in `kprobe.addr`.

        `kind` has no effect.

        Raises: the errors of Kprobes.register_kprobe() about the probe's address.
        """
        addr, where, _ = self.places.locate(kprobe)
        self.places.check(where, addr)
        refused = self._checker.check_prepare(where, addr)
        if refused is not None:
            raise KernelError(refused.errno, refused.text)
        kprobe.addr = addr

    def unregister_kprobe(self, kprobe: Kprobe[Any], /) -> None:
        """Do nothing: nothing is armed."""

    def enable_kprobe(self, kprobe: Kprobe[Any], /) -> None:
        """Do nothing: nothing is armed."""

    def disable_kprobe(self, kprobe: Kprobe[Any], /) -> None:
        """Do nothing: nothing is armed."""

    def handler_changed(self, kprobe: Kprobe[Any], /) -> None:
        """Do nothing: no handler is compiled."""


class OfflineKretprobes:
    """A registry of kretprobes that checks whether functions can be return-probed, and hooks nothing."""

    def __init__(self, judge: Judge, kprobes: OfflineKprobes) -> None:
        self._kprobes = kprobes
        self._blacklist = frozenset(never_returning(judge.subject.tables, judge.arch))

    def register_kretprobe(self, rp: Kretprobe[Any], /) -> None:
        """Check that a probe's function can be return-probed, and store its address in `rp.addr`.

        Raises: the errors of Kretprobes.register_kretprobe() about the function.
        """
        check_returns(self._kprobes.places.function_entry(rp), self._blacklist)
        self._kprobes.register_kprobe(rp)

    def unregister_kretprobe(self, rp: Kretprobe[Any], /) -> None:
        """Do nothing: nothing is hooked."""

    def handler_changed(self, rp: Kretprobe[Any], /) -> None:
        """Do nothing: no handler is compiled."""


@dataclass(frozen=True, slots=True)
class LoggedError:
    """An entry of error_log."""

    error: CommandError
    text: str
    """The kernel's text for the error."""
    column: int
    """Column of the caret in the command; 0 is the first character."""


class LastError(ErrorLog):
    """An error_log that also provides its last entry as the attribute `last`, which is None at first."""

    def __init__(self, texts: ErrorTexts) -> None:
        super().__init__(lambda: 0, texts)
        self.last: LoggedError | None = None

    def add(self, location: str, command: str, error: CommandError, column: int) -> None:
        self.last = LoggedError(error, self.text_of(error), column)
        super().add(location, command, error, column)


class StaticEvent(TraceEvent):
    """An event that the kernel itself has. A probe event with the same group and name is refused."""

    __slots__ = ()

    def start(self) -> None:
        """Do nothing: nothing is traced."""

    def stop(self) -> None:
        """Do nothing: nothing is traced."""

    def print_record(self, _payload: bytes, _symbols: KernelSymbols, *, sym_addr: bool = False) -> str:
        del sym_addr
        raise AssertionError("no event of a kernel that does not run has records")


class OfflineEngine:
    """The kprobe_events file of a kernel that does not run: parses and checks definitions."""

    def __init__(self, kernel: PlannedKernel) -> None:
        judge = kernel.whole.judge
        kprobes = OfflineKprobes(judge)
        symbols = KernelSymbols(judge.subject.tables.kallsyms, None, None, tuple)
        # Only hits use the context, and only fprobe events use fprobes; there are neither.
        hit = ProbeHit(cast("Any", None), cast("Any", None), cast("Any", None))
        engine = ProbeEngine(
            judge.arch,
            symbols,
            kprobes,
            OfflineKretprobes(judge, kprobes),
            cast("Any", None),
            hit,
            None,
            judge.profile.jprobes,
            types=lambda: kernel.btf,
        )
        interface = kernel.interface
        self.error_log = LastError(interface.texts)
        self.registry = EventRegistry()
        for group, name, fields in kernel.static_events:
            self.registry.add_own(StaticEvent(group, name, fields))
        self.messages: list[str] = []
        """Lines that the kernel would write to its log."""
        commands = EventCommands(self.registry, self.error_log, self.messages.append, Limits(), interface)
        self.kprobe_events = KprobeEvents(engine, commands)
