"""`kprobefs explain`: its answers agree with each other, with `coverage`, and with the engine of a mount."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from functools import lru_cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, BinaryIO
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.arch.analysis.reject_reason import RejectReason
from emulated_kernel.image.builtin_image import load_image
from emulated_kernel.image.kallsyms import Location
from emulated_kernel.image.linux import module_files
from emulated_kernel.image.linux.btf import Btf
from emulated_kernel.image.linux.btf_declaration import declaration, prototype
from emulated_kernel.image.linux.btf_members import members_at, size_of
from emulated_kernel.image.linux.deb import PackageTar
from emulated_kernel.image.linux.packages import open_package
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import PROFILES, RISCV_PROFILE, RISCV_PROFILES, profile_named
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError, UnusableFile
from kprobefs.cli.main import main
from kprobefs.common.errors import CliError, ExitStatus
from kprobefs.common.similar_symbols import nearest_listed, nearest_symbols
from kprobefs.definitions.syntax import Line
from kprobefs.measure.verdicts import ProbeOutcome, chosen_profile, outcome_of
from kprobefs.mount_options import MountOptions, check_kprobes
from kprobefs.plan.arrows import arrows, gutter
from kprobefs.plan.check import check_lines
from kprobefs.plan.explain import as_dict
from kprobefs.plan.explanation import Explanation
from kprobefs.plan.listing import listing
from kprobefs.plan.place import find_place
from kprobefs.plan.planned_kernel import PlannedKernel, planned_kernel
from kprobefs.plan.text import WIDTH, as_text
from tests.image.linux import debian, made
from tests.image.test_what_probing_faces import IBT
from tests.project.readme import blocks, steps

Answer = dict[str, Any]
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "plan-probes.md"
ARCHES = ("x86_64", "i386", "riscv64", "riscv64i")
CALL_FENTRY = b"\xe8\0\0\0\0"
ENDBR64 = bytes.fromhex("f30f1efa")
AES = "aes_ti:aesti_set_key"
"""A function of a module that comes early in the package of Debian's kernel."""
BODY = bytes.fromhex("53 4889fb 4889d8 31f6 5b")  # push %rbx; mov %rdi,%rbx; mov %rbx,%rax; xor; pop


@pytest.fixture(scope="module", params=ARCHES)
def kernel(request: pytest.FixtureRequest) -> PlannedKernel:
    return planned_kernel(request.param, None, None, None)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a new, empty cache and return its path.

    Tests that need packages must get them from tests.image.linux.debian before.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@lru_cache(maxsize=1)
def all_explanations(kernel: PlannedKernel, seed: int) -> list[Explanation]:
    """Return explanations of random places, some of which are within instructions.

    The tests share them, because each explanation decodes its function once.
    """
    rng = Random(seed)
    functions = [s for s in kernel.judge.subject.symbols if s.is_text and s.size > 8]
    found = []
    for symbol in rng.sample(functions, 300):
        place = f"{symbol.address + rng.randrange(symbol.size):#x}"
        found.append(Explanation(kernel, find_place(place, kernel.tables)))
    return found


def explanations(kernel: PlannedKernel, count: int, seed: int = 3) -> list[Explanation]:
    """Return the first `count` of the kernel's explanations."""
    return all_explanations(kernel, seed)[:count]


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[Answer]:
    """Run `explain --json` and return its answers."""
    assert main(["explain", *arguments, "--json"]) == 0
    found: list[Answer] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Check that `explain` fails, and return the line of its error."""
    assert main(["explain", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


# Verdicts


def asked(kernel: Kernel, address: int) -> tuple[range | None, str]:
    """Return the region that a jump would replace on a mount.

    If no jump is possible, return None and the reason.
    """
    try:
        return kernel.optimized_region(address), ""
    except KernelError as error:
        return None, str(error)


@pytest.mark.parametrize("arch", ARCHES)
def test_verdicts_of_a_function_are_those_of_coverage(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coverage", "--arch", arch, "--function", "*r", "--json"]) == 0
    (counted,) = json.loads(capsys.readouterr().out)
    symbols = Random(5).sample(counted["symbols"], 60)
    answers = explained(capsys, "--arch", arch, *(symbol["address"] for symbol in symbols))
    for symbol, found in zip(symbols, answers, strict=True):
        insns = found["instructions"]
        verdicts = symbol["verdicts"]
        assert len(insns) == verdicts["instructions"]
        for outcome in ("optimized", "breakpoint", "ftrace", "refused"):
            assert sum(insn["verdict"] == outcome for insn in insns) == verdicts[outcome], symbol["name"]


def test_the_place_has_the_verdict_of_its_instruction(kernel: PlannedKernel) -> None:
    for found in explanations(kernel, 150):
        own = [insn for insn in found.insns if insn.address == found.address]
        for insn in own:
            assert insn.verdict.outcome is found.verdict.outcome
        if not own and found.containing is not None:
            assert found.verdict.outcome is ProbeOutcome.REFUSED
            assert found.containing.address < found.address


def test_a_region_is_whole_instructions_that_have_room_for_the_jump(kernel: PlannedKernel) -> None:
    """A region consists of whole instructions with room for the jump.

    The range that `explain` marks for a refused jump also has room, unless the function ends before.
    """
    regions = refusals = 0
    for found in explanations(kernel, 300):
        starts = {insn.address for insn in found.insns}
        if found.address not in starts:
            continue
        regions += found.verdict.region is not None
        refusals += found.verdict.region is None
        size = found.judge.arch.jump_back_size
        assert found.bracket.start == found.address
        assert len(found.bracket) >= min(size, found.insns[-1].end - found.address)
        assert found.bracket.stop in starts or found.bracket.stop == found.insns[-1].end
    assert regions > 5
    assert refusals > 5


def test_nearest_better_places_are_optimized_and_nothing_optimized_is_nearer(kernel: PlannedKernel) -> None:
    seen = 0
    for found in explanations(kernel, 200):
        before, after = found.better_before, found.better_after
        low = before.address if before else 0
        high = after.address if after else 1 << 64
        assert low < found.address < high
        for insn in found.insns:
            if low < insn.address < high and insn.address != found.address:
                assert insn.verdict.outcome is not ProbeOutcome.OPTIMIZED
        for better in filter(None, (before, after)):
            seen += 1
            again = Explanation(kernel, find_place(f"{better.address:#x}", kernel.tables))
            assert again.verdict.outcome is ProbeOutcome.OPTIMIZED
    assert seen > 20


@pytest.mark.parametrize(
    ("arch", "profile"), [("x86_64", "linux-6.1"), ("i386", "linux-6.1"), ("riscv64", "riscv-optprobes-2023")]
)
def test_a_mount_agrees_with_the_offline_answer(arch: str, profile: str) -> None:
    """`explain` and a mount agree on each place, except that a mount also refuses jumps because of branches
    from other functions.
    """
    planned = planned_kernel(arch, None, None, profile)
    agreed = 0
    with Kernel(MachineConfig(arch=arch, profile=profile)) as kernel:
        for found in explanations(planned, 150):
            rejection = found.verdict.rejection
            if rejection is not None and rejection.reason is RejectReason.NOTRACE:
                # Only events are refused.
                continue
            region, refusal = asked(kernel, found.address)
            if region is not None:
                assert found.verdict.outcome is ProbeOutcome.OPTIMIZED
                assert region == found.bracket
                agreed += 1
            elif rejection is None:
                assert "another function" in refusal or "jump label" in refusal
            else:
                assert rejection.reason.value in refusal
    assert agreed > 5


@pytest.mark.parametrize(
    ("arch", "profile", "kinds"),
    [
        ("x86_64", "linux-6.1", {"stepped", "emulated"}),
        ("x86_64", "linux-6.1-nopreempt", {"stepped", "boosted", "emulated"}),
        ("riscv64", "linux-6.1", {"stepped", "emulated"}),
    ],
)
def test_the_engine_makes_the_kind_of_breakpoint(arch: str, profile: str, kinds: set[str]) -> None:
    planned = planned_kernel(arch, None, None, profile)
    seen = set()
    with Kernel(MachineConfig(arch=arch, profile=profile)) as kernel:
        for found in explanations(planned, 300):
            kind = found.breakpoint_kind
            assert (kind is None) == (found.verdict.outcome in (ProbeOutcome.REFUSED, ProbeOutcome.FTRACE))
            if kind is None:
                continue
            kprobe = Kprobe(addr=found.address)
            kernel.register_kprobe(kprobe)
            head = kernel.kprobes.table.valid(kprobe)
            assert head is not None
            insn = head.insn
            assert insn is not None
            made = "boosted" if insn.boosted else "stepped" if insn.slot is not None else "emulated"
            assert kind.value == made, found.title
            kernel.unregister_kprobe(kprobe)
            seen.add(made)
    assert seen == kinds


# The detour


def test_a_detour_has_all_its_parts_and_copies_the_region(kernel: PlannedKernel) -> None:
    seen = 0
    for found in explanations(kernel, 250):
        assert bool(found.detour) == (found.verdict.region is not None)
        if not found.detour:
            continue
        seen += 1
        parts = list(dict.fromkeys(insn.part for insn in found.detour))
        assert parts[0] == "save the registers"
        assert parts[-1] == "jump back"
        assert len(parts) == 5
        inside = [insn for insn in found.insns if insn.address in found.bracket]
        copied = [insn for insn in found.detour if insn.part == "copied instructions"]
        for one, other in zip(copied, inside, strict=True):
            # On RISC-V, only the original text names the symbol whose address two instructions compute.
            before, named, _ = other.text.partition("%pcrel_lo")
            assert one.text == other.text or (named and one.text.startswith(before))
    assert seen > 5


# Arguments


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_at_the_entry_arguments_have_numbers_and_registers(
    arch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = explained(capsys, "--arch", arch, "vfs_read")
    registers = {"x86_64": ("di", "si", "dx", "cx"), "i386": ("ax", "dx", "cx"), "riscv64": ("a0", "a1")}[
        arch
    ]
    assert len(found["arguments"]) == 4
    for number, (argument, register) in enumerate(zip(found["arguments"], registers, strict=False), 1):
        first, *others = [fetch.partition("=")[2].partition(":")[0] for fetch in argument["fetch"]]
        assert first == f"$arg{number}"
        assert f"%{register}" in others


def test_the_kernel_accepts_each_fetch_argument() -> None:

    planned = planned_kernel("x86_64", None, None, None)
    with Kernel() as kernel:
        taken = 0
        for found in explanations(planned, 120, seed=8):
            for argument in found.arguments:
                for number, fetch in enumerate(argument.fetches):
                    place = found.title if found.address == found.symbol.address else f"{found.address:#x}"
                    line = f"p:taken{taken}_{number} {place} {fetch}"
                    kernel.write_file("/tracing/dynamic_events", f"{line}\n")
                    taken += 1
    assert taken > 20


# Text, pictures and pages


@pytest.fixture(scope="module")
def padded() -> PlannedKernel:
    """Return the built-in kernel whose functions begin with landing pads."""
    return PlannedKernel("pads", "x86_64", load_image(IBT, "x86_64"), profile_named("linux-6.12"), "")


def test_a_probe_on_a_landing_pad_is_moved_to_the_fentry_site(padded: PlannedKernel) -> None:
    """A symbol, its address, and the address after the landing pad are the same place for `explain` and
    `check`, as for a registered probe.
    """
    start = padded.tables.kallsyms.lookup_name("gcd")
    assert start is not None
    for place in ("gcd", f"{start:#x}", "gcd+4"):
        found = Explanation(padded, find_place(place, padded.tables))
        (answer,) = check_lines(padded, [Line("", 1, f"p:a {place}")])
        assert found.address == answer.address == start + 4
        assert found.verdict.outcome.value == answer.outcome == "ftrace"
        assert [insn.mode for insn in found.insns[:2]] == ["ftrace", "ftrace"]
        assert [argument.fetches[0] for argument in found.arguments] == ["a=$arg1:u64", "b=$arg2:u64"]
        text = as_text(found, whole=False)
        assert ("Linux puts the probe at +0x4" in text) == (place != "gcd+4")
        assert as_dict(found)["offset"] == 4


def test_coverage_counts_a_landing_pad_as_explain_does(padded: PlannedKernel) -> None:
    judge = padded.judge
    symbols = [each for each in judge.subject.symbols if each.name.startswith("vfs_")]
    assert len(symbols) > 5
    for symbol in symbols:
        verdicts = judge.verdicts(symbol)
        outcomes = Counter(each.outcome for each in verdicts.values())
        assert Counter(outcome_of(reason) for reason in judge.reasons(symbol)) == outcomes
        has_pad = judge.subject.tables.read(symbol.address, 4) == ENDBR64
        assert outcomes[ProbeOutcome.FTRACE] == 1 + has_pad
        assert all(judge.verdict(Location(symbol, at - symbol.address)) == verdicts[at] for at in verdicts)


def test_text_has_at_most_80_columns(kernel: PlannedKernel) -> None:
    for found in explanations(kernel, 60):
        for whole in (False, True):
            text = as_text(found, whole=whole)
            assert max(map(len, text.splitlines())) <= WIDTH
            assert found.title in text.splitlines()[0]
            for word in found.reason.split():
                assert word in text


def test_notes_name_each_place_that_breaks_a_rule(kernel: PlannedKernel) -> None:
    for found in explanations(kernel, 40):
        shown = listing(found, whole=True)
        told = "\n".join(text for _, text in shown.notes)
        for row in shown.rows:
            place = row.insn.reason.partition(": ")[0]
            if row.note and "+" in place:
                assert re.search(rf"^{re.escape(place)}(: |$)", told, re.MULTILINE)
                assert row.insn.reason.rpartition(": ")[2] in told


def test_the_size_is_that_of_kallsyms(kernel: PlannedKernel) -> None:
    for found in explanations(kernel, 40):
        assert as_dict(found)["size"] == found.symbol.size >= found.insns[-1].end - found.symbol.address


def test_one_hidden_instruction_is_singular(kernel: PlannedKernel) -> None:
    found = next(each for each in explanations(kernel, 40) if len(each.insns) > 18)
    place = found.insns[9].address
    one = Explanation(kernel, find_place(f"{place:#x}", kernel.tables))
    assert "  1 instruction before (--function shows it)\n" in as_text(one, whole=False)


def test_a_whole_listing_has_each_instruction_and_each_byte(kernel: PlannedKernel) -> None:
    for found in explanations(kernel, 40):
        text = as_text(found, whole=True)
        for insn in found.insns:
            assert re.search(rf"\+{insn.offset:#x} {insn.code[:7].hex(' ')}", text)


def test_pictures_and_pages_are_well_formed_and_need_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, html = tmp_path / "x.svg", tmp_path / "x.html"
    files = ["--svg", str(svg), "--html", str(html)]
    assert main(["explain", "vfs_read+0x1d", "vfs_write", "--function", *files]) == 0
    assert capsys.readouterr().out == ""
    root = ElementTree.fromstring(svg.read_text())
    texts = "".join(root.itertext())
    (found, _) = explained(capsys, "vfs_read+0x1d", "vfs_write")
    for insn in found["instructions"]:
        assert insn["text"] in texts
    page = References()
    page.feed(html.read_text())
    assert page.depth == 0
    assert not page.outside


@pytest.mark.parametrize("place", ["vfs_read+0x1d", "vfs_read+0x1e", "vfs_write+1", "vfs_read+0x40"])
def test_a_picture_has_the_verdict_and_the_indentation_of_its_lines(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A picture shows the verdict with its reason.

    The picture preserves spaces by xml:space, because not all renderers know the property white-space of CSS.
    """
    svg = tmp_path / "x.svg"
    assert main(["explain", place, "--svg", str(svg)]) == 0
    (found,) = explained(capsys, place)
    assert found["reason"]
    root = ElementTree.fromstring(svg.read_text())
    assert root.get("{http://www.w3.org/XML/1998/namespace}space") == "preserve"
    lines = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    heads = lines[: lines.index(next(line for line in lines if line.lstrip().startswith("+0x")))]
    assert f"{found['verdict']}: {found['reason']}" in " ".join(line.strip() for line in heads)


class References(HTMLParser):
    """Collects what a page loads, and counts open elements."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.depth += tag not in self.VOID
        self.outside += [name for name, _ in attrs if name in ("src", "href")]
        self.outside += [tag] * (tag in ("link", "script", "img", "iframe"))

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag not in self.VOID

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.depth -= tag not in self.VOID


@given(st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), max_size=8), st.integers(1, 6))
def test_each_arrow_has_one_head_and_lines_without_gaps(jumps: list[tuple[int, int]], most: int) -> None:
    found = arrows(jumps, most)
    assert {(arrow.source, arrow.target) for arrow in found} <= set(jumps)
    lines = gutter(found, 15)
    assert len({len(line) for line in lines}) == 1
    heads = {number for number, line in enumerate(lines) if line.endswith(">")}
    assert heads == {arrow.target for arrow in found}
    lanes = len(lines[0]) - 2
    for arrow in found:
        column = lanes - 1 - arrow.lane
        for row in range(arrow.top, arrow.bottom + 1):
            assert lines[row][column] in "|,'+o"
    if len(set(jumps)) <= most:
        assert len(found) == len(set(jumps))


# Bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["vfs_raed"], "vfs_read"),
        (["vfs_read+x"], "offset"),
        (["jiffies"], "data"),
        (["0x1000"], "not in this kernel's text"),
        (["ext4:ext4_read"], "modules"),
        (["vfs_read", "--profile", "windows"], "no profile"),
        (["vfs_read", "--arch", "vax"], "vax"),
        (["vfs_read", "--image", "/a", "--image", "/b"], "explain takes one kernel; check and coverage"),
        (["vfs_read", "--vmcore", "/a", "--vmcore", "/b"], "explain takes one kernel; check and coverage"),
        ([""], "'': no symbol is named"),
        (["+5"], "'+5': no symbol is named"),
        (["vfs_read", "--image", "/nonexistent"], "/nonexistent"),
        (["vfs_read", "--image", "/etc/passwd"], "/etc/passwd"),
        (["vfs_read", "--vmcore", "/etc/passwd"], "/etc/passwd"),
        (["\x1b[2J"], "\\x1b"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, *arguments)


@pytest.mark.parametrize("option", ["--image", "--vmcore"])
@pytest.mark.parametrize("command", [["explain", "vfs_read"], ["check", "/dev/null"], ["coverage"]])
def test_a_file_without_an_end_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], option: str
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    sparse = tmp_path / "sparse"
    sparse.touch()
    os.truncate(sparse, 1 << 40)
    for path in (str(fifo), "/dev/zero", str(tmp_path), str(sparse)):
        assert main([*command, option, path]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert path in line


def test_places_that_exist_are_explained_beside_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "vfs_read", "vfs_raed", "gcd+5", "nosuch+1", "--json"]) == 2
    captured = capsys.readouterr()
    assert [each["place"] for each in json.loads(captured.out)] == ["vfs_read", "gcd+5"]
    first, second = captured.err.splitlines()
    assert "vfs_raed: this kernel has no such symbol; similar names: vfs_read" in first
    assert "nosuch: this kernel has no such symbol" in second


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_each_place_that_does_not_exist_is_named(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "vfs_raed", "nosuch", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = captured.err.splitlines()
    assert "vfs_raed: this kernel has no such symbol" in first
    assert "nosuch: this kernel has no such symbol" in second


@pytest.mark.parametrize("wrong", ["vfs_opne", "do_exti", "vfs_mkdri", "vfs_trunc"])
def test_explain_and_trace_name_the_same_symbols(wrong: str) -> None:
    with Kernel() as kernel:
        listing = kernel.read_file("machine/kallsyms")
    found = nearest_symbols(wrong, load_image().kallsyms)
    assert found
    assert nearest_listed(wrong, listing) == found


@pytest.mark.parametrize("wrong", ["vfs_raed", "do_sys_opn", "tcp_sendmgs", "kmaloc"])
def test_a_wrong_name_names_symbols_that_exist(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, wrong)
    names = line.partition("similar names: ")[2].split(", ")
    assert names[0]
    for name in names:
        assert main(["explain", name, "--json"]) in (0, 2)
        assert "no such symbol" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("sys_read", "similar names: __x64_sys_read"),
        (
            "nf-conntrack:nf_conntrack_in",
            "the kernel names this module nf_conntrack; give nf_conntrack:nf_co",
        ),
        (":nf_conntrack_in", "no module is named; give MODULE:SYMBOL"),
        ("tcp.c:abc", "neither FILE:LINE with a number nor MODULE:SYMBOL"),
        ("ext4:vfs_read+5", "or leave the module out: the kernel itself has vfs_read"),
        ("vfs_*", "`coverage --function` takes patterns"),
        ("_etext", "is not in the kernel's text"),
        ("gcd+0xfffffffffffffff0", "not in this kernel's text, 0x"),
    ],
)
def test_a_refusal_says_what_is_wrong_with_the_place(
    place: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, place)
    assert said in line
    assert "KASLR" not in line


def test_a_name_that_resembles_none_gets_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nearest" not in refused(capsys, "xyzzyplugh+5")


def test_an_offset_out_of_the_named_function_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """If an offset is outside of the named function, `explain` reports this, although the kernel accepts the
    place.
    """
    assert main(["explain", "gcd+0x1000"]) == 0
    assert "place      outside of gcd, which has" in capsys.readouterr().out
    assert main(["explain", "gcd+5"]) == 0
    assert "outside of" not in capsys.readouterr().out


# Kernels of distributions


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Write a made kernel without BTF, in which ftrace knows only one of two functions; return its path."""
    source = made.Kernel()
    at = source.function("vfs_read", CALL_FENTRY + BODY + made.RETURN_THUNK_CALL)
    source.function("quiet", BODY + made.RETURN_THUNK_CALL)
    source.table("mcount_loc", at.to_bytes(8, "little"))
    file = tmp_path / "vmlinuz"
    file.write_bytes(made.vmlinuz(source.elf(), "xz"))
    return file


def test_a_kernel_without_types_says_so(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = explained(capsys, "--image", str(image), "vfs_read")
    assert found["prototype"] is None
    assert found["arguments"] == []
    assert main(["explain", "--image", str(image), "vfs_read"]) == 0
    assert "this kernel has no BTF" in capsys.readouterr().out


def test_the_cached_answer_is_the_first_one(
    image: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = explained(capsys, "--image", str(image), "vfs_read+0x5", "quiet")
    (kept,) = (cache / "kprobefs" / "kernels").glob("*.tables")
    assert explained(capsys, "--image", str(image), "vfs_read+0x5", "quiet") == first
    assert main(["images"]) == 0
    assert "6.1.0-made" in capsys.readouterr().out
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    assert explained(capsys, "--image", str(image), "vfs_read+0x5", "quiet") == first


STAGES = [
    "before",
    "armed",
    "optimize 1: ",
    "optimize 2: ",
    "optimize 3: ",
    "back 1: ",
    "back 2: ",
    "disarmed",
]
"""Beginnings of the titles of the picture's rows, with _ for a blank."""
STAGED = {
    "x86_64": "int_sqrt+0x20",
    "i386": "vfs_write+0x5",
    "riscv64": "int_sqrt+0x1c",
    "riscv64i": "gcd+0x24",
}


@pytest.mark.parametrize("arch", STAGED)
def test_the_stages_of_a_place(arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the picture of the stages, the first and the last row show the place's original bytes.

    The row of the jump shows other bytes.
    """
    file = tmp_path / "x.svg"
    assert main(["explain", "--arch", arch, STAGED[arch], "--stages", str(file)]) == 0
    assert capsys.readouterr().out == ""
    texts = [each.text or "" for each in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]
    assert STAGED[arch] in texts[0]
    starts = [
        next(n for n, text in enumerate(texts) if text.startswith(head.replace("_", " "))) for head in STAGES
    ]
    parts = [texts[first:last] for first, last in pairwise([*starts, len(texts)])]
    rows = ["".join(text for text in part if re.fullmatch("[0-9a-f]{2}", text)) for part in parts]
    (found,) = explained(capsys, "--arch", arch, STAGED[arch])
    start, end = (int(address, 16) for address in found["region"])
    insns = [insn for insn in found["instructions"] if start <= int(insn["address"], 16) < end]
    assert "".join(insn["bytes"] for insn in insns).startswith(rows[0])
    assert rows[0]
    assert rows[0] == rows[-1] != rows[4]
    assert len(set(map(len, rows))) == 1


@pytest.mark.parametrize("places", [["gcd"], ["vfs_write+0x10"], ["gcd+0x5", "gcd+0x8"]])
def test_no_stages_without_one_jump(
    places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.svg"
    assert main(["explain", *places, "--stages", str(file)]) == ExitStatus.USAGE
    assert "--stages: " in capsys.readouterr().err
    assert not file.exists()


def test_a_notrace_function_takes_no_event(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = explained(capsys, "--image", str(image), "quiet")
    assert found["verdict"] == "refused"
    assert {insn["verdict"] for insn in found["instructions"]} == {"refused"}


def test_debian_tcp_sendmsg(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    package = debian.package("linux-image-cloud-amd64")
    (found,) = explained(capsys, "--image", str(package), "tcp_sendmsg+5")
    assert found["prototype"] == "int tcp_sendmsg(struct sock *sk, struct msghdr *msg, size_t size)"
    assert [argument["name"] for argument in found["arguments"]] == ["sk", "msg", "size"]
    assert found["optprobes"] is True
    outcomes = {each["returns"]: each["verdict"] for each in found["others"]}
    assert found["verdict"] == "optimized"
    assert outcomes["return thunks"] == "breakpoint"


def test_a_module_of_debians_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`explain` reads a module from the package, which is unpacked only once."""
    monkeypatch.undo()
    # No earlier test has read a package of this name.
    package = str(tmp_path / "kernel.deb")
    Path(package).symlink_to(debian.package("linux-image-cloud-amd64"))
    opened: list[BinaryIO] = []

    def counting(file: BinaryIO) -> PackageTar:
        opened.append(file)
        return open_package(file)

    monkeypatch.setattr(module_files, "open_package", counting)
    (found,) = explained(capsys, "--image", package, f"{AES}+0x5")
    assert (found["symbol"], found["module"], found["offset"]) == ("aesti_set_key", "aes_ti", 5)
    assert found["instructions"][0]["verdict"] == "ftrace"
    kernel = planned_kernel(None, package, None, None).with_modules(["aes_ti"])
    assert len(kernel.with_modules(["aes_ti"]).modules) == 1
    assert len(opened) == 1
    again = Explanation(kernel, find_place(f"{AES}+0x5", kernel.tables))
    # The address at which the module would be loaded is not known.
    assert found["address"] not in as_text(again, whole=True)
    with pytest.raises(CliError, match="no such symbol; similar names: aes_ti:aesti_set_key"):
        find_place("aes_ti:aesti_set_kye", kernel.tables)
    with pytest.raises(CliError, match="no symbol is named"):
        find_place("aes_ti:", kernel.tables)
    with pytest.raises(CliError, match="in init text, which is freed after boot"):
        find_place("start_kernel", kernel.tables)


def test_all_profiles_answer(capsys: pytest.CaptureFixture[str]) -> None:
    for profile in PROFILES:
        arch, place = ("riscv64", "vfs_read") if profile in RISCV_PROFILES else ("x86_64", "vfs_read+0x5")
        (found,) = explained(capsys, place, "--arch", arch, "--profile", profile)
        assert found["profile"] == profile


def test_a_profile_for_riscv_is_refused_on_x86() -> None:
    with pytest.raises(CliError, match=f"{RISCV_PROFILE} is for RISC-V; add --arch riscv64"):
        planned_kernel(None, None, None, RISCV_PROFILE)
    with pytest.raises(CliError, match=f"{RISCV_PROFILE} is for RISC-V; add --arch riscv64"):
        check_kprobes(MountOptions("/mnt", MachineConfig(profile=RISCV_PROFILE)))
    check_kprobes(MountOptions("/mnt", MachineConfig(arch="riscv64i", profile=RISCV_PROFILE)))


@pytest.mark.parametrize("arch", ["riscv64", "x86_64"])
def test_the_head_names_the_profile_that_a_mount_needs(arch: str) -> None:
    """An explanation names the profile that a mount needs for the same answer, unless this profile is the
    mount's default.

    The default linux-6.1 has no jumps on RISC-V.
    """
    kernel = planned_kernel(arch, None, None, None)
    text = as_text(Explanation(kernel, find_place("gcd", kernel.tables)), whole=False)
    head = " ".join(text.partition("\n\n")[0].split())
    needs = kernel.profile.name != MachineConfig().profile
    assert (f"(a mount needs --profile {kernel.profile.name} for it)" in head) == needs
    assert needs == (arch == "riscv64")


def test_the_guide_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    package = debian.package("linux-image-6.1.0-50-cloud-amd64")
    shown = [step for body in blocks("console plan", GUIDE) for step in steps(body)]
    assert shown
    for step in shown:
        _, *arguments = step.command.replace("$D", str(package)).split()
        assert main(arguments) == 0
        assert capsys.readouterr().out.rstrip() == step.output.rstrip()


@pytest.mark.parametrize(("arch", "profile"), [("x86_64", "linux-6.1"), ("riscv64", "riscv-optprobes-2023")])
def test_the_default_profile_of_an_architecture(arch: str, profile: str) -> None:
    assert chosen_profile(None, arch, load_image(None, arch)).name == profile


# Hostile kernels


def test_types_that_contain_each_other_end() -> None:
    """A type that contains itself is reported as unusable BTF and causes no endless loop.

    Here a prototype has pointers to itself, and structures and arrays have themselves as elements.
    """
    types = made.Btf()
    types.add(12, "f", 2)
    types.prototype(0, ("a", 3), ("b", 3))
    types.add(2, "", 2)
    types.structure("s", 8, ("a", 4, 0), ("b", 4, 0), ("c", 5, 0))
    types.add(3, "", 0, (5).to_bytes(4, "little") * 2 + (2).to_bytes(4, "little"))
    types.add(10, "", 6)
    btf = Btf(types.data())
    for ask in (lambda: prototype(btf, "f"), lambda: members_at(btf, 4, 0), lambda: declaration(btf, 6)):
        with pytest.raises(UnusableFile, match="BTF"):
            ask()
    assert size_of(btf, 5) == 0


def test_names_of_a_kernel_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = made.Kernel()
    at = source.function("f\x1b[2J", CALL_FENTRY + BODY + b"\xc3")
    source.table("mcount_loc", at.to_bytes(8, "little"))
    image, svg, html = (tmp_path / name for name in ("vmlinuz", "x.svg", "x.html"))
    image.write_bytes(made.vmlinuz(source.elf(), "xz"))
    words = ["explain", "--image", str(image), f"{at:#x}"]
    assert main(words) == 0
    assert main([*words, "--svg", str(svg), "--html", str(html)]) == 0
    for text in (capsys.readouterr().out, svg.read_text(), html.read_text()):
        assert "\x1b" not in text
    assert "\\x1b[2J" in "".join(ElementTree.fromstring(svg.read_text()).itertext())
