"""Parsers as fuzzing targets, with their inputs and the results that they may have.

Most of them are fast, because they need no booted kernel.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from random import Random

from emulated_kernel.image.builtin_image import PREBUILT, load_image
from emulated_kernel.image.elf import ElfFile
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.events.event_pids import PidList
from emulated_kernel.trace.filter.fields import FilterField, FilterType
from emulated_kernel.trace.filter.parse import parse_filter
from emulated_kernel.trace.filter.pattern import parse_pattern
from emulated_kernel.trace.ring.trace_entry import EventField, RawEntry
from emulated_kernel.trace.tracers.available_functions import Functions, TraceableFunction
from emulated_kernel.trace.tracers.function_tracer import FilterFile
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.kstrtox import cpumask, kstrtobool, kstrtoul, switch, sysctl_switch
from emulated_kernel.vfs.trees.trace_array_files import clock_name, tracer_name
from stress.fuzz.grammar import Mutator
from stress.fuzz.report import Violation
from stress.fuzz.rules import GRAMMAR
from tests.ledger import ledger_mismatches
from tests.trace.events.kernel import Hit
from tests.trace.trigger.control import TriggerKernel

_FIELDS = {
    "fd": FilterField(FilterType.OTHER, EventField("", "", 8, 8, False)),
    "n": FilterField(FilterType.OTHER, EventField("", "", 16, 4, True)),
    "common_flags": FilterField(FilterType.OTHER, EventField("", "", 2, 1, False)),
    "common_pid": FilterField(FilterType.OTHER, EventField("", "", 4, 4, True)),
    "s": FilterField(FilterType.DYN_STRING, EventField("", "", 8, 4, True)),
    "prev_comm": FilterField(FilterType.STATIC_STRING, EventField("", "", 8, 16, True)),
    "cpu": FilterField(FilterType.CPU, EventField("", "", 0, 4, True)),
    "comm": FilterField(FilterType.COMM, EventField("", "", 0, 16, False)),
}
_FUNCTIONS = Functions(
    (
        TraceableFunction(0x100 * at, name, "m" if name == "a" else None)
        for at, name in enumerate(("vfs_read", "vfs_write", "strlen", "a"))
    ),
    has_module=lambda name: name == "m",
)
_PATTERN_MAX = 256
"""Maximum size in bytes of a filter's pattern; words of set_ftrace_filter are shorter."""
_NUMBERS: tuple[Callable[[bytes], object], ...] = (
    *(kstrtobool, kstrtoul, switch, sysctl_switch, clock_name, tracer_name),
    *(partial(cpumask, cpus=1), partial(cpumask, cpus=64)),
)
_KERNEL_LIFE = 500
"""Number of inputs after which the kernel of a target is replaced."""


@dataclass
class Target:
    """A parser to fuzz. Any exception of `run` except KernelError is a finding."""

    name: str
    rule: str
    run: Callable[[bytes], object]
    files: Sequence[Path] = ()
    """Files whose contents are damaged for inputs; if there are none, inputs are texts of the rule `rule`."""

    @cached_property
    def seeds(self) -> list[bytes]:
        """Valid inputs."""
        if self.files:
            return [path.read_bytes() for path in self.files]
        random = Random(0)
        return [GRAMMAR.text(random, self.rule).encode() for _ in range(200)]

    def input(self, random: Random, mutator: Mutator) -> bytes:
        """Return a random input for the target."""
        if self.files:
            return mutator.damage_file(random, random.choice(self.seeds))
        data = GRAMMAR.text(random, self.rule).encode()
        return mutator.damage(random, data) if random.random() < 0.5 else data


class _Commands:
    """Commands that are written to event files, with a mock kernel that only stores definitions."""

    def __init__(self) -> None:
        self._used = 0
        self._kernel = self._new()

    def _new(self) -> TriggerKernel:
        kernel = TriggerKernel()
        kernel.define("p:base/one vfs_read fd=%di n=%si:u32 s=+0(%dx):string\n", "p:base/two vfs_write\n")
        kernel.synthetic.write(b"syn u64 lat; pid_t pid; char comm[16]\n")
        return kernel

    def _fresh(self) -> TriggerKernel:
        self._used += 1
        if self._used % _KERNEL_LIFE == 0:
            self._kernel = self._new()
        return self._kernel

    def kprobe_events(self, data: bytes) -> None:
        kernel = self._fresh()
        self._define(data, kernel.kernel.events.write)

    def dynamic_events(self, data: bytes) -> None:
        kernel = self._fresh()
        self._define(data, kernel.kernel.dynamic_events.write)

    def synthetic_events(self, data: bytes) -> None:
        kernel = self._fresh()
        self._define(data, kernel.synthetic.write)

    def _define(self, data: bytes, write: Callable[[bytes], int]) -> None:
        show = self._kernel.kernel.dynamic_events.records
        before = show()
        try:
            write(data)
        except KernelError:
            if len(data.splitlines()) <= 1 and show() != before:
                raise Violation(f"refused, but the definitions are {show()[-300:]!r}") from None
            raise
        self._kernel.hit(Hit())

    def trigger(self, data: bytes) -> None:
        kernel = self._fresh()
        event = kernel.kernel.events.find("base", "one")
        if event is None:
            raise Violation("the event is gone")
        before = list(kernel.triggers.records(event))
        try:
            kernel.triggers.write(event, data)
        except KernelError:
            after = list(kernel.triggers.records(event))
            if after != before:
                raise Violation(f"refused, but the triggers are {after}") from None
            raise
        kernel.hit(Hit())
        list(kernel.triggers.records(event))


def _filter(data: bytes) -> None:
    program = parse_filter(data.decode("latin-1").rstrip(), _FIELDS.get)
    program.accepts(RawEntry(bytes(range(64)), 0, b"comm", lambda _address, _is_user: None))


def _pattern(data: bytes) -> None:
    pattern, _ = parse_pattern(data[:_PATTERN_MAX])
    for text in (b"", b"vfs_read\0", b"a" * 64, data[:64]):
        pattern.matches(text, len(text))


def _functions(data: bytes) -> None:
    chosen = FilterFile(_FUNCTIONS, "none", lambda: None)
    try:
        chosen.write(data[:_PATTERN_MAX])
        chosen.module_added("m")
    finally:
        list(chosen.records())
        chosen.functions_removed(frozenset(_FUNCTIONS.sites))
        if chosen.sites:
            raise Violation("functions are gone, and still chosen")


def _pids(data: bytes) -> None:
    pids = PidList(lambda: None)
    pids.write(data)
    pids.records()


def _numbers(data: bytes) -> None:
    for parse in _NUMBERS:
        with suppress(KernelError):
            parse(data)


def _elf(data: bytes) -> None:
    elf = ElfFile(data)
    len(elf.symbols)
    for segment in elf.segments:
        elf.segment_data(segment)
    len(elf.sections)


def _image(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
        file.write(data)
        file.flush()
        image = load_image(file.name)
    for symbol in image.kallsyms.symbols[:50]:
        image.kallsyms.lookup(symbol.address)


class _Modules:
    """Target that loads modules with the guest's module loader, in a booted kernel."""

    def __init__(self) -> None:
        self._kernel: Kernel | None = None

    def load(self, data: bytes) -> None:
        if self._kernel is None:
            self._kernel = Kernel()
        with self._kernel.lock:
            self._load(self._kernel, data)

    def _load(self, kernel: Kernel, data: bytes) -> None:
        try:
            kernel.modules.init_module(data, "fuzzed")
        finally:
            for module in kernel.modules.loaded():
                with suppress(KernelError):
                    kernel.unload_module(module.name)
            if kernel.guest.is_dead or kernel.modules.loaded():
                self._kernel = None
                kernel.close()
            elif wrong := ledger_mismatches(kernel.machine.text):
                raise Violation(f"text at {wrong[0]:#x} isn't what the ledger says")


def targets() -> dict[str, Target]:
    """Return a map name -> target, for all parsers. The targets have new state."""
    modules = _Modules()
    kernels = [PREBUILT / arch / "vmlinux" for arch in ("x86_64", "i386")]
    module_files = sorted((PREBUILT / "x86_64" / "modules").glob("*.ko"))
    found = (
        Target("kprobe_events", "kprobe_events", _Commands().kprobe_events),
        Target("dynamic_events", "dynamic_events", _Commands().dynamic_events),
        Target("synthetic_events", "synthetic_events", _Commands().synthetic_events),
        Target("trigger", "trigger", _Commands().trigger),
        Target("filter", "filter", _filter),
        Target("pattern", "glob", _pattern),
        Target("functions", "functions", _functions),
        Target("pids", "pids", _pids),
        Target("numbers", "value", _numbers),
        Target("elf", "", _elf, module_files),
        Target("image", "", _image, kernels[:1]),
        Target("module", "", modules.load, module_files),
    )
    return {target.name: target for target in found}
