"""Call a real kernel's functions with random arguments, in all modes: python -m stress.linux.transparency.

A function is called from the idle loop, like from other code of the kernel. It ends by its return or by an
exception. Afterwards, registers and memory must be the same with and without probes on its instructions.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import tests.own_thread  # noqa: F401 - for kernels in this process
from emulated_kernel.guests.linux.boot.boot_protocol import HOST_SIZE
from emulated_kernel.guests.linux.guest.linux_task import THREAD_SIZE
from emulated_kernel.guests.linux.probing.linux_context import linux_abi
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.machine.cpu.riscv import CAUSE_ECALL, CAUSE_ILLEGAL
from emulated_kernel.machine.cpu.x86 import FLAG_FIXED, FLAG_IF
from emulated_kernel.machine.traps.trap import GuestFault, MemoryFault, Trap
from emulated_kernel.machine.unicorn_engine import CODE_CALLBACK, HOOK_BLOCK
from emulated_kernel.util.abi import Prot
from emulated_kernel.util.errors import KernelError
from stress.linux.everywhere import functions
from tests.guests.linux.probing import (
    GUEST_RAM,
    IS_ARM,
    IS_RISCV,
    MODES,
    PLAIN,
    armed,
    boundaries,
    chosen,
    disarmed,
    engine,
    kernel,
)
from tests.guests.linux.prototypes import Prototype, prototype
from tests.guests.linux.rewind import PAGE, Rewind
from tests.guests.linux.traced import TRACED, Traced, time_stands
from tests.kprobes.optimizer.regions import undefined_flags

PROBED = tuple(mode for mode in MODES if mode != "ftrace")
BATCH = 50
"""Number of functions that are armed together."""
RETURN = 0xFFFFFFFF70400000
"""Unmapped address to which the called functions return, so that a fault ends the call."""
STACK = 64 << 10
"""Size of the stack for calls in bytes."""
IRQ_STACK = 16 << 10
"""Size of the guest's interrupt stack in bytes."""
OBJECT = 4096
"""Size in bytes of the object that an argument can point to."""
ARGUMENTS: tuple[str, ...] = ("di", "si", "dx", "cx", "r8", "r9")
RESULTS: tuple[str, ...] = ("ax",)
SAVED: tuple[str, ...] = ("bx", "bp", "r12", "r13", "r14", "r15")
"""Registers that a function restores before it returns, except the stack pointer."""
OTHERS: tuple[str, ...] = ("r10", "r11")
if IS_RISCV:
    ARGUMENTS = tuple(f"a{number}" for number in range(8))
    RESULTS = ("a0", "a1")
    SAVED = tuple(f"s{number}" for number in range(12))
    OTHERS = tuple(f"t{number}" for number in range(7))
if IS_ARM:
    RETURN = 0xFFFF400060400000
    ARGUMENTS = tuple(f"x{number}" for number in range(8))
    RESULTS = ("x0", "x1")
    SAVED = tuple(f"x{number}" for number in range(19, 30))
    OTHERS = (*(f"x{number}" for number in range(8, 19)), "x30")
OBJECTS = RETURN + 0x400000
"""Address of the objects. The memory around them is not mapped, so reads beyond them fault in all modes."""
OBJECTS_SIZE = OBJECT * len(ARGUMENTS)
STACK_AT = RETURN + 0x800000
"""Address of the stack for calls."""
CLEARED = tuple(dict.fromkeys((*ARGUMENTS, *RESULTS, *SAVED, *OTHERS)))
"""Registers that are 0 at the beginning of a call, except those with its arguments."""
REGISTERS = (*CLEARED, "sp", "flags")
RESTORED = (*SAVED, "sp")
KEPT = (*RESULTS, *RESTORED)
"""Registers whose values callers of C functions use after a return.

Tracers follow only C functions, so a tracer may change other registers.
"""
WORD = (1 << 64) - 1
RETURNED = "its return"
_ECALL = 0x73
_CSR = 0xFFFFF07F
"""Mask of an instruction's bits without its destination register, to recognize reads of a CSR."""
_RDTIME = 0xC0102073
COPIES = "arch_dup_task_struct"
"""Function that copies the task_struct of a task that forks, to the address in its first argument."""
PENDING = ("task_struct.rethooks", "task_struct.ret_stack")
"""Names of the fields in which shadow stacks keep the pending calls of a task."""
SWITCH = "__switch_to"
"""Function that switches from a task to another one."""
DUMPS = ("show_trace_log_lvl", "show_regs_print_info", "show_stack", "dump_backtrace")
"""Functions that print unused words of the stack, or the callers. Tracers leave different values there."""
OVERWRITTEN = b"\xa5" * 1024
"""Bytes that overwrite the memory below the stack pointer; they take more space than the frame of a hit."""
SHORT = 0.02
"""Maximum time of an unprobed call in seconds."""
LONG = 20.0
"""Maximum time of a probed call in seconds; each of its instructions may trap."""
NUMBERS = (0, 1, 2, 3, 7, 8, 63, 64, 255, 4095, 4096, 1 << 20, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 64) - 1)
TEXTS = (b"", b"a", b"12", b"-7", b"0x1f", b"hello, world", b"a,b=c d", b"/scratch/file", b"%s %d\n")


@dataclass(frozen=True)
class Call:
    """A function with values of its arguments, and the contents of objects to which some arguments point."""

    function: int
    values: tuple[int, ...]
    objects: tuple[bytes, ...]


@dataclass(frozen=True)
class Effect:
    """Effect of a call: the way in which it ended, the registers, and the changed memory."""

    end: str
    registers: tuple[int, ...]
    memory: dict[int, bytes]
    """Physical address -> contents of changed pages."""
    pending: frozenset[int] = frozenset()
    """Physical addresses of the shadow stacks' words in the task_structs that the call has copied."""
    remains: frozenset[int] = frozenset()
    """Physical addresses of words on tasks' stacks that no running function has written since its call."""

    def difference(self, other: Effect, loose_flags: int) -> str:
        """Return a description of the differences to another effect, or "" if there are none.

        `loose_flags` are flags that may differ.
        """
        if self.end != other.end:
            return f"ends by {self.end}, not by {other.end}"
        wrong = [
            f"{name}={one:#x}, not {two:#x}"
            for name, one, two in zip(REGISTERS, self.registers, other.registers, strict=True)
            if (one ^ two) & ~(loose_flags if name == "flags" else 0)
        ]
        pages = {page for page, _ in self.memory.items() ^ other.memory.items()}
        return ", ".join([*wrong, *(f"page {page:#x}" for page in sorted(pages))])

    def with_registers(self, like: Effect, may_differ: Callable[[str, int], bool]) -> Effect:
        """Return the effect with those registers of the effect `like` that may differ.

        `may_differ` gets a register's name and value.
        """
        pairs = zip(REGISTERS, self.registers, like.registers, strict=True)
        registers = tuple(two if may_differ(name, one) else one for name, one, two in pairs)
        return replace(self, registers=registers)

    def with_remains(self, like: Effect, initial: Callable[[int], bytes]) -> Effect:
        """Return the effect with the words `like.remains` taken from the effect `like`.

        `initial` returns the contents of a page before the call.
        """
        memory = dict(self.memory)
        for page in {word & -PAGE for word in like.remains}:
            before = initial(page)
            found = bytearray(memory.pop(page, before))
            expected = like.memory.get(page, before)
            for at in range(0, PAGE, 8):
                if page + at in like.remains:
                    found[at : at + 8] = expected[at : at + 8]
            if found != before:
                memory[page] = bytes(found)
        return replace(self, memory=memory)

    def without(self, names: Sequence[str], own: Callable[[int, int], int], like: Effect) -> Effect:
        """Return the effect without its permitted differences from the effect `like`.

        All registers except those in `names` are taken from `like`. `own` gets a word of this effect and the
        word of `like`. It returns the second word if the words differ only because of the host's own data,
        else the first. The words `like.pending` are taken from `like`: a task that calls hooked functions has
        pending calls there. The kernel clears a copy of them, unless the fork fails before.
        """
        registers = tuple(
            own(one, two) if name in names else two
            for name, one, two in zip(REGISTERS, self.registers, like.registers, strict=True)
        )
        memory = dict(self.memory)
        for page in memory.keys() & like.memory.keys():
            pairs = zip(_words(memory[page]), _words(like.memory[page]), strict=True)
            words = (
                two if page + 8 * number in like.pending else own(one, two)
                for number, (one, two) in enumerate(pairs)
            )
            memory[page] = struct.pack(f"<{PAGE // 8}Q", *words)
        return replace(self, registers=registers, memory=memory)


def _words(page: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{PAGE // 8}Q", page)


class Caller:
    """Calls functions in the guest of an engine, and restores the guest's memory after each call.

    Raises: OSError.
    """

    def __init__(self, engine: LinuxEngine, seconds: float, traced: Traced | None = None) -> None:
        """Prepare the guest for calls; the code, records and counts of `traced` are not restored.

        `seconds`: maximum time of a call.
        """
        self.engine = engine
        self._traced = traced
        self.machine = engine.tasks.machine
        stack = engine.machine.memory.host_pages.alloc(STACK)
        engine.machine.memory.map(STACK_AT, stack, STACK, Prot.READ | Prot.WRITE)
        engine.machine.memory.write(STACK_AT, bytes(STACK))
        self._stack = STACK_AT + STACK - 64
        self._objects = objects = engine.machine.memory.host_pages.alloc(OBJECTS_SIZE)
        engine.machine.memory.map(OBJECTS, objects, OBJECTS_SIZE, Prot.READ | Prot.WRITE)
        engine.machine.memory.write(OBJECTS, bytes(OBJECTS_SIZE))
        # This maps the host's code window in the kernel's page tables.
        engine.machine.text.free_text(engine.machine.text.alloc_text(16))
        engine.tasks.idle(0)
        if traced is not None:
            traced.keep_arrays()
        self._context = self.machine.engine.context_alloc()
        self.machine.engine.context_save(self._context)
        self._pc = self.machine.pc.state()
        self.machine._watchdog.budget = seconds
        self._trap: Trap | None = None
        self._registers: tuple[int, ...] = ()
        start, end = kernel().text
        memory = engine.machine.memory
        text = range(memory.translate(start) & -4096, memory.translate(start) + end - start)
        # A detour leaves its frame below the stack pointer, also on the interrupt stack.
        irq_stack = _irq_stack(engine)
        irq_pages = {memory.translate(irq_stack + at) for at in range(0, IRQ_STACK, PAGE)}
        self._running, self._root = engine.tasks.init.address, self.machine.cpu.root
        self._clock = memory.translate(engine.machine.clock.cell) & -PAGE
        own = (range(objects, objects + OBJECTS_SIZE), range(stack, stack + STACK))
        self._outside = lambda page: (
            page in text or (page >= GUEST_RAM and not any(page in pages for pages in own))
        )
        self.has_strayed = False
        """Whether the last call wrote to text or to the host's memory."""
        self.has_tables = True
        """Whether the page tables still map the guest after the last call; if not, it cannot continue."""
        self.has_switched = False
        """Whether the guest has switched to another task in the last call; see note_switches()."""
        self._stacks = frozenset(self._stack_pages())
        self._entries = frozenset(
            address for address in kernel().kallsyms.table.addresses if start <= address < end
        )
        self._rewind = Rewind(
            self.machine.memory.ram,
            lambda page: (
                page in range(objects, objects + OBJECTS_SIZE)
                or (page < GUEST_RAM and page not in text and page not in irq_pages)
            ),
            lambda page: traced is not None and self._outside(page),
        )
        self._rewind.keep()

    def note_switches(self) -> None:
        """From now on, set `has_switched` if a call switches to another task."""

        def note() -> None:
            self.has_switched = True

        self.machine.call_at(kernel().required(SWITCH), note)

    def initial(self, page: int) -> bytes:
        """Return the contents of a page of the guest's RAM between two calls."""
        return self.machine.memory.ram[page : page + PAGE]

    def begin(self) -> None:
        """Make all further calls begin with the current text, and otherwise with the initial state."""
        self._rewind.keep_rest()
        self._reset()

    def _reset(self) -> None:
        self.machine.engine.context_restore(self._context)
        self.machine.pc.restore(self._pc)
        self.machine.engine.flush_tlb()

    def call(self, call: Call) -> Effect | None:
        """Call a function, and return its effect, or None if it takes too long."""
        machine, regs, memory = self.machine, self.machine.regs, self.engine.machine.memory
        for number, content in enumerate(call.objects):
            memory.write(OBJECTS + OBJECT * number, content)
        for name in CLEARED:
            # A parameter of two words takes two registers, so a call may use more than its values.
            regs.set(name, 0)
        for name, value in zip(ARGUMENTS, call.values, strict=False):
            regs.set(name, value)
        regs.ip, regs.sp = call.function, self._stack
        if IS_RISCV or IS_ARM:
            regs.set("x30" if IS_ARM else "ra", RETURN)
        else:
            memory.write(self._stack, RETURN.to_bytes(8, "little"))
            regs.flags = FLAG_FIXED | FLAG_IF
        self.has_switched = False
        if self._traced is not None:
            self._traced.before()
        end = self._ran()
        if self._traced is not None:
            self._traced.after()
        memory_now = {self._place(page): data for page, data in self._rewind.changed().items()}
        others = [page for page in self._rewind.others() if page != self._clock]
        self.has_strayed = any(map(self._outside, others))
        self.has_tables = machine.cpu.root == self._root and memory.is_mapped(self._running)
        if self._rewind.back():
            machine.engine.flush_code()
        self._reset()
        return None if end is None else Effect(end, self._registers, memory_now)

    def remains(self, call: Call, effect: Effect) -> frozenset[int]:
        """Return the physical addresses of words on tasks' stacks that hold remains of calls that have ended.

        A function need not write all words of its frame. Such a word, and each word below the stack pointer,
        contains data of earlier calls. Detours and the trampolines of tracers leave other data there. So the
        call, whose effect was `effect`, is made again while each function's entry overwrites the memory below
        the stack pointer. The words on stacks that differ then are the remains.
        """
        machine, watchdog = self.machine, self.machine._watchdog
        hook = machine.engine.add_hook(HOOK_BLOCK, CODE_CALLBACK(self._overwrite), at=range(*kernel().text))
        budget, watchdog.budget = watchdog.budget, LONG
        machine.engine.flush_code()
        try:
            other = self.call(call)
        finally:
            machine.engine.remove_hook(hook)
            machine.engine.flush_code()
            watchdog.budget = budget
        if other is None or other.end != effect.end:
            return frozenset()
        found = set[int]()
        for page in self._stacks & (effect.memory.keys() | other.memory.keys()):
            one, two = (_words(each.memory.get(page) or self.initial(page)) for each in (effect, other))
            found.update(page + 8 * number for number in range(PAGE // 8) if one[number] != two[number])
        return frozenset(found)

    def _overwrite(self, _engine: int, address: int, _size: int, _data: int) -> None:
        """Overwrite the memory below the stack pointer if the basic block at `address` begins a function."""
        if address in self._entries:
            with suppress(MemoryFault):
                sp = self.machine.regs.sp
                self.engine.machine.memory.write(sp - len(OVERWRITTEN), OVERWRITTEN)

    def _stack_pages(self) -> Iterator[int]:
        """Yield the physical addresses of the pages of all tasks' stacks."""
        stacks, memory = self.engine._stacks, self.engine.machine.memory
        for _, end, _ in stacks._stacks(stacks._reader()):
            yield from (memory.translate(at) for at in range(end - THREAD_SIZE, end, PAGE))

    def _place(self, page: int) -> int:
        """Return `page`, a physical address, or the virtual address of the page if it is one of the objects.

        The physical addresses of the objects depend on the mode.
        """
        at = page - self._objects
        return OBJECTS + at if 0 <= at < OBJECTS_SIZE else page

    def _ran(self) -> str | None:
        machine = self.machine
        kept = machine.hooks.dispatch
        machine.hooks.dispatch = lambda trap: kept(trap) if self._is_executed(trap) else self._ended(trap)
        self._trap = None
        try:
            machine.run()
        except GuestFault as fault:
            if "for too long" in str(fault):
                return None
        finally:
            machine.hooks.dispatch = kept
            machine.death, machine._is_reset, machine._is_text_stale = "", False, False
        if self._trap is None:
            self._registers = self._now()
            return f"a halt at {self._named(machine.regs.ip)}"
        if self._trap.address == RETURN:
            return RETURNED
        return f"exception {self._trap.vector} at {self._named(self._trap.address)}, {self._trap.cr2:#x}"

    def _is_executed(self, trap: Trap) -> bool:
        """Return True if the host executes the instruction of the trap: a firmware call, or rdtime."""
        if not IS_RISCV or trap.error_code not in (CAUSE_ILLEGAL, CAUSE_ECALL):
            return False
        code = int.from_bytes(self.engine.machine.text.original(trap.address, 4), "little")
        return code == _ECALL or code & _CSR == _RDTIME

    def _ended(self, trap: Trap) -> None:
        self._trap = trap
        self._registers = self._now()
        self.machine.hooks.end_run()

    def _now(self) -> tuple[int, ...]:
        return tuple(self.machine.regs.get(name) for name in REGISTERS)

    def _named(self, address: int) -> str:
        """Return FUNCTION+OFFSET of an address. For a copied instruction, name the original instruction."""
        copied = self.engine.kprobes.resolve_probed_address(address)
        where = kernel().kallsyms.lookup(copied.address if copied else address)
        return f"{where.name}+{where.offset:#x}" if where is not None else f"{address:#x}"


def _irq_stack(engine: LinuxEngine) -> int:
    """Return the address of the stack for interrupts."""
    has_pointer = IS_RISCV or IS_ARM
    name = "irq_stack_ptr" if has_pointer else "irq_stack_backing_store"
    address = engine.tasks.per_cpu + kernel().required(name) & WORD
    return engine.machine.memory.read_word(address) if has_pointer else address


def _is_unused(name: str, _value: int) -> bool:
    return name not in KEPT


# Inputs


class Inputs:
    """Random arguments by the types of the parameters. Some point to objects of the running kernel."""

    def __init__(self, engine: LinuxEngine, seed: int) -> None:
        self._dice = random.Random(seed)
        self._real = _real_objects(engine)

    def calls(self, function: int, declared: Prototype, count: int) -> Iterator[Call]:
        """Yield `count` calls of a function."""
        for _ in range(count):
            contents = [self._content() for _ in declared.parameters]
            values = [self._value(kind, number, contents) for number, kind in enumerate(declared.parameters)]
            yield Call(function, tuple(values), tuple(contents))

    def _value(self, kind: str, number: int, contents: list[bytes]) -> int:
        dice = self._dice
        if "(*" in kind:
            return kernel().kallsyms.lookup_name("jiffies_to_msecs") or 0
        if not kind.endswith("*"):
            return dice.choice(NUMBERS) if dice.random() < 0.8 else dice.getrandbits(64)
        real = self._real.get(kind.removesuffix("*").strip())
        if real is not None and dice.random() < 0.8:
            return real
        if "char" in kind:
            contents[number] = dice.choice(TEXTS).ljust(OBJECT, b"\0")
        return OBJECTS + OBJECT * number

    def _content(self) -> bytes:
        """Return the random contents of an object: zeros with some small numbers and pointers to objects."""
        dice, words = self._dice, [0] * (OBJECT // 8)
        for _ in range(dice.choice((0, 8, 64))):
            pointer = OBJECTS + dice.randrange(0, OBJECTS_SIZE, 8)
            words[dice.randrange(64)] = dice.choice((pointer, dice.choice(NUMBERS[:12])))
        return b"".join(word.to_bytes(8, "little") for word in words)


def _real_objects(engine: LinuxEngine) -> dict[str, int]:
    """Return a map type -> address of an object of the init task, or of its open file with descriptor 2."""
    btf, memory, task = kernel().btf, engine.machine.memory, engine.tasks.init.address

    def member(structure: int, path: str) -> int:
        return memory.read_word(structure + btf.offset(path))

    files = member(task, "task_struct.files")
    file = memory.read_word(member(member(files, "files_struct.fdt"), "fdtable.fd") + 16)
    inode = member(file, "file.f_inode")
    return {
        "struct task_struct": task,
        "struct files_struct": files,
        "struct mm_struct": member(task, "task_struct.mm"),
        "struct cred": member(task, "task_struct.cred"),
        "struct file": file,
        "struct inode": inode,
        "struct dentry": member(file, "file.f_path.dentry"),
        "struct super_block": member(inode, "inode.i_sb"),
    }


# Comparing


class Comparison:
    """Calls many functions in all modes, and collects the differences."""

    def __init__(self, seed: int, modes: Sequence[str] = (*PROBED, *TRACED)) -> None:
        self._plain = Caller(engine(PLAIN), SHORT)
        self._has_dumped = False
        self._copies: set[int] = set()
        offsets = linux_abi(kernel(), self._plain.engine.tasks)
        self._pending = [offsets[name] for name in PENDING if name in offsets]
        dumps = [*filter(None, map(kernel().kallsyms.lookup_name, DUMPS))]
        assert dumps
        for address in dumps:
            self._plain.machine.call_at(address, self._dumped)
        self._plain.machine.call_at(kernel().required(COPIES), self._copied)
        self._plain.note_switches()
        self._probed = {mode: Caller(engine(MODES[mode]), LONG) for mode in PROBED if mode in modes}
        self._traced: dict[str, tuple[Traced, Caller]] = {}
        for mode in TRACED:
            if mode in modes:
                traced = TRACED[mode](engine(MODES["ftrace"]))
                self._traced[mode] = traced, Caller(traced.engine, LONG, traced)
        self._inputs = Inputs(self._plain.engine, seed)
        self.ends: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.functions = 0
        self.differences: list[str] = []

    def _dumped(self) -> None:
        self._has_dumped = True

    def _copied(self) -> None:
        engine = self._plain.engine
        task = self._plain.machine.regs.get(ARGUMENTS[0])
        self._copies.update(engine.machine.memory.translate(task + offset) for offset in self._pending)

    def compare(self, starts: Sequence[int], count: int) -> None:
        """Call each of the functions `count` times; the functions of a batch are probed together."""
        for at in range(0, len(starts), BATCH):
            self._batch(starts[at : at + BATCH], count)

    def _batch(self, starts: Sequence[int], count: int) -> None:
        expected: list[tuple[Call, Effect]] = []
        quiet: list[tuple[Call, Effect]] = []
        for start in starts:
            calls = [*self._calls(start, count)]
            self.functions += bool(calls)
            for call in calls:
                self._has_dumped = False
                self._copies.clear()
                effect = self._plain.call(call)
                if not self._plain.has_tables:
                    self.ends["tables lost"] += 1
                    continue
                self.ends["too long" if effect is None else effect.end.split()[0]] += 1
                if effect is None:
                    # Other calls of the function would take too long too.
                    break
                effect = replace(effect, pending=frozenset(self._copies))
                if self._plain.has_switched:
                    effect = replace(effect, remains=self._plain.remains(call, effect))
                expected.append((call, effect))
                if self._has_dumped or self._plain.has_strayed:
                    self.ends["not traced"] += 1
                else:
                    quiet.append((call, effect))
        for mode, caller in self._probed.items():
            places = [*chosen(caller.engine, boundaries(caller.engine, starts))]
            self.places[mode] += len(places)
            # Two punned jumps of a batch may need the same addresses for their detours.
            probes, hits = armed(caller.engine, places, may_lack_detours=True)
            caller.begin()
            for call, effect in expected:
                self._check(mode, call, caller.call(call), effect)
            self.hits[mode] += hits.total()
            disarmed(caller.engine, probes)
        for mode in self._traced:
            self._batch_traced(mode, starts, quiet)

    def _batch_traced(
        self, mode: str, starts: Sequence[int], expected: Sequence[tuple[Call, Effect]]
    ) -> None:
        """Make the calls twice with the tracer `mode`, and check that both rounds count the same hits.

        Python handles some of the first hits, and guest code handles the others.
        """
        traced, caller = self._traced[mode]
        with time_stands():
            traced.on(starts)
            caller.begin()
            counts = []
            for _ in range(2):
                for call, effect in expected:
                    self._check(mode, call, caller.call(call), effect)
                counts.append(traced.hits() - sum(counts))
            traced.off()
        self.hits[mode] += sum(counts)
        if counts[0] != counts[1]:
            self.differences.append(f"{mode}: hit {counts[0]} times, then {counts[1]} times")

    def _calls(self, start: int, count: int) -> Iterator[Call]:
        where = kernel().kallsyms.lookup(start)
        assert where is not None
        try:
            found = prototype(kernel().btf, where.name)
        except KernelError:
            return
        if not found.is_variadic and len(found.parameters) <= len(ARGUMENTS):
            yield from self._inputs.calls(start, found, count)

    def _check(self, mode: str, call: Call, found: Effect | None, expected: Effect) -> None:
        where = kernel().kallsyms.lookup(call.function)
        assert where is not None
        code = self._plain.engine.machine.text.original(call.function, where.symbol.size)
        loose = 0 if IS_RISCV or IS_ARM else undefined_flags(code, call.function, 64)
        if found is not None:
            found = found.with_remains(expected, self._plain.initial)
        if found is not None and mode in self._traced:
            traced, _ = self._traced[mode]
            kept = KEPT if expected.end == RETURNED or not traced.is_at_entries else RESTORED
            found = found.without(kept, traced.own_word, expected)
        elif found is not None and IS_RISCV and mode != "stepped":
            # A jump changes a register that is written before it is read.
            is_free = _is_unused if expected.end == RETURNED else self._is_from_jump
            found = found.with_registers(expected, is_free)
        wrong = "takes too long" if found is None else found.difference(expected, loose)
        if wrong:
            values = ", ".join(f"{value:#x}" for value in call.values)
            self.differences.append(f"{mode}: {where.name}({values}): {wrong}")

    def _is_from_jump(self, _name: str, value: int) -> bool:
        """Return True if a register may have the value because a jump to or from a detour has used it."""
        text = kernel().text
        detours = self._plain.engine.machine.model.layout.text_space
        init_text = kernel().required("_sinittext"), kernel().required("_einittext")
        spaces = (*text,), init_text, (detours, detours + HOST_SIZE)
        return any(start - PAGE <= value < end + PAGE for start, end in spaces)

    def close(self) -> None:
        """Free the guests."""
        traced = (caller for _, caller in self._traced.values())
        for caller in (self._plain, *self._probed.values(), *traced):
            caller.engine.tasks.machine.close()


def main(argv: list[str] | None = None) -> int:
    """Run the program; return 1 if a call differs."""
    parser = argparse.ArgumentParser(prog="python -m stress.linux.transparency", description=__doc__)
    parser.add_argument("--functions", type=int, default=2000)
    parser.add_argument(
        "--matching", metavar="PATTERN", default="", help="only functions in whose names PATTERN is found"
    )
    parser.add_argument("--calls", type=int, default=4, help="number of calls of each function")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=(*PROBED, *TRACED), default=(*PROBED, *TRACED))
    options = parser.parse_args(argv)
    comparison = Comparison(options.seed, options.modes)
    starts = functions(options.functions, options.seed, options.matching)
    comparison.compare(starts, options.calls)
    print(f"{comparison.functions} functions; calls end by {dict(comparison.ends)}")
    for mode in options.modes:
        places = f"{comparison.places[mode]} places, " if mode in PROBED else ""
        print(f"{mode}: {places}{comparison.hits[mode]} hits")
    for difference in comparison.differences:
        print(difference)
    comparison.close()
    return bool(comparison.differences)


if __name__ == "__main__":
    sys.exit(main())
