"""The files `detour` and `bytes`: named parts, the places where jumps arrive, and the same listing as in
`explain`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from kprobefs.plan.explanation import Explanation
from kprobefs.plan.place import find_place
from kprobefs.plan.planned_kernel import PlannedKernel, planned_kernel

CASES = (("x86_64", "linux-6.1"), ("i386", "linux-6.1"), ("riscv64", "riscv-optprobes-2023"))
STATS = "/kprobes/stats/kprobes/ev"
LINE = re.compile(r"0x([0-9a-f]+): ((?:[0-9a-f]{2} )+) +(.*)")


@pytest.fixture(params=CASES, ids=lambda case: case[0])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    arch, profile = request.param
    with Kernel(MachineConfig(arch=arch, profile=profile)) as kernel:
        yield kernel


@pytest.fixture
def planned(kernel: Kernel) -> PlannedKernel:
    return planned_kernel(kernel.config.arch, None, None, kernel.config.profile)


def optimized_place(planned: PlannedKernel, function: str) -> Explanation:
    found = Explanation(planned, find_place(function, planned.tables)).better_after
    assert found is not None
    return Explanation(planned, find_place(f"{function}+{found.offset:#x}", planned.tables))


def define(kernel: Kernel, place: str, arguments: str = "") -> None:
    kernel.write_file("/tracing/kprobe_events", f"p:ev {place} {arguments}\n")
    kernel.write_file("/tracing/events/kprobes/ev/enable", "1")


def parts(listing: str) -> dict[str, list[tuple[int, str]]]:
    """Return title of a part -> addresses and texts of its instructions."""
    found: dict[str, list[tuple[int, str]]] = {}
    title = ""
    for line in listing.splitlines():
        insn = LINE.fullmatch(line)
        if insn is None:
            title = line.removesuffix(":")
            found[title] = []
        else:
            found[title].append((int(insn[1], 16), insn[3]))
    return found


def landing(listing: str, way: str) -> int:
    (insns,) = [insns for title, insns in parts(listing).items() if title.endswith(f"(the {way} leads here)")]
    return insns[0][0]


def jump_target(kernel: Kernel, address: int) -> int:
    """Return the target of the jump or call in the text at `address`."""
    probe_text = kernel.read_text(address, 5)
    assert probe_text[0] in (0xE8, 0xE9)
    return address + 5 + int.from_bytes(probe_text[1:], "little", signed=True)


def test_the_detour_is_the_one_that_explain_shows(kernel: Kernel, planned: PlannedKernel) -> None:
    explained = optimized_place(planned, "int_sqrt")
    define(kernel, explained.title)
    assert "waits for the optimizer" in kernel.read_file(f"{STATS}/reason")
    kernel.wait_for_kprobe_optimizer()
    assert kernel.read_file(f"{STATS}/reason") == ""
    shown = parts(kernel.read_file(f"{STATS}/detour"))
    wanted: dict[str, list[str]] = {}
    for insn in explained.detour:
        wanted.setdefault(insn.part, []).append(insn.text)
    assert {
        title.removesuffix(" (the jump leads here)"): [text for _, text in insns]
        for title, insns in shown.items()
    } == wanted


@pytest.mark.parametrize("arguments", ["", "a=%di:u32", "a=@jiffies:u64"])
def test_the_jump_arrives_at_the_marked_part(arguments: str) -> None:
    planned = planned_kernel("x86_64", None, None, None)
    explained = optimized_place(planned, "int_sqrt")
    with Kernel() as kernel:
        define(kernel, explained.title, arguments)
        kernel.wait_for_kprobe_optimizer()
        for _ in range(3):
            listing = kernel.read_file(f"{STATS}/detour")
            assert landing(listing, "jump") == jump_target(kernel, explained.address)
            titles = list(parts(listing))
            assert titles[-2:] == ["copied instructions", "jump back"]
            kernel.call("int_sqrt", 81)


def test_only_the_code_that_a_jump_enters_is_shown(kernel: Kernel, planned: PlannedKernel) -> None:
    """While the optimizer stops at stages, the detour that the jump enters leads to a handler in Python.

    The compiled handler of hits by the breakpoint is listed only until the jump is written.
    """
    explained = optimized_place(planned, "int_sqrt")
    define(kernel, explained.title)
    kernel.call("int_sqrt", 81)
    kernel.write_file("kprobes/stages", "1")
    kernel.write_file(f"{STATS}/optimized", "1")
    assert "handler (a hit leads here)" in parts(kernel.read_file(f"{STATS}/detour"))
    while kernel.read_file("kprobes/stages") != "1\n":
        kernel.write_file("kprobes/stages", "next")
    titles = list(parts(kernel.read_file(f"{STATS}/detour")))
    assert titles[0].endswith("(the jump leads here)")
    assert "handler (a hit leads here)" not in titles
    kernel.call("int_sqrt", 81)
    assert re.fullmatch(r"hits 2 median \d+ ns of the last 1\n", kernel.read_file(f"{STATS}/cost"))


@pytest.mark.parametrize("arguments", ["", "a=@jiffies:u64"])
def test_operands_count_from_the_part_of_their_name(arguments: str) -> None:
    planned = planned_kernel("x86_64", None, None, None)
    explained = optimized_place(planned, "int_sqrt")
    with Kernel() as kernel:
        define(kernel, explained.title, arguments)
        kernel.wait_for_kprobe_optimizer()
        # The first hit compiles the handler.
        kernel.call("int_sqrt", 81)
        listing = parts(kernel.read_file(f"{STATS}/detour"))
        assert re.search(r"jmp handler(;|$)", kernel.read_file(f"{STATS}/bytes"), re.MULTILINE)
    starts = {title.split()[0]: insns[0][0] for title, insns in listing.items()}
    addresses = {address for insns in listing.values() for address, _ in insns}
    texts = "\n".join(text for insns in listing.values() for _, text in insns)
    named = re.findall(r"\b(handler|rare_cases)(?:\+(0x[0-9a-f]+))?$", texts, re.MULTILINE)
    assert {name for name, _ in named} == {"handler", "rare_cases"}
    assert all(starts[name] + int(offset or "0", 16) in addresses for name, offset in named)


def test_the_call_arrives_at_the_marked_part() -> None:
    with Kernel() as kernel:
        define(kernel, "int_sqrt", "a=%di")
        address = kernel.kallsyms_lookup_name("int_sqrt")
        for _ in range(3):
            listing = kernel.read_file(f"{STATS}/detour")
            assert landing(listing, "call") == jump_target(kernel, address)
            assert "callq" in kernel.read_file(f"{STATS}/bytes")
            kernel.call("int_sqrt", 81)


def test_bytes_have_the_instructions_of_the_listing(kernel: Kernel, planned: PlannedKernel) -> None:
    explained = optimized_place(planned, "int_sqrt")
    inside = "; ".join(insn.text for insn in explained.insns if insn.address in explained.bracket)
    define(kernel, explained.title)
    for _ in range(2):
        original, current = kernel.read_file(f"{STATS}/bytes").splitlines()
        assert original.endswith(f"  {inside}")
        assert not current.endswith(f"  {inside}")
        kernel.wait_for_kprobe_optimizer()


def test_no_instruction_is_shown_after_a_jump(kernel: Kernel, planned: PlannedKernel) -> None:
    """Bytes of the region that remain after the jump are shown as bytes, not as an instruction.

    On RISC-V, the jump is written with nops up to the end of the region.
    """
    has_rest = kernel.config.arch != "riscv64"
    seen = set()
    for insn in Explanation(planned, find_place("vsnprintf", planned.tables)).insns:
        region = insn.verdict.region
        left = region.length - 5 if region is not None and has_rest else 0
        if region is None or left in seen:
            continue
        seen.add(left)
        define(kernel, f"vsnprintf+{insn.offset:#x}")
        kernel.wait_for_kprobe_optimizer()
        current = kernel.read_file(f"{STATS}/bytes").splitlines()[1]
        code = kernel.read_text(region.end - left, left) if left else b""
        assert current.partition(".byte ")[2] == ", ".join(f"{byte:#04x}" for byte in code)
        assert not has_rest or current.count("; ") == bool(left)
        kernel.write_file("/tracing/events/kprobes/ev/enable", "0")
        kernel.write_file("/tracing/kprobe_events", "-:ev\n")
    assert len(seen) > has_rest


def test_numbers_are_symbols_or_hexadecimal(kernel: Kernel, planned: PlannedKernel) -> None:
    explained = optimized_place(planned, "int_sqrt")
    define(kernel, explained.title, "a=@jiffies:u64")
    for _ in range(3):
        kernel.wait_for_kprobe_optimizer()
        listing = kernel.read_file(f"{STATS}/detour")
        assert not re.search(
            r"(?<![0-9a-fx])[0-9]{4,}", re.sub(r"0x[0-9a-f]+: (?:[0-9a-f]{2} )+", "", listing)
        )
        kernel.call("int_sqrt", 81)
