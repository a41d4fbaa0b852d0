"""machine/: its files, told from the image and the running guest."""

from __future__ import annotations

import errno
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from emulated_kernel.errors import KernelError
from emulated_kernel.host.cpu_list import read_cpus
from emulated_kernel.host.guest import Guest
from emulated_kernel.host.guest_log import read_log
from emulated_kernel.host.memory_info import MemoryReader
from emulated_kernel.host.modules import Modules
from emulated_kernel.host.task_list import read_tasks
from emulated_kernel.image.image import KernelImage
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.traps import MemoryFault
from emulated_kernel.wiring.clock_switch import ClockSwitch
from emulated_kernel.wiring.loads import Loads

MAX_ARGUMENTS = 6


class MachineFiles:
    """Implements MachinePort."""

    def __init__(
        self,
        image: KernelImage,
        machine: Machine,
        guest: Guest,
        modules: Modules,
        clock: ClockSwitch,
        loads: Loads,
        profile: str,
    ) -> None:
        self._clock = clock
        self._loads = loads
        self._memory_reader = MemoryReader(machine.memory, image.kallsyms, image.abi)
        self._profile = profile
        self._modules = modules
        self._image = image
        self._memory = machine.memory
        self._per_cpu_areas = machine.per_cpu_bases
        self._guest = guest

    def version(self) -> str:
        """The banner, then the profile."""
        return f"{self._image.version.rstrip()}\nprofile {self._profile}"

    def kallsyms(self, zero_addresses: bool) -> Iterable[str]:
        return [self._image.kallsyms.kallsyms_text(zero_addresses)]

    def dmesg(self) -> Iterable[str]:
        """Raises: KernelError EIO where the guest has corrupted its log."""
        with _readable("log"):
            messages = list(read_log(self._memory, self._image.kallsyms))
        return [line for message in messages for line in message.lines()]

    def tasks(self) -> Iterable[str]:
        """Raises: KernelError EIO where the guest has corrupted its list."""
        with _readable("task list"):
            tasks = list(read_tasks(self._memory, self._image.kallsyms, self._image.abi))
        yield f"{'PID':>7} {'PPID':>7} {'UID':>6} STATE COMM\n"
        for task in tasks:
            yield f"{task.pid:>7} {task.parent:>7} {task.uid:>6} {task.state:<5} {task.comm}\n"

    def cpus(self) -> Iterable[str]:
        """Raises: KernelError EIO where the guest has corrupted its per-CPU areas."""
        with _readable("CPU's area"):
            cpus = list(read_cpus(self._memory, self._image.abi, self._per_cpu_areas))
        yield f"{'CPU':>3} {'STATE':<7} {'RUNNABLE':>8} {'SWITCHES':>9} {'INTERRUPTS':>10} {'PID':>7} COMM\n"
        for cpu in cpus:
            state = "dead" if self._guest.is_dead else "idle" if cpu.is_idle else "running"
            yield (
                f"{cpu.number:>3} {state:<7} {cpu.runnable:>8} {cpu.switches:>9} {cpu.interrupts:>10} "
                f"{cpu.task.pid:>7} {cpu.task.comm}\n"
            )

    def meminfo(self) -> Iterable[str]:
        """Raises: KernelError EIO where the guest has corrupted its lists."""
        with _readable("list of slab caches"):
            info = self._memory_reader.info()
        return info.text()

    def loads(self) -> Iterable[str]:
        return self._loads.text()

    def command_load(self, line: str) -> None:
        """Raises: as Loads.command; the kernel log says why."""
        with self._told("load"):
            self._loads.command(line)

    def clock(self) -> str:
        return self._clock.text()

    def command_clock(self, line: str) -> None:
        """Raises: as ClockSwitch.command; the kernel log says why."""
        with self._told("clock"):
            self._clock.command(line)

    @contextmanager
    def _told(self, file: str) -> Iterator[None]:
        """A process sees no more than an errno of what a write failed of."""
        try:
            yield
        except KernelError as error:
            self._guest.log(f"{file}: {error.strerror}")
            raise

    def modules(self, zero_addresses: bool) -> Iterable[str]:
        """Raises: KernelError EIO where the guest has corrupted its list."""
        return [module.line(zero_address=zero_addresses) for module in self._modules.loaded()]

    def command_module(self, line: str) -> None:
        """`load NAME`, `load PATH`, `unload NAME`.

        Raises: KernelError EINVAL (malformed), and as Modules.load, insert and unload.
        """
        match line.split(maxsplit=1):
            case ["load", name]:
                self._modules.load_or_insert(name)
            case ["unload", name]:
                self._modules.unload(name)
            case _:
                raise KernelError(errno.EINVAL, f"{line!r} is neither load NAME nor unload NAME")

    def call(self, line: str) -> str:
        """`FUNCTION ARG...`: numbers, strings in quotes; the result in hexadecimal and decimal.

        Raises: KernelError EINVAL (malformed), ERANGE (a number wider than a register), E2BIG (too many
        arguments), ENOENT (no such function), EFAULT (it oopsed, see dmesg), EIO (it doesn't come back).
        """
        name, *words = _split(line)
        if len(words) > MAX_ARGUMENTS:
            raise KernelError(errno.E2BIG, f"at most {MAX_ARGUMENTS} arguments")
        bits = 8 * self._memory.word_size
        value = self._guest.call_function(name, *(_argument(word, bits) for word in words))
        return f"{name} = {_result(value, bits)}"


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """What the guest did to its own data is no fault of ours."""
    try:
        yield
    except MemoryFault as fault:
        raise KernelError(errno.EIO, f"the {what} leads to {fault}") from fault


def _split(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=False, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError as error:
        raise KernelError(errno.EINVAL, str(error)) from error


def _result(value: int, bits: int) -> str:
    """A result register: nothing tells its C type, so a negative int is shown beside the whole."""
    if bits > 32 and value >> 31 == 1:
        return f"0x{value:x} ({value}, as an int {value - (1 << 32)})"
    return f"0x{value:x} ({value - (1 << bits) if value >> bits - 1 else value})"


def _argument(word: str, bits: int) -> int | str:
    if len(word) >= 2 and word[0] in "\"'" and word[-1] == word[0]:
        return word[1:-1]
    try:
        number = int(word, 0)
    except ValueError:
        raise KernelError(errno.EINVAL, f"{word!r} is neither a number nor a string in quotes") from None
    if not -(1 << bits - 1) <= number < 1 << bits:
        raise KernelError(errno.ERANGE, f"{word} doesn't fit into a register")
    return number
