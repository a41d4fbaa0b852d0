"""Files of one value, as in sysfs and /proc/sys: a read shows the value, and a write stores it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from emulated_kernel.vfs.core.open_file import File, Moves, OpenFile, Steps, encode
from emulated_kernel.vfs.core.shared_text import SharedText, shared

Store = Callable[[bytes], None]
"""Function that executes a write of some bytes, and always takes all of them.

Raises: KernelError (the errno of the write(2)).
"""


class _OpenAttribute(OpenFile):
    node: AttributeFile
    _text: SharedText | None = None

    def _read(self, size: int, position: int) -> bytes:
        if self.node.show is None:
            return super()._read(size, position)
        if position == 0 or self._text is None:
            self._text = shared(encode(self.node.show()))
        return self._text.data[position : position + size]

    def _write(self, data: bytes) -> int:
        if self.node.store is None:
            return super()._write(data)
        self.node.store(data)
        # If a client has read a part of the old text, its next read continues in the text of the new value.
        self._text = None
        return len(data)


class AttributeFile(File):
    """A file of one value. A read at offset 0 renders the value as text; later reads return the rest of it.

    If `show` is None, read(2) returns EINVAL. If `store` is None, write(2) returns EINVAL.
    """

    opened_as = _OpenAttribute
    __slots__ = ("show", "store")

    def __init__(
        self,
        mode: int,
        show: Callable[[], str] | None,
        store: Store | None = None,
        moves: Moves = Moves.BY_BYTES,
    ) -> None:
        super().__init__(mode, moves)
        self.show = show
        self.store = store


class UnseekableAttribute(AttributeFile):
    """An AttributeFile on which lseek(2) fails, because its file_operations in Linux have no llseek."""

    has_position = False
    __slots__ = ()


class _OpenSteppedAttribute(_OpenAttribute):
    node: SteppedAttribute

    def _write_steps(self, data: bytes) -> Steps:
        yield from self.node.store_steps(data)
        return len(data)


class SteppedAttribute(AttributeFile):
    """An AttributeFile whose writes take effect in steps. Other requests may run between two steps."""

    opened_as = _OpenSteppedAttribute
    __slots__ = ("store_steps",)

    def __init__(
        self, mode: int, show: Callable[[], str], store_steps: Callable[[bytes], Iterator[None]]
    ) -> None:
        super().__init__(mode, show)
        self.store_steps = store_steps


class _OpenOneRead(_OpenAttribute):
    def _read(self, size: int, position: int) -> bytes:
        return b"" if position else super()._read(size, position)


class OneReadFile(AttributeFile):
    """A file of one value. Only a read at position 0 returns text.

    Text that does not fit into the buffer of this read is not returned by later reads. The file `filter` of
    an event behaves like this.
    Mirrors: kernel/trace/trace_events.c:event_filter_read (v6.1).
    """

    opened_as = _OpenOneRead
    __slots__ = ()


class _OpenSysctl(_OpenOneRead):
    def _write(self, data: bytes) -> int:
        return len(data) if self._write_at else super()._write(data)


class SysctlFile(OneReadFile):
    """A file of /proc/sys. At a position other than 0, a read returns nothing, and a write is ignored.

    This is the behaviour of Linux if the sysctl kernel.sysctl_writes_strict has its default value, 1.
    Mirrors: kernel/sysctl.c:__do_proc_dointvec, proc_first_pos_non_zero_ignore (v6.1).
    """

    opened_as = _OpenSysctl
    __slots__ = ()
