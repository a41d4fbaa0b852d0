"""FrameTables: the layout of a function's stack frame at each of its instructions, by analysis of its code.

Mirrors: arch/x86/kernel/unwind_orc.c (v6.1), whose tables are made when the kernel is built.
Deviates: the analysis also covers modules, other kernels, and code that the host added, such as trampolines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from random import Random

from emulated_kernel.arch.analysis.stack_frames import CFA, IP, Frame, FunctionFrames, find_frames
from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.kprobes.hit.ftrace import FTRACE_TRAMPOLINE
from emulated_kernel.kprobes.return_hook.hook_sets import COLD_PART, HookSets
from emulated_kernel.kprobes.return_hook.trampoline import Trampoline
from emulated_kernel.machine.text.text import Text
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.util.fast_dataclass import replace

_MAX_CACHED = 2000
"""Maximum number of cached functions, and of detours. Each takes about 8 kB, and 4 ms to analyse."""


class FrameTables:
    """Cache of the layouts of functions' stack frames, by symbol; a change of the symbol table empties it."""

    def __init__(
        self, text: Text, image: ProbedTables, symbols: KernelSymbols, arch: Arch, hook_sets: HookSets
    ) -> None:
        self._text = text
        self._image = image
        self._symbols = symbols
        self._arch = arch
        self._hook_sets = hook_sets
        self._version = -1
        self._found: dict[Symbol, FunctionFrames | None] = {}
        self._dice = Random(1)
        """Random numbers that choose a function to evict.

        For repeated call chains, evicting the oldest function would be worst.
        """
        self._solve_detour = lru_cache(_MAX_CACHED)(self._solve_detour_code)

    def of(self, symbol: Symbol) -> FunctionFrames | None:
        """Return the frame layouts of the function `symbol`.

        Return None for data, and for the functions in Arch.unwind_roots, at which call chains end.
        """
        if self._version != self._symbols.version:
            self._version = self._symbols.version
            self._found = {}
            self.__dict__.pop("_ways", None)
        if symbol not in self._found:
            if len(self._found) >= _MAX_CACHED:
                del self._found[self._dice.choice(list(self._found))]
            self._found[symbol] = None
            self._found[symbol] = self._find(symbol)
        return self._found[symbol]

    def of_detour(self, entry: int, span: range) -> FunctionFrames:
        """Return the frame layouts of a detour or stub, which restores all registers before it ends.

        `entry`: address at which execution enters the code. `span`: addresses of the code.
        """
        return self._solve_detour(entry, span.start, self._text.current(span.start, len(span)))

    def _solve_detour_code(self, entry: int, start: int, code: bytes) -> FunctionFrames:
        return self._solve(start, code, {entry: self._arch.detour_entry()}, True)

    def _find(self, symbol: Symbol) -> FunctionFrames | None:
        start = symbol.address
        if symbol.name in self._arch.unwind_roots or not symbol.is_text:
            return None
        if symbol.name == FTRACE_TRAMPOLINE:
            code = self._text.current(start, symbol.size)
            return self._solve(start, code, {start: self._arch.traced_entry()}, True)
        for _, trampoline in self._hook_sets.trampolines():
            if start == trampoline.address:
                return self._of_trampoline(trampoline)
        return self._of_function(symbol)

    def _of_function(self, symbol: Symbol) -> FunctionFrames:
        start = symbol.address
        by_interrupt = symbol.name in self._arch.interrupt_entries
        entries: Mapping[int, Frame] = {start: self._arch.entry_frame(by_interrupt=by_interrupt)}
        for whole in self._wholes(symbol):
            frames = self.of(whole)
            inside = {} if frames is None else _exits_to(frames, range(start, start + symbol.size))
            if frames is not None and inside:
                entries = inside
                by_interrupt = frames.by_interrupt
        code = self._text.original(start, symbol.size)
        switches_stack = symbol.name in self._arch.stack_switches
        return self._solve(start, code, entries, by_interrupt, switches_stack=switches_stack)

    def _solve(
        self,
        start: int,
        code: bytes,
        entries: Mapping[int, Frame],
        by_interrupt: bool,
        *,
        switches_stack: bool = False,
    ) -> FunctionFrames:
        insns = dict(self._arch.frame_insns(code, start, switches_stack=switches_stack))
        entries = {at: frame for at, frame in entries.items() if at in insns}
        return find_frames(insns, entries, self._ways, self._arch.registers.sp, by_interrupt)

    def _of_trampoline(self, trampoline: Trampoline) -> FunctionFrames:
        """Return the frame layouts of a return trampoline. It is never called: hooked functions return to it.

        The real return address is on the shadow stack. The stack or the link register holds the trampoline's
        own address. Later the trampoline's handler stores the real return address in the stack slot from
        which the trampoline's last instruction takes it.
        """
        arch = self._arch
        in_register = arch.registers.link is not None
        entry = arch.entry_frame(by_interrupt=False)
        entry.regs[arch.registers.sp] = (CFA, 0)
        code = self._text.current(trampoline.address, trampoline.size)
        insns = {
            at: replace(insn, effect=partial(_filled_in, insn.effect, arch.trampoline_slot))
            if not in_register or at + insn.length == trampoline.filled_in
            else insn
            for at, insn in arch.frame_insns(code, trampoline.address, switches_stack=False)
        }
        entries = {trampoline.address: entry}
        return find_frames(insns, entries, {}, arch.registers.sp, by_interrupt=False)

    def _wholes(self, symbol: Symbol) -> Sequence[Symbol]:
        """Return the functions that the code of `symbol` may be a part of, and that may jump to this code.

        A cold part belongs to the function that the compiler has split. A label in assembly belongs to the
        function before the label. For other symbols, the result is empty.
        """
        cold = COLD_PART.search(symbol.name)
        if cold is not None:
            return self._image.kallsyms.by_name(symbol.name[: cold.start()])
        if symbol.address in self._entry_text:
            before = self._symbols.lookup(symbol.address - 1)
            return () if before is None else (before.symbol,)
        return ()

    @cached_property
    def _ways(self) -> Mapping[int, Sequence[int]]:
        """Address of an instruction -> further addresses where execution may continue after it.

        These are the targets of jump labels that may be patched in, and the fixups of instructions that
        fault.
        """
        ways: dict[int, list[int]] = {}
        for code, target, _ in self._image.jump_labels:
            ways.setdefault(code, []).append(target)
        for insn, fixup in self._image.ex_table:
            ways.setdefault(insn, []).append(fixup)
        return ways

    @cached_property
    def _entry_text(self) -> range:
        """Addresses of the entry text, whose assembly functions contain labels that are symbols."""
        names = ("__entry_text_start", "__entry_text_end")
        start, end = (self._image.kallsyms.lookup_name(name) for name in names)
        return range(start or 0, end or 0)


def _exits_to(frames: FunctionFrames, part: range) -> Mapping[int, Frame]:
    """Return a map for a function's jumps into `part`, such as its cold part: target address -> frame."""
    return {at: frame for at, frame in frames.exits.items() if at in part}


def _filled_in(effect: Callable[[Frame], None], slot: int, frame: Frame) -> None:
    """Change `frame` by the `effect` of an instruction, and by the handler's store of the return address.

    After this instruction of a return trampoline, only the stack slot at offset `slot` from the CFA holds the
    real return address, because the trampoline's handler has stored it there.
    """
    effect(frame)
    frame.regs = {name: value for name, value in frame.regs.items() if value[0] != IP}
    frame.slots = {at: value for at, value in frame.slots.items() if value[0] != IP}
    frame.slots[CFA, slot] = (IP, 0)
