"""Decoder of a kernel's trace events and system calls from its structures, whose layouts are in its BTF."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from errno import ENOENT

from emulated_kernel.image.linux.btf import Btf
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.image.linux.vmlinux import LinkedMemory
from emulated_kernel.image.trace_events import FieldDefinition, SyscallDefinition
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.lazy_pattern import lazy_pattern

_MAX_FIELDS = 256
_ARRAY = lazy_pattern(r"\[(\d+)\]$")
_TEXT_OR_NAME = lazy_pattern(r'"(?:\\.|[^"\\])*"|sizeof\([^()]*\)|[A-Za-z_]\w*')
_SYSCALL_PREFIXES = ("__x64_sys_", "__arm64_sys_", "__riscv_sys_", "__do_sys_", "__se_sys_", "sys_")
_MAX_SYSCALLS = 4096
_MAX_TEXT = 64 << 20
"""Maximum total length of all strings: in a damaged kernel, many pointers can lead to one long string."""
_NO_TRACEPOINT = (0, 0, 0, False)


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """A trace event of a kernel; `address` is the address of its struct trace_event_call."""

    address: int
    system: str
    name: str
    print_fmt: str
    """Print format of the event; empty if the kernel makes it at boot, as for system calls."""
    fields: tuple[FieldDefinition, ...]
    tracepoint: int
    """Address of the event's struct tracepoint; 0 if the event has no tracepoint."""
    probe: int
    """Address of the function that the tracepoint calls to write an event's record; 0 without tracepoint."""
    key: int
    """Address of the tracepoint's static key; 0 without tracepoint."""
    is_plain: bool
    """Whether the tracepoint has no functions to call when it is enabled or disabled (regfunc, unregfunc).

    False without tracepoint.
    """


class Structures:
    """Reader of structures in a kernel's memory. The kernel's BTF tells where the members are."""

    def __init__(self, vmlinux: LinkedMemory, btf: Btf) -> None:
        self.vmlinux = vmlinux
        self.btf = btf
        self._places: dict[str, tuple[int, int]] = {}
        self._left = _MAX_TEXT

    def value(self, address: int, path: str, size: int = 8) -> int:
        """Return the member `path` of the structure at `address`, as an unsigned number of `size` bytes."""
        place = self._places.get(path)
        if place is None:
            offset, member = self.btf.locate(path)
            place = offset, member.width
            self._places[path] = place
        offset, width = place
        if not width:
            return int.from_bytes(self.vmlinux.read(address + offset // 8, size), "little")
        raw = int.from_bytes(self.vmlinux.read(address + offset // 8, size), "little")
        return raw >> offset % 8 & (1 << width) - 1

    def text(self, address: int, path: str) -> str:
        """Return the string to which the member `path` of the structure at `address` points; "" for NULL."""
        pointer = self.value(address, path)
        return self.string(pointer) if pointer else ""

    def string(self, va: int) -> str:
        """Return the string at the address `va`.

        Raises: KernelError ENOEXEC (not in the kernel, or too many strings since begin()).
        """
        found = self.vmlinux.string(va)
        self._left -= len(found)
        if self._left < 0:
            raise unusable("its events have texts without end")
        return found

    def begin(self) -> None:
        """Reset the limit on the total length of strings, before another kernel or module is read."""
        self._left = _MAX_TEXT


def kernel_events(
    structures: Structures, calls: tuple[int, ...], maps: tuple[int, ...]
) -> Iterator[KernelEvent]:
    """Yield the events whose struct trace_event_call are at the addresses `calls`.

    `maps` are the addresses of struct trace_eval_map, which define constants in print formats.
    """
    structures.begin()
    constants = eval_maps(structures, maps)
    flag = _constant(structures.btf, "TRACE_EVENT_FL_TRACEPOINT")
    has_key = structures.btf.has("tracepoint.key") and structures.btf.has("trace_event_class.probe")
    for address in calls:
        system = _system(structures, address)
        values = constants.get(system, {})
        is_tracepoint = bool(structures.value(address, "trace_event_call.flags", 4) & flag)
        yield KernelEvent(
            address,
            system,
            _name(structures, address, is_tracepoint=is_tracepoint),
            with_values(structures.text(address, "trace_event_call.print_fmt"), values),
            tuple(_fields(structures, address, values)),
            *(_tracepoint(structures, address) if is_tracepoint and has_key else _NO_TRACEPOINT),
        )


def _constant(btf: Btf, name: str) -> int:
    """Return the value of the enumerator `name`, or 0 if the BTF lacks it."""
    try:
        return btf.constant(name)
    except KernelError as error:
        if error.errno != ENOENT:
            raise
        return 0


def eval_maps(structures: Structures, maps: tuple[int, ...]) -> dict[str, dict[str, int]]:
    """Return event system -> constant -> value, for the constants in the system's print formats.

    `maps`: addresses of struct trace_eval_map.
    """
    found: dict[str, dict[str, int]] = {}
    for address in maps:
        system = structures.text(address, "trace_eval_map.system")
        name = structures.text(address, "trace_eval_map.eval_string")
        value = structures.value(address, "trace_eval_map.eval_value")
        found.setdefault(system, {}).setdefault(name, value - (1 << 64) if value >> 63 else value)
    return found


def with_values(text: str, values: Mapping[str, int]) -> str:
    """Return `text`, a print format or a C type, with constants outside strings replaced by their `values`.

    Mirrors: kernel/trace/trace_events.c:update_event_printk (v6.1).
    """
    return _TEXT_OR_NAME.sub(lambda found: str(values.get(found[0], found[0])), text) if values else text


def _system(structures: Structures, address: int) -> str:
    event_class = structures.value(address, "trace_event_call.class")
    return structures.text(event_class, "trace_event_class.system")


def _tracepoint(structures: Structures, address: int) -> tuple[int, int, int, bool]:
    """Return the fields tracepoint, probe, key and is_plain of a KernelEvent.

    `address`: address of the event's struct trace_event_call.
    """
    has = structures.btf.has
    tracepoint = structures.value(address, "trace_event_call.tp")
    event_class = structures.value(address, "trace_event_call.class")
    key = tracepoint + structures.btf.offset("tracepoint.key")
    # Since 6.14 regfunc and unregfunc are in a separate structure.
    extra = next((path for path in ("tracepoint.regfunc", "tracepoint.ext") if has(path)), None)
    is_plain = extra is not None and not structures.value(tracepoint, extra)
    return tracepoint, structures.value(event_class, "trace_event_class.probe"), key, is_plain


def _name(structures: Structures, address: int, *, is_tracepoint: bool) -> str:
    """Return the name of the event whose struct trace_event_call is at `address`.

    `is_tracepoint`: the event has a tracepoint, whose name is also the event's. Otherwise the name is in the
    struct trace_event_call.
    Mirrors: include/linux/trace_events.h:trace_event_name (v6.1).
    """
    if is_tracepoint:
        tracepoint = structures.value(address, "trace_event_call.tp")
        return structures.text(tracepoint, "tracepoint.name")
    return structures.text(address, "trace_event_call.name")


def _fields(structures: Structures, address: int, values: Mapping[str, int]) -> Iterator[FieldDefinition]:
    """Yield the fields of the event whose struct trace_event_call is at `address`.

    The fields are in an array of the event's class. If a kernel function defines the fields of the class,
    yield none. `values`: constant -> value, for the constants in the fields' types.
    """
    event_class = structures.value(address, "trace_event_call.class")
    if not structures.btf.has("trace_event_class.fields_array"):
        return
    tells_length = structures.btf.has("trace_event_fields.len")
    at = structures.value(event_class, "trace_event_class.fields_array")
    step = structures.btf.size("trace_event_fields")
    for index in range(_MAX_FIELDS if at else 0):
        field = at + index * step
        kind = structures.value(field, "trace_event_fields.type")
        # Linux: the invalid address TRACE_FUNCTION_TYPE means that a kernel function defines the fields.
        if not kind or not structures.vmlinux.has(kind):
            return
        text = with_values(structures.string(kind), values)
        # Before v5.16, the length of an array is only in the text of its type.
        count = _ARRAY.search(text)
        length = (
            structures.value(field, "trace_event_fields.len", 4)
            if tells_length
            else int(count[1] if count else 0)
        )
        yield FieldDefinition(
            text,
            structures.text(field, "trace_event_fields.name"),
            structures.value(field, "trace_event_fields.size", 4),
            structures.value(field, "trace_event_fields.align", 4),
            bool(structures.value(field, "trace_event_fields.is_signed", 4)),
            length,
        )


def kernel_syscalls(
    structures: Structures, metadata: tuple[int, ...], numbers: Mapping[str, int]
) -> Iterator[SyscallDefinition]:
    """Yield the system calls whose struct syscall_metadata are at the addresses `metadata`.

    `numbers`: name of a system call without sys_ -> number. A system call that it lacks gets the number -1.
    """
    structures.begin()
    for address in metadata:
        name = structures.text(address, "syscall_metadata.name")
        count = min(structures.value(address, "syscall_metadata.nb_args", 4), 6)
        types, args = (
            tuple(
                structures.string(int.from_bytes(structures.vmlinux.read(array + 8 * each, 8), "little"))
                for each in range(count)
            )
            for array in (
                structures.value(address, f"syscall_metadata.{which}") if count else 0
                for which in ("types", "args")
            )
        )
        yield SyscallDefinition(numbers.get(name.removeprefix("sys_"), -1), name, types, args)


def syscall_numbers(
    vmlinux: LinkedMemory, table: int, names_at: Callable[[int], Sequence[str]]
) -> dict[str, int]:
    """Return name of a system call without sys_ -> number, from the sys_call_table at `table`.

    `names_at` returns the names of the symbols at an address.
    """
    found: dict[str, int] = {}
    for number in range(_MAX_SYSCALLS):
        try:
            entry = int.from_bytes(vmlinux.read(table + 8 * number, 8), "little")
        except KernelError:
            break
        symbols = names_at(entry)
        if not symbols:
            break
        for symbol in symbols:
            for prefix in _SYSCALL_PREFIXES:
                if symbol.startswith(prefix):
                    found.setdefault(symbol.removeprefix(prefix), number)
                    break
    return found
