"""Engine: a ctypes binding of libunicorn.

Unicorn's own Python binding takes 2 us for each access to a register, and 40 ms for its import.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import mmap
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from types import FrameType
from typing import TypeVar

from emulated_kernel.machine import pending_sigint
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import KernelError

ARCH_ARM64 = 2
ARCH_X86 = 4
ARCH_RISCV = 8
MODE_ARM = 0
MODE_32 = 1 << 2
MODE_64 = 1 << 3
MODE_RISCV64 = 1 << 3
PROT_ALL = 7
HOOK_INTR = 1 << 0
HOOK_INSN = 1 << 1
HOOK_CODE = 1 << 2
HOOK_BLOCK = 1 << 3
HOOK_INSN_INVALID = 1 << 14

_CTL_WRITE = 1 << 30
_CTL_CPU_MODEL = _CTL_WRITE | 1 << 26 | 7
_CTL_USE_EXITS = _CTL_WRITE | 1 << 26 | 4
_CTL_EXITS = _CTL_WRITE | 2 << 26 | 6
_CTL_REMOVE_CACHE = _CTL_WRITE | 2 << 26 | 9
_CTL_FLUSH_TB = _CTL_WRITE | 10
_CTL_FLUSH_TLB = _CTL_WRITE | 11
_CTL_TCG_BUFFER_SIZE = _CTL_WRITE | 1 << 26 | 13
TRANSLATED = 16 << 20
"""Size in bytes of the buffer for translated code. By default, code fills one GiB before any is freed."""

# Callbacks for traps use neither the pointer to the engine nor the pointer to the data. Both are narrowed,
# because Python makes no object for a small number.
INTR_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint8)
INSN_INVALID_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_uint8, ctypes.c_uint8)
CODE_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p)
ADDRESS_CALLBACK = ctypes.CFUNCTYPE(None)
"""Type of callbacks for HOOK_CODE at a known address. To save time, they take no arguments."""

INSN_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
"""Type of callbacks for the instructions rdtsc and syscall.

For rdtsc, the callback returns 1 if it has emulated the instruction. For syscall, the result is ignored.
"""
IN_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_void_p
)
OUT_CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p
)
SYSTEM_REGISTER_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p
)
"""Type of callbacks for mrs and msr, which return 1 if they emulated the instruction."""
_READ_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint, ctypes.c_void_p
)
_WRITE_CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint, ctypes.c_uint64, ctypes.c_void_p
)

_Raw = TypeVar("_Raw", bound=ctypes.Structure)
_LIBRARIES = {"darwin": "libunicorn.2.dylib"}


def _library_path() -> str:
    """Return the path of libunicorn in Unicorn's Python package, without importing the package.

    The directory that the environment variable LIBUNICORN_PATH names is searched first. If the library is in
    neither place, return its file name, for the dynamic linker.
    """
    name = _LIBRARIES.get(sys.platform, "libunicorn.so.2")
    spec = importlib.util.find_spec("unicorn")
    places = [os.environ.get("LIBUNICORN_PATH", "")]
    if spec is not None:
        places += [os.path.join(place, "lib") for place in spec.submodule_search_locations or ()]
    paths = [os.path.join(place, name) for place in places if place]
    return next((path for path in paths if os.path.exists(path)), name)


def library_release() -> int:
    """Return Unicorn's version as a number with four bytes: major, minor, patch and extra.

    Raises: OSError (there is no library).
    """
    return int(ctypes.PyDLL(_library_path()).uc_version(None, None))


class CodeCache(ABC):
    """Interface of a cache of translated code, which must be dropped when text changes."""

    @abstractmethod
    def remove_cache(self, start: int, end: int) -> None:
        """Drop the code translated from the virtual addresses [start, end), which must be in one page."""

    def remove_code(self, va: int, size: int) -> None:
        """Drop the code translated from `size` bytes at the virtual address `va`, page by page.

        Unicorn: remove_cache() looks up only the physical page of the first address, so it is called for each
        page.
        """
        end = va + size
        while va < end:
            stop = min(end, va - va % PAGE_SIZE + PAGE_SIZE)
            self.remove_cache(va, stop)
            va = stop

    @abstractmethod
    def flush_code(self) -> None:
        """Drop all translated code."""


class Engine(CodeCache):
    """A uc_engine, an instance of the emulator. Most methods are a single call of the library.

    A parameter `register` is Unicorn's number of a register.

    Short calls keep the GIL (PyDLL). `start` releases the GIL, so that other threads run while the guest
    runs.
    Raises: HardwareError (Unicorn is missing, or a call fails).
    """

    def __init__(self, arch: int, mode: int, cpu_model: int | None = None) -> None:
        """Open an engine for Unicorn's architecture `arch` and mode `mode`.

        `cpu_model` is Unicorn's id of a CPU model, or None for the default model.
        """
        path = _library_path()
        try:
            held = ctypes.PyDLL(path)
            self._held = held
            self._released = ctypes.CDLL(path)
        except OSError as error:
            raise HardwareError(f"no unicorn library: {error}") from error
        self._keep: list[object] = []
        handle = ctypes.c_void_p()
        self._check(held.uc_open(arch, mode, ctypes.byref(handle)), "uc_open")
        assert handle.value is not None
        self.address: int = handle.value
        self.handle = handle
        self.exit_switch: memoryview | None = None
        """View of Unicorn's field no_exit_request; None if it was not found, or if its self-test failed.

        The field is 1 while runs are stopped only between blocks, else 0.
        """
        self.is_held = False
        """Whether a debugger holds the guest, which must not run then."""
        self.parked: BaseException | None = None
        """Exception that a callback raised, stored until TrapHooks.check() raises it; else None."""
        self.is_interrupted = False
        """Whether a SIGINT arrived during a run. Code that runs the guest then calls raise_interrupt()."""
        self._bind()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # signal() raises ValueError in other threads; only the main thread runs signal handlers.
            with suppress(ValueError):
                signal.signal(signal.SIGINT, _on_interrupt)
                pending_sigint.watch()
        if cpu_model is not None:
            self._check(held.uc_ctl(handle, _CTL_CPU_MODEL, cpu_model), "uc_ctl_set_cpu_model")
        self._check(held.uc_ctl(handle, _CTL_TCG_BUFFER_SIZE, TRANSLATED), "uc_ctl_set_tcg_buffer_size")
        self._check(held.uc_ctl(handle, _CTL_USE_EXITS, 1), "uc_ctl_exits_enable")
        self._check(held.uc_ctl(handle, _CTL_EXITS, None, ctypes.c_size_t(0)), "uc_ctl_set_exits")

    def _bind(self) -> None:
        """Declare the argument types of the library's functions.

        Then calls with plain integers are correct and fast.
        """
        u64 = ctypes.c_uint64
        ptr = ctypes.c_void_p
        self._reg_read = self._held.uc_reg_read
        self._reg_write = self._held.uc_reg_write
        self._cell = ctypes.c_uint64()
        self._cell_pointer = ctypes.byref(self._cell)
        self._emu_start = self._released.uc_emu_start
        self._emu_start.argtypes = (ptr, u64, u64, u64, ctypes.c_size_t)
        self._emu_stop = self._held.uc_emu_stop
        self._ctl = self._held.uc_ctl
        self._remove_cache = self._held["uc_ctl"]
        self._remove_cache.argtypes = (ptr, ctypes.c_int, u64, u64)
        self._context_save = self._held.uc_context_save
        self._context_restore = self._held.uc_context_restore
        self._context_reg_read = self._held.uc_context_reg_read
        self._context_reg_write = self._held.uc_context_reg_write

    def _check(self, error: int, what: str) -> None:
        if error:
            raise HardwareError(f"{what}: {self.strerror(error)}")

    def strerror(self, error: int) -> str:
        """Return Unicorn's message for a uc_err."""
        function = self._held.uc_strerror
        function.restype = ctypes.c_char_p
        return str(function(error).decode())

    @property
    def version(self) -> tuple[int, int]:
        """Version of Unicorn: major and minor number."""
        packed = int(self._held.uc_version(None, None))
        return packed >> 24, packed >> 16 & 0xFF

    def reg_read(self, register: int) -> int:
        """Return the value of a register of up to 64 bits."""
        self._cell.value = 0
        self._reg_read(self.handle, register, self._cell_pointer)
        return self._cell.value

    def reg_write(self, register: int, value: int) -> None:
        """Set a register of up to 64 bits.

        In a hook, a write of the program counter makes the CPU leave the current block.
        """
        self._cell.value = value
        self._reg_write(self.handle, register, self._cell_pointer)

    def reg_write_raw(self, register: int, value: ctypes.Structure) -> None:
        """Set a register that is a structure (descriptor tables, model-specific registers)."""
        self._check(self._reg_write(self.handle, register, ctypes.byref(value)), f"uc_reg_write({register})")

    def reg_read_raw(self, register: int, value: _Raw) -> _Raw:
        """Return the contents of a register that is a structure.

        `value`: structure that selects the register; it is filled and returned.
        """
        self._check(self._reg_read(self.handle, register, ctypes.byref(value)), f"uc_reg_read({register})")
        return value

    def map_ram(self, address: int, ram: mmap.mmap) -> int:
        """Map `ram` as physical memory at `address`; return its address in this process."""
        buffer = (ctypes.c_char * len(ram)).from_buffer(ram)
        self._keep.append(buffer)
        where = ctypes.addressof(buffer)
        function = self._held.uc_mem_map_ptr
        function.argtypes = (
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_size_t,
            ctypes.c_uint32,
            ctypes.c_void_p,
        )
        self._check(function(self.handle, address, len(ram), PROT_ALL, where), "uc_mem_map_ptr")
        return where

    def map_device(
        self, address: int, size: int, read: Callable[[int], int], write: Callable[[int, int], None]
    ) -> None:
        """Map `size` bytes of device registers at a physical address.

        A load from a register calls `read` with the register's offset, and `read` returns the value. A store
        calls `write` with the offset and the new value.
        """

        def reading(_engine: int, offset: int, _size: int, _data: int) -> int:
            return read(offset)

        def writing(_engine: int, offset: int, _size: int, value: int, _data: int) -> None:
            write(offset, value)

        callbacks = _READ_CALLBACK(reading), _WRITE_CALLBACK(writing)
        self._keep.append(callbacks)
        function = self._held.uc_mmio_map
        where = ctypes.c_uint64(address), ctypes.c_size_t(size)
        error = function(self.handle, *where, callbacks[0], None, callbacks[1], None)
        self._check(int(error), "uc_mmio_map")

    def add_hook(
        self,
        kind: int,
        callback: object,
        *,
        at: int | range | None = None,
        instruction: int | None = None,
        data: int | None = None,
        keep: tuple[object, ...] = (),
    ) -> ctypes.c_void_p:
        """Register a ctypes callback of the kind `kind` (a HOOK constant), and keep the callback alive.

        `at`: an address or a range of addresses; None for all addresses. `instruction` is Unicorn's number of
        an instruction, for HOOK_INSN. `callback` can also be the address of host code, which gets the address
        `data` as an argument. `keep`: objects that the callback uses; they are kept alive, too. Return the
        handle of the hook, for remove_hook().
        """
        self._keep += (callback, *keep)
        hook = ctypes.c_void_p()
        if at is None:
            # All addresses.
            begin = 1
            end = 0
        elif isinstance(at, int):
            begin = at
            end = at
        else:
            begin = at[0]
            end = at[-1]
        more = () if instruction is None else (ctypes.c_int(instruction),)
        error = self._held.uc_hook_add(
            self.handle,
            ctypes.byref(hook),
            kind,
            callback,
            ctypes.c_void_p(data),
            ctypes.c_uint64(begin),
            ctypes.c_uint64(end),
            *more,
        )
        self._check(error, "uc_hook_add")
        return hook

    def remove_hook(self, hook: ctypes.c_void_p) -> None:
        """Remove a hook that add_hook() has returned.

        The caller must also drop the translated code that calls the hook.
        """
        self._check(self._held.uc_hook_del(self.handle, hook), "uc_hook_del")

    @contextmanager
    def stopped_at(self, address: int) -> Iterator[None]:
        """Stop each run that reaches `address` during the `with` block.

        At the end of the block, drop all translated code.
        """
        hook = self.add_hook(HOOK_CODE, CODE_CALLBACK(lambda *_: self.stop()), at=address)
        try:
            yield
        finally:
            self.remove_hook(hook)
            self.flush_code()

    def start(self, address: int) -> int:
        """Run from `address` until the guest halts or is stopped; return the uc_err.

        Raises: KernelError EBUSY (a debugger holds the guest).
        """
        if self.is_held:
            raise KernelError(errno.EBUSY, "a debugger holds the guest")
        return int(self._emu_start(self.handle, address, 0, 0, 0))

    def is_interrupted_again(self) -> bool:
        """Return True if a second SIGINT has arrived while the main thread runs the guest.

        Any thread may call this method.
        """
        if signal.getsignal(signal.SIGINT) is not _on_interrupt:
            return False
        return self.is_interrupted + pending_sigint.pending() > 1

    def raise_interrupt(self) -> None:
        """Raise KeyboardInterrupt for the SIGINT noted in `is_interrupted`."""
        self.is_interrupted = False
        raise KeyboardInterrupt

    def stop(self) -> None:
        """End the current run, from any thread. Where the run ends depends on `stops_between_blocks`."""
        self._emu_stop(self.handle)

    @property
    def stop_address(self) -> int:
        """Address of the library's function that stop() calls, so that code of the host can call it."""
        return ctypes.cast(self._emu_stop, ctypes.c_void_p).value or 0

    @property
    def stops_between_blocks(self) -> bool:
        """Whether runs are stopped only between blocks. If not, effects of instructions can be repeated."""
        return self.exit_switch is not None and bool(self.exit_switch[0])

    def stop_between_blocks(self, only: bool) -> None:
        """Select where a requested stop of a run takes effect.

        If `only` is True, this is only between blocks, otherwise also after a hook or a memory access.

        If `exit_switch` is None, do nothing: runs then also stop after hooks and accesses.
        """
        if self.exit_switch is not None:
            self.exit_switch[0] = int(only)
            self.flush_code()

    def remove_cache(self, start: int, end: int) -> None:
        self._remove_cache(self.handle, _CTL_REMOVE_CACHE, start, end)

    def flush_code(self) -> None:
        self._ctl(self.handle, _CTL_FLUSH_TB)

    def flush_tlb(self) -> None:
        """Drop all cached address translations."""
        self._ctl(self.handle, _CTL_FLUSH_TLB)

    def context_alloc(self) -> ctypes.c_void_p:
        """Return a new buffer for `context_save`. The buffer is never freed."""
        context = ctypes.c_void_p()
        self._check(self._held.uc_context_alloc(self.handle, ctypes.byref(context)), "uc_context_alloc")
        return context

    @cached_property
    def _scratch_context(self) -> ctypes.c_void_p:
        return self.context_alloc()

    def context_size(self) -> int:
        """Return the size of a saved context in bytes."""
        function = self._held.uc_context_size
        function.restype = ctypes.c_size_t
        return int(function(self.handle))

    def saved_context(self) -> bytes:
        """Return the CPU state as bytes, for `restore_context` in an engine of this library and CPU model."""
        context = self._scratch_context
        self.context_save(context)
        assert context.value is not None
        return ctypes.string_at(context.value, self.context_size())

    def restore_context(self, saved: bytes) -> None:
        """Restore the CPU state `saved`, a result of saved_context().

        Raises: HardwareError (`saved` has the wrong size).
        """
        context = self._scratch_context
        if len(saved) != self.context_size():
            raise HardwareError("saved CPU state: wrong size")
        assert context.value is not None
        ctypes.memmove(context.value, saved, len(saved))
        self.context_restore(context)
        self.flush_tlb()

    def context_save(self, context: ctypes.c_void_p) -> None:
        """Copy the CPU state into `context`."""
        self._check(self._context_save(self.handle, context), "uc_context_save")

    def context_restore(self, context: ctypes.c_void_p) -> None:
        """Set the CPU state from `context`."""
        self._check(self._context_restore(self.handle, context), "uc_context_restore")

    def context_read(self, context: ctypes.c_void_p, register: int) -> int:
        """Return the value of a register of up to 64 bits in a saved context."""
        self._cell.value = 0
        self._check(self._context_reg_read(context, register, self._cell_pointer), "uc_context_reg_read")
        return self._cell.value

    def context_write(self, context: ctypes.c_void_p, register: int, value: int) -> None:
        """Set a register of up to 64 bits in a saved context."""
        self._cell.value = value
        self._check(self._context_reg_write(context, register, self._cell_pointer), "uc_context_reg_write")

    def close(self) -> None:
        """Free the engine, which must not be used afterwards."""
        if self.handle:
            self._held.uc_close(self.handle)
            self.handle = ctypes.c_void_p()
            self._keep.clear()


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT. The first one during a run only sets Engine.is_interrupted; the run goes on.

    A second one ends the run. Without a run, raise KeyboardInterrupt at once.

    Most signals arrive while Unicorn runs. Without this handler, KeyboardInterrupt would be raised at the
    entry of the next callback, before its `try`: ctypes would print it, and the guest would lose that trap.
    """
    callback = None
    at = frame
    while at is not None and at.f_code is not Engine.start.__code__:
        callback = at
        at = at.f_back
    engine = None if at is None else at.f_locals["self"]
    if engine is None:
        pending_sigint.take()
        signal.default_int_handler(number, frame)
    came = engine.is_interrupted + pending_sigint.take()
    engine.is_interrupted = came == 1
    if came > 1:
        if callback is None or callback is not frame:
            signal.default_int_handler(number, frame)
        engine.parked = KeyboardInterrupt()
        engine.stop()
