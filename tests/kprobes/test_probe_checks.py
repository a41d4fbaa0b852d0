"""The registry, the optimizer and the blacklist give the same answers about a place as the probe checker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.disassembly import address_names
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason, RejectSubject
from emulated_kernel.arch.x86.insn import MAX_INSN_SIZE, decode_insn
from emulated_kernel.image.builtin_image import PREBUILT
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.kprobes.blacklist import is_blacklisted
from tests.sample import share

IMAGES = ("x86_64", "x86_64-retpoline", "i386", "riscv64", "riscv64i")
FTRACE_AND_OTHERS = [("linux-6.1", image) for image in IMAGES]
PROFILES = [
    *FTRACE_AND_OTHERS,
    ("optprobes-2009", "x86_64"),
    ("djprobe-2007", "i386"),
    ("riscv-optprobes-2023", "riscv64"),
    ("riscv-optprobes-2023", "riscv64i"),
]


@contextmanager
def booted(profile: str, image: str) -> Iterator[Kernel]:
    """Yield a kernel with `image`, and with the module `ktgt` if the image has modules."""
    path = PREBUILT / image / "vmlinux"
    with Kernel(MachineConfig(arch=image.partition("-")[0], profile=profile, image=path)) as kernel:
        if (path.parent / "modules").exists():
            kernel.load_module("ktgt")
        yield kernel


def functions(kernel: Kernel) -> Iterator[Symbol]:
    """Yield all functions of the kernel and of its modules."""
    kallsyms, ranges = kernel.live.kallsyms, kernel.live.text_ranges
    names = [line.split()[0] for line in kallsyms.kallsyms_text().splitlines()]
    for address in sorted({int(name, 16) for name in names}):
        if any(start <= address < end for start, end in ranges):
            where = kallsyms.lookup(address)
            assert where is not None
            yield where.symbol


def registered(kernel: Kernel, addr: int) -> tuple[int, Kprobe | None]:
    """Register and unregister a probe at `addr`.

    Return the errno or 0, and the aggregator probe if there was one.
    """
    probe = Kprobe(addr=addr, disabled=True, length=0)
    try:
        kernel.register_kprobe(probe)
    except KernelError as error:
        return error.errno or -1, None
    head = kernel.kprobes.table.valid(probe)
    # The first request for the detour of a disabled probe creates it.
    kernel.kprobes.detour(probe)
    kernel.unregister_kprobe(probe)
    return 0, head


@pytest.mark.parametrize(("profile", "image"), PROFILES)
def test_registry_and_optimizer_agree_with_it(profile: str, image: str) -> None:
    """Registration agrees with the probe checker at every instruction, and one byte after its start.

    Each profile is tested with a part of the functions, of the cold parts, and of the functions that cannot
    be probed. KPROBEFS_WHOLE=1 takes all.
    """
    with booted(profile, image) as kernel:
        known = list(functions(kernel))
        special = [s for s in known if "." in s.name or is_blacklisted(kernel, s.address)]
        part, parts = PROFILES.index((profile, image)), len(PROFILES)
        chosen = {s.address: s for s in [*share(special, part, parts), *share(known, part, 4 * parts)]}
        assert agree(kernel, list(chosen.values())) > 30_000 * len(chosen) / len(known) / 2


def agree(kernel: Kernel, symbols: list[Symbol]) -> int:
    """Check that registration and probe checker agree at all instructions of `symbols`.

    Return the number of instructions.
    """
    verdict, seen, wrong = kernel.kprobes.probe_checker, 0, []
    for symbol in symbols:
        for addr, refused, outcome in verdict.check_each_insn(symbol):
            seen += 1
            found, head = registered(kernel, addr)
            if found != (refused.errno if refused else 0) or refused != verdict.may_probe(addr):
                wrong.append((hex(addr), found, refused))
            if refused is None and not _is_taken(kernel, head, outcome):
                wrong.append((hex(addr), head, outcome))
            within = verdict.may_probe(addr + 1)
            if seen % 7 == 0 and registered(kernel, addr + 1)[0] != (within.errno if within else 0):
                wrong.append((hex(addr + 1), within))
    assert wrong == []
    return seen


def _is_taken(kernel: Kernel, head: AggrKprobe | None, outcome: Region | Rejection) -> bool:
    """Return True if the optimizer handled the aggregator probe `head` as the probe checker's outcome says.

    Without a request, djprobes have no aggregator.
    """
    if kernel.kprobes.profile.djprobe is not None or kernel.kprobes.optimizer is None:
        return head is None or not head.is_aggregated
    if isinstance(outcome, Region):
        return head is not None and head.is_aggregated and head.detour is None
    return head is not None and (head.rejection == outcome or outcome.reason is RejectReason.FTRACE)


@pytest.mark.parametrize("image", ["x86_64", "i386"])
def test_sizes_of_instructions_are_those_that_linux_decodes(image: str) -> None:
    """The probe checker and the instruction decoder agree about the size of each instruction, which is the
    size of its copy.
    """
    with booted("linux-6.1", image) as kernel:
        verdict = kernel.kprobes.probe_checker
        seen = 0
        for symbol in share(list(functions(kernel)), 0, 8):
            for addr, refused, _ in verdict.check_each_insn(symbol):
                where = kernel.live.kallsyms.lookup(addr)
                if refused is None and where is not None:
                    code = kernel.machine.text.original(addr, MAX_INSN_SIZE)
                    decoded = decode_insn(code, kernel.arch.bits)
                    assert verdict.insn_size(where) == decoded.length
                    seen += 1
        assert seen > 1000


def test_djprobes_get_the_length_of_the_region() -> None:
    with booted("djprobe-2007", "i386") as kernel:
        verdict, agreed = kernel.kprobes.probe_checker, 0
        for symbol in [*functions(kernel)][::19]:
            for addr, refused, outcome in verdict.check_each_insn(symbol):
                if refused is not None:
                    continue
                length = outcome.length if isinstance(outcome, Region) else 5
                probe = Kprobe(addr=addr, disabled=True, length=length)
                if isinstance(outcome, Rejection):
                    with pytest.raises(KernelError, match=re.escape(outcome.reason.value)):
                        kernel.register_kprobe(probe)
                    continue
                kernel.register_kprobe(probe)
                kernel.unregister_kprobe(probe)
                kernel.kprobes.commit_kprobes()
                agreed += 1
        assert agreed > 200


@pytest.mark.parametrize("image", ["x86_64", "i386"])
def test_a_cold_part_is_as_blacklisted_as_its_function(image: str) -> None:
    """A function's cold part can be probed if and only if the function can.

    The kernel refuses an event on a blacklisted cold part.
    """
    with booted("linux-6.1", image) as kernel:
        kallsyms = kernel.image.kallsyms
        parts = [
            s for s in functions(kernel) if "." in s.name and kallsyms.lookup_name(s.name.partition(".")[0])
        ]
        refused = {part.name for part in parts if is_blacklisted(kernel, part.address)}
        assert "report_bug.cold" in refused
        assert len(refused) < len(parts)
        for part in parts:
            whole = kallsyms.lookup_name(part.name.partition(".")[0])
            assert whole is not None
            assert is_blacklisted(kernel, part.address) == is_blacklisted(kernel, whole), part.name
        with pytest.raises(KernelError) as caught:
            kernel.tracing.kprobe_events.write(b"p:x report_bug.cold\n")
        assert caught.value.name == "EINVAL"


@pytest.mark.parametrize(
    ("profile", "image"),
    [("linux-6.1", "x86_64"), ("djprobe-2007", "i386"), ("riscv-optprobes-2023", "riscv64")],
)
def test_the_text_of_a_finding_names_the_instruction_or_the_register(profile: str, image: str) -> None:
    with booted(profile, image) as kernel:
        verdict, told = kernel.kprobes.probe_checker, set[RejectReason]()
        symbols = list(functions(kernel))
        sample = share(symbols, list(TOLD).index(profile), 4)
        for number, symbol in enumerate([*sample, *symbols]):
            # Some reasons are rare.
            if number >= len(sample) and told >= TOLD[profile]:
                break
            for addr, refused, outcome in verdict.check_each_insn(symbol):
                if refused is not None or not isinstance(outcome, Rejection) or outcome.reason in told:
                    continue
                found = verdict.optimized_region(addr)
                assert found == outcome
                assert isinstance(found, Rejection)
                told.add(found.reason)
                names(kernel, found)
        assert told >= TOLD[profile]
        about_none = {reason for reason in told if reason.about is None}
        assert about_none <= {RejectReason.FTRACE, RejectReason.ENTRY_TEXT} | NO_INSTRUCTION


TOLD = {
    "linux-6.1": {RejectReason.NOT_BOOSTABLE, RejectReason.JUMP_INTO_RANGE, RejectReason.REGION_TOO_SHORT},
    "djprobe-2007": {
        RejectReason.PROHIBITED_IN_DCR,
        RejectReason.RELATIVE_IN_DCR,
        RejectReason.JUMP_INTO_RANGE,
    },
    "riscv-optprobes-2023": {
        RejectReason.NOT_BOOSTABLE,
        RejectReason.JUMP_INTO_RANGE,
        RejectReason.NO_FREE_REGISTER,
        RejectReason.NO_FREE_REGISTER_AFTER,
    },
}
NO_INSTRUCTION = {RejectReason.BEYOND_FUNCTION, RejectReason.POINTER_INTO_RANGE}


def names(kernel: Kernel, found: Rejection) -> None:
    """Check that a rejection's text names the right instruction, by a disassembly that the probe checker did
    not make.

    If the rejection is about a register, also check that the register is live there.
    """
    if found.reason.about is RejectSubject.INSN:
        place = sprint(kernel, found.addr)
        assert found.text == f"{place}: {found.reason.value}: {disassembled(kernel, found.addr)}"
    if found.reason.about is not RejectSubject.REGISTER:
        return
    matched = re.search(r": (\w+) may be needed by (\w+)(?:\+(0x[0-9a-f]+))?: (.*)", found.text)
    assert matched is not None, found.text
    register, text = matched[1], matched[4]
    at = kernel.image.kallsyms.lookup_name(matched[2]) + int(matched[3] or "0", 16)
    assert register in kernel.kprobes.probe_checker.live_at(found.addr).registers
    assert register in kernel.kprobes.probe_checker.live_at(at).registers
    assert text == disassembled(kernel, at)
    # It reads the register, or leaves the function with it.
    assert re.search(rf"\b{register}\b|^(c\.)?(ret|j|jr|jal|jalr|tail)\b", text), text


def sprint(kernel: Kernel, addr: int) -> str:
    where = kernel.image.kallsyms.lookup(addr)
    assert where is not None
    return f"{where.name}+{where.offset:#x}" if where.offset else where.name


def disassembled(kernel: Kernel, addr: int) -> str:
    """Return the disassembly of an instruction, made without the probe checker."""
    names = address_names(kernel.image.kallsyms.lookup)
    size = kernel.kprobes.probe_checker.max_insn_size
    line = kernel.arch.disassemble(kernel.live.read(addr, size), addr, names)[0]
    return re.sub(r"^\S+ (?:[0-9a-f]{2} )+ *", "", line)
