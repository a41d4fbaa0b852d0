"""One hand-made function for each rule of registering and optimizing a probe."""

from __future__ import annotations

from dataclasses import replace
from errno import EOPNOTSUPP
from typing import Any

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.function import Function, PatchSite
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.x86.analysis import X86FunctionAnalysis
from tests.arch.sample import Sample
from tests.oracle.recorded import errno_name
from tests.oracle.verdict import Answer, answer, linux_verdict, probed

TEXT = 0xFFFF_FFFF_8100_0000
ADDR = TEXT + 0x1000
THUNKS = range(TEXT + 0x8000, TEXT + 0x8100)
ENTRY_TEXT = range(TEXT + 0x7000, TEXT + 0x7100)
NAMES = {
    "__entry_text_start": ENTRY_TEXT.start,
    "__entry_text_end": ENTRY_TEXT.stop,
    "__indirect_thunk_start": THUNKS.start,
    "__indirect_thunk_end": THUNKS.stop,
}
FENTRY = "0f1f440000"
MOV_RBP = "4889e5"
XOR_EAX = "31c0"
RET_INT3 = "c3cccccccc"


def sample(*functions: Function, **fields: Any) -> Sample:
    return Sample(functions, range(TEXT, TEXT + 0x9000), TEXT + 0x20_0000, NAMES, **fields)


def foo(code: str, at: int = ADDR, **fields: Any) -> Function:
    """Return a function `foo` with this code, and with an fentry site at its start unless `fields` says
    otherwise.
    """
    data = bytes.fromhex(code.replace(" ", ""))
    fields = {"name": "foo", "size": len(data), "fentry_sites": (PatchSite(at, 5),)} | fields
    return Function(addr=at, code=data, **fields)


def verdict(
    code: str,
    offset: int = 5,
    others: tuple[Function, ...] = (),
    blacklisted: tuple[str, ...] = (),
    **fields: Any,
) -> Answer:
    """Return the answer of Linux's rules at `offset` of a function `foo` with this code.

    `others`: further functions of the kernel. `blacklisted`: names of blacklisted functions. `fields`: as for
    foo().
    """
    known = sample(foo(code, **fields), *others, blacklisted=frozenset(blacklisted))
    return answer(linux_verdict(known), ADDR + offset)


def body(*insns: str) -> str:
    return FENTRY + "".join(insns) + RET_INT3


def found(answered: Answer) -> Rejection | None:
    """Return the rejection that decides, or None if the place can be optimized."""
    decides = answered.refused or answered.detoured
    return decides if isinstance(decides, Rejection) else None


def reason(answered: Answer) -> RejectReason | None:
    finding = found(answered)
    return finding.reason if finding else None


def test_optimized_with_the_length_of_whole_instructions() -> None:
    told = verdict(body(MOV_RBP, MOV_RBP, MOV_RBP))
    assert (told.errno, told.flags) == ("0", "[OPTIMIZED]")
    assert told.detoured == Region(ADDR + 5, bytes.fromhex(MOV_RBP * 2))


def test_entry_with_fentry_site_is_ftrace_based() -> None:
    told = verdict(body(MOV_RBP), offset=0)
    assert (told.errno, told.flags, reason(told)) == ("0", "[FTRACE]", RejectReason.FTRACE)


def test_call_that_ftrace_has_not_yet_replaced_reads_as_its_nop() -> None:
    assert verdict("e800000000" + body()[10:] + MOV_RBP * 3, offset=10).errno == "0"


@pytest.mark.parametrize("offset", [6, 7, 9])
def test_inside_an_instruction(offset: int) -> None:
    told = verdict(body(MOV_RBP, MOV_RBP), offset=offset)
    assert (told.errno, reason(told)) == ("EILSEQ", RejectReason.NOT_A_BOUNDARY)


def test_boundaries_count_from_the_function_start() -> None:
    """Instruction boundaries are found by decoding from the function's start.

    Here the bytes 48 b8 begin an instruction whose operand is the next eight bytes. A probe within the
    operand is refused, although these bytes alone would be valid instructions.
    """
    assert verdict(body("48b8" + MOV_RBP * 2 + "9090"), offset=7).errno == "EILSEQ"


def test_padding_breakpoint_cannot_be_copied() -> None:
    told = verdict(body(MOV_RBP), offset=9)
    assert (told.errno, reason(told)) == ("EINVAL", RejectReason.NOT_COPYABLE)


@pytest.mark.parametrize("insn", ["8ed0", "488ed0"])
def test_loading_the_stack_segment_masks_the_breakpoint(insn: str) -> None:
    assert reason(verdict(body(insn, MOV_RBP))) is RejectReason.NOT_COPYABLE


@pytest.mark.parametrize("insn", ["ff20", "ff10", "ff2c24", "48cf", "0f01c1", "67ffe0"])
def test_control_transfer_without_emulation(insn: str) -> None:
    told = verdict(body(insn, MOV_RBP))
    assert (told.errno, reason(told)) == (errno_name(EOPNOTSUPP), RejectReason.NOT_EMULATED)


@pytest.mark.parametrize("insn", ["0f0b78656e" + "89c0", "0f0b6b766d" + "89c0"])
def test_forced_emulation_prefix(insn: str) -> None:
    assert reason(verdict(body(insn))) is RejectReason.NOT_COPYABLE


def test_bug_is_refused_and_a_plain_ud2_is_not() -> None:
    code = body("0f0b", MOV_RBP, MOV_RBP)
    assert reason(verdict(code, bug_entries=frozenset({ADDR + 5}))) is RejectReason.BUG
    assert verdict(code).errno == "0"


def test_jump_label_is_refused_on_all_its_bytes() -> None:
    site = (PatchSite(ADDR + 5, 5),)
    code = body(FENTRY, MOV_RBP, MOV_RBP)
    assert [reason(verdict(code, at, jump_labels=site)) for at in (5, 6, 9)] == [RejectReason.JUMP_LABEL] * 3
    assert verdict(code, 10, jump_labels=site).flags == "[OPTIMIZED]"


def test_static_call_is_refused() -> None:
    assert (
        reason(verdict(body("e800000000"), static_calls=(PatchSite(ADDR + 5, 5),)))
        is RejectReason.STATIC_CALL
    )


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("jump_labels", RejectReason.RESERVED_BY_JUMP_LABEL),
        ("static_calls", RejectReason.RESERVED_BY_STATIC_CALL),
    ],
)
def test_patched_site_in_the_replaced_bytes(field: str, expected: RejectReason) -> None:
    code = body(MOV_RBP, FENTRY, MOV_RBP)
    told = verdict(code, **{field: (PatchSite(ADDR + 8, 5),)})
    assert (told.errno, told.flags, reason(told)) == ("0", "", expected)
    assert isinstance(told.detoured, Rejection)
    assert told.detoured.addr == ADDR + 8


def test_second_fentry_site_in_the_replaced_bytes() -> None:
    sites = (PatchSite(ADDR, 5), PatchSite(ADDR + 8, 5))
    assert reason(verdict(body(MOV_RBP, FENTRY), fentry_sites=sites)) is RejectReason.RESERVED_BY_FTRACE


def test_blacklisted() -> None:
    told = verdict(body(MOV_RBP), blacklisted=("foo",))
    assert (told.errno, reason(told)) == ("EINVAL", RejectReason.BLACKLISTED)


def test_notrace_function_takes_no_event_but_a_kprobe() -> None:
    known = linux_verdict(sample(foo(MOV_RBP * 2 + RET_INT3, fentry_sites=())))
    assert reason(answer(known, ADDR)) is RejectReason.NOTRACE
    assert probed(known, ADDR).flags == "[OPTIMIZED]"


@pytest.mark.parametrize("name", ["foo.cold", "foo.part.0", "foo.isra.0.cold"])
def test_split_off_part_follows_its_function(name: str) -> None:
    at = ADDR + 0x1000
    code = MOV_RBP * 3 + RET_INT3
    cold: dict[str, Any] = {"offset": 0, "name": name, "fentry_sites": ()}
    traced, hidden = foo("00" * 16, at), foo("00" * 16, at, fentry_sites=())
    assert verdict(code, **cold, others=(traced,)).flags == "[OPTIMIZED]"
    assert reason(verdict(code, **cold, others=(hidden,))) is RejectReason.NOTRACE
    assert reason(verdict(code, **cold)) is RejectReason.NOTRACE
    assert reason(verdict(code, **cold, others=(traced,), blacklisted=("foo",))) is RejectReason.BLACKLISTED


def test_sample_of_functions_does_not_guess_about_a_missing_parent() -> None:
    part = foo(MOV_RBP + RET_INT3, name="foo.cold", fentry_sites=())
    names = dict.fromkeys(NAMES, TEXT)
    with pytest.raises(LookupError, match="foo"):
        answer(linux_verdict(replace(sample(part, complete=False), names=names)), ADDR)


@pytest.mark.parametrize(
    ("offset", "errno"), [(0x10_0000, "EINVAL"), (0x30_0000, "ENOENT"), (-0x10_0000, "ENOENT")]
)
def test_outside_of_text(offset: int, errno: str) -> None:
    assert verdict(body(MOV_RBP), offset=offset).errno == errno


def test_hole_in_text_is_not_guessed() -> None:
    with pytest.raises(LookupError):
        verdict(body(MOV_RBP), offset=0x2000)


def test_entry_text_is_never_optimized() -> None:
    known = linux_verdict(sample(foo(body(MOV_RBP, MOV_RBP), ENTRY_TEXT.start)))
    assert reason(answer(known, ENTRY_TEXT.start + 5)) is RejectReason.ENTRY_TEXT


@pytest.mark.parametrize(("size", "flags"), [(10, "[OPTIMIZED]"), (9, "")])
def test_room_for_the_jump(size: int, flags: str) -> None:
    told = verdict(FENTRY + "90" * 5, size=size)
    assert told.flags == flags
    assert reason(told) in (None, RejectReason.REGION_TOO_SHORT)


def test_exception_table_entry_anywhere_in_the_function() -> None:
    code = body(MOV_RBP, MOV_RBP, "8b07")
    told = verdict(code, exception_entries=frozenset({ADDR + 11}))
    assert reason(told) is RejectReason.EXCEPTION_TABLE
    assert isinstance(told.detoured, Rejection)
    assert told.detoured.addr == ADDR + 11


def test_undecodable_tail() -> None:
    told = verdict(body(MOV_RBP, MOV_RBP) + "c4e2ffff00")
    assert (told.errno, reason(told)) == ("0", RejectReason.UNDECODABLE)


@pytest.mark.parametrize("jump", ["ffe0", "ff24c500000081", "ff2f"])
def test_indirect_jump_anywhere_in_the_function(jump: str) -> None:
    assert reason(verdict(body(MOV_RBP, MOV_RBP) + jump + "90" * 8)) is RejectReason.INDIRECT_JUMP


def test_indirect_call_is_harmless() -> None:
    assert verdict(body(MOV_RBP, MOV_RBP) + "ffd0" + "90" * 8).flags == "[OPTIMIZED]"


@pytest.mark.parametrize(
    ("target", "harmful"),
    [(THUNKS.start - 1, False), (THUNKS.start, True), (THUNKS.stop, True), (THUNKS.stop + 1, False)],
)
def test_jump_into_the_thunks(target: int, harmful: bool) -> None:
    code = body(MOV_RBP, MOV_RBP)
    distance = target - (ADDR + len(code) // 2 + 5)
    told = verdict(code + "e9" + distance.to_bytes(4, "little", signed=True).hex())
    assert (reason(told) is RejectReason.THUNK_JUMP) == harmful


@pytest.mark.parametrize("opcode", ["70", "7f", "e0", "e2", "e3", "eb", "e9", "0f84"])
@pytest.mark.parametrize(("into", "harmful"), [(0, False), (1, True), (4, True), (5, True), (6, False)])
def test_jump_into_the_replaced_bytes(opcode: str, into: int, harmful: bool) -> None:
    """A jump of the function to offset 1, 4 or 5 of the region prevents the optimization; the first byte and
    offset 6 do not matter.

    The jump that is written replaces five bytes. Linux also refuses a jump to the byte after them.
    """
    code = body(MOV_RBP, MOV_RBP, MOV_RBP)
    size = 4 if opcode in ("e9", "0f84") else 1
    distance = 5 + into - (len(code) // 2 + len(opcode) // 2 + size)
    told = verdict(code + opcode + distance.to_bytes(size, "little", signed=True).hex() + "90" * 4)
    assert (reason(told) is RejectReason.JUMP_INTO_RANGE) == harmful


def test_call_into_the_replaced_bytes_is_no_jump() -> None:
    code = body(MOV_RBP, MOV_RBP, MOV_RBP)
    distance = 6 - (len(code) // 2 + 5)
    call = "e8" + distance.to_bytes(4, "little", signed=True).hex()
    assert verdict(code + call).flags == "[OPTIMIZED]"


def test_vex_opcode_70_reads_as_a_conditional_jump() -> None:
    """Linux compares opcode bytes only: vpshufd with a fitting immediate counts as a jump back into the
    replaced bytes.
    """
    code = body(MOV_RBP, MOV_RBP, MOV_RBP)
    distance = 7 - (len(code) // 2 + 5)
    vpshufd = "c5f970c0" + distance.to_bytes(1, "little", signed=True).hex()
    assert reason(verdict(code + vpshufd)) is RejectReason.JUMP_INTO_RANGE


@pytest.mark.parametrize(
    "insn",
    ["7410", "e800000000", "c1e004", "d3e0", "f7d8", "ffc0", "67488b07", "2e8b07", "f4", "d9c0", "0fa2"],
)
def test_not_boostable(insn: str) -> None:
    told = verdict(body(XOR_EAX, insn, MOV_RBP, MOV_RBP))
    assert reason(told) is RejectReason.NOT_BOOSTABLE
    assert isinstance(told.detoured, Rejection)
    assert told.detoured.addr == ADDR + 7


@pytest.mark.parametrize(
    "insn", ["f00fb10f", "9c", "fa", "f3a4", "0fb6c0", "48b80000000000000000", "c5f96fc0"]
)
def test_boostable(insn: str) -> None:
    assert verdict(body(XOR_EAX, insn, MOV_RBP, MOV_RBP)).flags == "[OPTIMIZED]"


def test_breakpoint_in_the_replaced_bytes() -> None:
    assert reason(verdict(FENTRY + XOR_EAX + RET_INT3)) is RejectReason.NOT_COPYABLE_TO_DETOUR


def test_every_refusal_has_an_errno_and_a_line() -> None:
    assert len({r.value for r in RejectReason}) == len(RejectReason)
    assert all(r.errno >= 0 for r in RejectReason)
    told = verdict(body(MOV_RBP), blacklisted=("foo",))
    assert told.refused is not None
    assert told.refused.text == "foo: in the kprobe blacklist"


def test_few_functions_are_remembered_and_those_asked_about_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emulated_kernel.arch.probe_checks.MAX_KNOWN", 2)
    one, two, three = (ADDR + 0x100 * index for index in range(3))
    code = body("90")
    known = linux_verdict(sample(*(foo(code, at, name=f"f{at:x}") for at in (one, two, three))))
    decoded, analyse = list[int](), known.analyse

    def analysed(function: Function) -> X86FunctionAnalysis:
        decoded.append(function.addr)
        return analyse(function)

    monkeypatch.setattr(known, "analyse", analysed)
    for at in (one, two, one, three, one, three, two, three, one):
        assert known.may_probe(at + 5) is None
    assert decoded == [one, two, three, two, one]
