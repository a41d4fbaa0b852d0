"""RunningKernel: reads a kernel's tables from its memory, for a dump of a kernel whose file is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from errno import ENODATA
from functools import cached_property

from emulated_kernel.image.address_set import AddressSet
from emulated_kernel.image.kallsyms import Kallsyms
from emulated_kernel.image.linux.kallsyms_tables import find_symbols
from emulated_kernel.image.linux.kernel_events import (
    KernelEvent,
    kernel_events,
    kernel_syscalls,
)
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.unusable import unmapped, unusable
from emulated_kernel.image.linux.vmlinux import LinkedMemory, LoadSegment
from emulated_kernel.image.text_tables import BlacklistEntry
from emulated_kernel.image.trace_events import SyscallDefinition
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import replace

_WORD = 8
_LIMIT = 1 << 16
"""Maximum number of entries of a list; a longer list is circular."""
_MAX_SITES = 1 << 20
"""Maximum number of ftrace records (struct dyn_ftrace) in all pages."""


class RunningMemory(LinkedMemory):
    """The memory of a kernel: its image, and all other memory that its page tables map."""

    def __init__(self, image: LoadSegment | None, read: Callable[[int, int], bytes]) -> None:
        """Store the kernel's image, and the function `read`, which returns the bytes at a virtual address.

        If `image` is None, `read` is called for all memory. Otherwise `read` is called only for addresses
        outside of the image. `read` raises MemoryFault if the memory is not mapped.
        """
        super().__init__(0, () if image is None else (image,), {})
        self._read = read

    def up_to(self, end: int) -> RunningMemory:
        """Return a copy whose image ends at `end`, rounded up to the end of a page."""
        image = self.segments[0]
        size = min(-(-(end - image.va) // PAGE_SIZE) * PAGE_SIZE, len(image.data))
        return RunningMemory(replace(image, data=image.data[:size], mem_size=size), self._read)

    def read(self, va: int, size: int) -> bytes:
        if super().has(va) and super().has(va + max(size, 1) - 1):
            return super().read(va, size)
        try:
            return self._read(va, max(size, 0))
        except MemoryFault:
            raise unusable(unmapped(va)) from None

    def has(self, va: int) -> bool:
        if super().has(va):
            return True
        try:
            return len(self._read(va, 1)) == 1
        except MemoryFault:
            return False

    def string(self, va: int, limit: int = 1 << 16) -> str:
        text = b""
        while len(text) < limit and b"\0" not in text:
            # The following page may be unmapped.
            at = va + len(text)
            text += self.read(at, min(PAGE_SIZE - at % PAGE_SIZE, limit - len(text)))
        return text.partition(b"\0")[0].decode("utf-8", "replace")


class RunningKernel(LinuxKernel):
    """A kernel with the tables that it keeps in memory, without the tables of its modules.

    Raises: KernelError ENOEXEC (there is no symbol table in memory), ENODATA (no BTF).
    """

    return_sites = AddressSet()

    def __init__(self, memory: RunningMemory) -> None:
        self.vmlinux: LinkedMemory = memory
        symbols = find_symbols(memory)
        if not symbols:
            raise unusable("no table of symbols (kallsyms) is in its memory")
        self._set_symbols(Kallsyms(symbols))
        end = self.kallsyms.lookup_name("_end") or self.text.end
        self.vmlinux = memory.up_to(end)
        self._image = range(memory.segments[0].va, end)

    def word(self, va: int) -> int:
        """Return the u64 at the virtual address `va`. Raises: KernelError ENOEXEC (it is not mapped)."""
        return int.from_bytes(self.vmlinux.read(va, _WORD), "little")

    def _list(self, head: str, member: str) -> Iterator[int]:
        """Yield the addresses of the structures in a list.

        `head`: symbol of the list_head. `member`: the list_head in each structure, as STRUCT.MEMBER.
        """
        start = self.required(head)
        offset = self.btf.offset(member)
        node = self.word(start)
        for _ in range(_LIMIT):
            if node == start:
                return
            yield node - offset
            node = self.word(node)
        raise unusable(f"its list {head} has no end")

    @cached_property
    def mcount(self) -> AddressSet:
        """Addresses of the fentry sites. Mirrors: kernel/trace/ftrace.c:ftrace_pages (v6.1)."""
        offset = self.btf.offset
        size = self.btf.size("dyn_ftrace")
        page = self.word(self.required("ftrace_pages_start"))
        sites = list[int]()
        for _ in range(_LIMIT):
            if not page:
                return AddressSet(filter(self._image.__contains__, sites))
            if len(sites) > _MAX_SITES:
                break
            records = self.word(page + offset("ftrace_page.records"))
            count = min(self._structures.value(page, "ftrace_page.index", 4), _LIMIT)
            data = self.vmlinux.read(records, count * size)
            at = offset("dyn_ftrace.ip")
            sites += [int.from_bytes(data[n : n + _WORD], "little") for n in range(at, len(data), size)]
            page = self.word(page + offset("ftrace_page.next"))
        raise unusable("its list of ftrace records has no end")

    @cached_property
    def blacklist(self) -> tuple[BlacklistEntry, ...]:
        """Functions that cannot be probed. Mirrors: kernel/kprobes.c:kprobe_blacklist (v6.1)."""
        found = []
        for entry in self._list("kprobe_blacklist", "kprobe_blacklist_entry.list"):
            start, end = (
                self._structures.value(entry, f"kprobe_blacklist_entry.{name}")
                for name in ("start_addr", "end_addr")
            )
            symbol = self.kallsyms.lookup(start)
            if symbol is not None and start in self._image:
                found.append(BlacklistEntry(start, end, symbol.name))
        return tuple(found)

    @cached_property
    def events(self) -> tuple[KernelEvent, ...]:
        """The kernel's trace events. Mirrors: kernel/trace/trace_events.c:ftrace_events (v6.1)."""
        calls = self._list("ftrace_events", "trace_event_call.list")
        # The kernel has already replaced the names of enumerators in these formats.
        return tuple(kernel_events(self._structures, tuple(filter(self._image.__contains__, calls)), ()))

    @cached_property
    def syscalls(self) -> tuple[SyscallDefinition, ...]:
        try:
            table = self.required("sys_call_table")
            metadata = self.word(self.required("syscalls_metadata"))
        except KernelError as error:
            raise KernelError(ENODATA, error.strerror or "") from None
        numbers = self._syscall_numbers(table)
        count = max(numbers.values(), default=-1) + 1
        entries = (self.word(metadata + _WORD * number) for number in range(count))
        return tuple(kernel_syscalls(self._structures, tuple(filter(None, entries)), numbers))
