"""One hand-made function for each rule of registering and optimizing a probe."""

from __future__ import annotations

from errno import EILSEQ, EINVAL, ENOENT, EOPNOTSUPP
from typing import Any

import pytest

from emulated_kernel.arch.function import Function, FunctionTable, Site, TextLayout
from emulated_kernel.arch.reason import ERRNO, Reason
from emulated_kernel.arch.x86.verdict import Mode, Verdict, Verdicts

TEXT = 0xFFFF_FFFF_8100_0000
ADDR = TEXT + 0x1000
THUNKS = range(TEXT + 0x8000, TEXT + 0x8100)
FENTRY = "0f1f440000"
MOV_RBP = "4889e5"
XOR_EAX = "31c0"
RET_INT3 = "c3cccccccc"


def verdict(
    code: str, offset: int = 5, name: str = "foo", others: tuple[Function, ...] = (), **fields: Any
) -> Verdict:
    """The verdict at `offset` of a function with an fentry site in front, unless `fields` says otherwise."""
    data = bytes.fromhex(code.replace(" ", ""))
    fields = {"fentry_sites": frozenset({ADDR})} | fields
    function = Function(name=name, addr=ADDR, size=fields.pop("size", len(data)), code=data, **fields)
    layout = TextLayout(
        text=range(TEXT, TEXT + 0x9000),
        image_end=TEXT + 0x20_0000,
        entry_text=range(TEXT + 0x7000, TEXT + 0x7100),
        thunks=THUNKS,
    )
    return Verdicts(FunctionTable.build(layout, (function, *others))).at(ADDR + offset)


def body(*insns: str) -> str:
    return FENTRY + "".join(insns) + RET_INT3


def reason(answer: Verdict) -> Reason | None:
    return answer.finding.reason if answer.finding else None


def test_optimized_with_the_length_of_whole_instructions() -> None:
    answer = verdict(body(MOV_RBP, MOV_RBP, MOV_RBP))
    assert (answer.mode, answer.length, answer.errno, answer.flags) == (Mode.OPTIMIZED, 6, 0, "[OPTIMIZED]")
    assert answer.finding is None


def test_entry_with_fentry_site_is_ftrace_based() -> None:
    answer = verdict(body(MOV_RBP), offset=0)
    assert (answer.mode, answer.flags, reason(answer)) == (Mode.FTRACE, "[FTRACE]", Reason.FTRACE)


def test_call_that_ftrace_has_not_yet_replaced_reads_as_its_nop() -> None:
    assert verdict("e800000000" + body()[10:] + MOV_RBP * 3, offset=10).errno == 0


@pytest.mark.parametrize("offset", [6, 7, 9])
def test_inside_an_instruction(offset: int) -> None:
    answer = verdict(body(MOV_RBP, MOV_RBP), offset=offset)
    assert (answer.errno, reason(answer)) == (EILSEQ, Reason.NOT_A_BOUNDARY)


def test_boundaries_count_from_the_function_start() -> None:
    """The bytes 48 b8 swallow what would be a good instruction by itself."""
    assert verdict(body("48b8" + MOV_RBP * 2 + "9090"), offset=7).errno == EILSEQ


def test_padding_breakpoint_cannot_be_copied() -> None:
    answer = verdict(body(MOV_RBP), offset=9)
    assert (answer.errno, reason(answer)) == (EINVAL, Reason.NOT_COPYABLE)


@pytest.mark.parametrize("insn", ["8ed0", "488ed0"])
def test_loading_the_stack_segment_masks_the_breakpoint(insn: str) -> None:
    assert reason(verdict(body(insn, MOV_RBP))) is Reason.NOT_COPYABLE


@pytest.mark.parametrize("insn", ["ff20", "ff10", "ff2c24", "48cf", "0f01c1", "67ffe0"])
def test_control_transfer_without_emulation(insn: str) -> None:
    answer = verdict(body(insn, MOV_RBP))
    assert (answer.errno, reason(answer)) == (EOPNOTSUPP, Reason.NOT_EMULATED)


@pytest.mark.parametrize("insn", ["0f0b78656e" + "89c0", "0f0b6b766d" + "89c0"])
def test_forced_emulation_prefix(insn: str) -> None:
    assert reason(verdict(body(insn))) is Reason.NOT_COPYABLE


def test_bug_is_refused_and_a_plain_ud2_is_not() -> None:
    code = body("0f0b", MOV_RBP, MOV_RBP)
    assert reason(verdict(code, bug_entries=frozenset({ADDR + 5}))) is Reason.BUG
    assert verdict(code).errno == 0


def test_jump_label_is_refused_on_all_its_bytes() -> None:
    site = (Site(ADDR + 5, 5),)
    code = body(FENTRY, MOV_RBP, MOV_RBP)
    assert [reason(verdict(code, at, jump_labels=site)) for at in (5, 6, 9)] == [Reason.JUMP_LABEL] * 3
    assert verdict(code, 10, jump_labels=site).mode is Mode.OPTIMIZED


def test_static_call_is_refused() -> None:
    assert reason(verdict(body("e800000000"), static_calls=(Site(ADDR + 5, 5),))) is Reason.STATIC_CALL


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("jump_labels", Reason.RESERVED_BY_JUMP_LABEL),
        ("static_calls", Reason.RESERVED_BY_STATIC_CALL),
    ],
)
def test_patched_site_in_the_replaced_bytes(field: str, expected: Reason) -> None:
    code = body(MOV_RBP, FENTRY, MOV_RBP)
    answer = verdict(code, **{field: (Site(ADDR + 8, 5),)})
    assert (answer.errno, answer.mode, reason(answer)) == (0, Mode.INT3, expected)
    assert answer.finding is not None
    assert answer.finding.addr == ADDR + 8


def test_second_fentry_site_in_the_replaced_bytes() -> None:
    sites = frozenset({ADDR, ADDR + 8})
    assert reason(verdict(body(MOV_RBP, FENTRY), fentry_sites=sites)) is Reason.RESERVED_BY_FTRACE


def test_blacklisted() -> None:
    answer = verdict(body(MOV_RBP), blacklisted=True)
    assert (answer.errno, reason(answer)) == (EINVAL, Reason.BLACKLISTED)


def test_notrace_function_takes_no_event_but_a_kprobe() -> None:
    code = bytes.fromhex(MOV_RBP * 2 + RET_INT3)
    table = FunctionTable.build(
        TextLayout(range(TEXT, TEXT + 0x2000), TEXT + 0x3000), [Function("foo", ADDR, len(code), code)]
    )
    assert reason(Verdicts(table).at(ADDR)) is Reason.NOTRACE
    assert Verdicts(table, events=False).at(ADDR).mode is Mode.OPTIMIZED


@pytest.mark.parametrize("name", ["foo.cold", "foo.part.0", "foo.isra.0.cold"])
def test_split_off_part_follows_its_function(name: str) -> None:
    def parent(**fields: Any) -> tuple[Function]:
        return (Function("foo", ADDR + 0x1000, 16, bytes(16), **fields),)

    code = MOV_RBP * 3 + RET_INT3
    site = frozenset({ADDR + 0x1000})
    cold: dict[str, Any] = {"offset": 0, "name": name, "fentry_sites": frozenset()}
    assert verdict(code, **cold, others=parent(fentry_sites=site)).mode is Mode.OPTIMIZED
    assert reason(verdict(code, **cold, others=parent())) is Reason.NOTRACE
    assert reason(verdict(code, **cold)) is Reason.NOTRACE
    both = parent(fentry_sites=site, blacklisted=True)
    assert reason(verdict(code, **cold, others=both)) is Reason.BLACKLISTED


def test_sample_of_functions_does_not_guess_about_a_missing_parent() -> None:
    layout = TextLayout(range(TEXT, TEXT + 0x2000), TEXT + 0x3000)
    part = Function("foo.cold", ADDR, 8, bytes.fromhex(MOV_RBP + RET_INT3))
    with pytest.raises(LookupError, match="foo"):
        Verdicts(FunctionTable.build(layout, [part], complete=False)).at(ADDR)


@pytest.mark.parametrize(
    ("offset", "errno"), [(0x10_0000, EINVAL), (0x30_0000, ENOENT), (-0x10_0000, ENOENT)]
)
def test_outside_of_text(offset: int, errno: int) -> None:
    assert verdict(body(MOV_RBP), offset=offset).errno == errno


def test_hole_in_text_is_not_guessed() -> None:
    with pytest.raises(LookupError):
        verdict(body(MOV_RBP), offset=0x2000)


def test_entry_text_is_never_optimized() -> None:
    at = TEXT + 0x7000
    code = bytes.fromhex(body(MOV_RBP, MOV_RBP))
    layout = TextLayout(range(TEXT, TEXT + 0x9000), TEXT + 0x9000, range(at, at + 0x100))
    function = Function("foo", at, len(code), code, fentry_sites=frozenset({at}))
    assert reason(Verdicts(FunctionTable.build(layout, [function])).at(at + 5)) is Reason.ENTRY_TEXT


@pytest.mark.parametrize(("size", "mode"), [(10, Mode.OPTIMIZED), (9, Mode.INT3)])
def test_room_for_the_jump(size: int, mode: Mode) -> None:
    answer = verdict(FENTRY + "90" * 5, size=size)
    assert answer.mode is mode
    assert reason(answer) in (None, Reason.NO_ROOM)


def test_exception_table_entry_anywhere_in_the_function() -> None:
    code = body(MOV_RBP, MOV_RBP, "8b07")
    answer = verdict(code, exception_entries=frozenset({ADDR + 11}))
    assert reason(answer) is Reason.EXCEPTION_TABLE
    assert answer.finding is not None
    assert answer.finding.addr == ADDR + 11


def test_undecodable_tail() -> None:
    answer = verdict(body(MOV_RBP, MOV_RBP) + "c4e2ffff00")
    assert (answer.errno, reason(answer)) == (0, Reason.UNDECODABLE)


@pytest.mark.parametrize("jump", ["ffe0", "ff24c500000081", "ff2f"])
def test_indirect_jump_anywhere_in_the_function(jump: str) -> None:
    assert reason(verdict(body(MOV_RBP, MOV_RBP) + jump + "90" * 8)) is Reason.INDIRECT_JUMP


def test_indirect_call_is_harmless() -> None:
    assert verdict(body(MOV_RBP, MOV_RBP) + "ffd0" + "90" * 8).mode is Mode.OPTIMIZED


@pytest.mark.parametrize(
    ("target", "harmful"),
    [(THUNKS.start - 1, False), (THUNKS.start, True), (THUNKS.stop, True), (THUNKS.stop + 1, False)],
)
def test_jump_into_the_thunks(target: int, harmful: bool) -> None:
    code = body(MOV_RBP, MOV_RBP)
    distance = target - (ADDR + len(code) // 2 + 5)
    answer = verdict(code + "e9" + distance.to_bytes(4, "little", signed=True).hex())
    assert (reason(answer) is Reason.THUNK_JUMP) == harmful


@pytest.mark.parametrize("opcode", ["70", "7f", "e0", "e2", "e3", "eb", "e9", "0f84"])
@pytest.mark.parametrize(("into", "harmful"), [(0, False), (1, True), (4, True), (5, True), (6, False)])
def test_jump_into_the_replaced_bytes(opcode: str, into: int, harmful: bool) -> None:
    """The byte behind the five counts as well."""
    code = body(MOV_RBP, MOV_RBP, MOV_RBP)
    size = 4 if opcode in ("e9", "0f84") else 1
    distance = 5 + into - (len(code) // 2 + len(opcode) // 2 + size)
    answer = verdict(code + opcode + distance.to_bytes(size, "little", signed=True).hex() + "90" * 4)
    assert (reason(answer) is Reason.JUMP_INTO_RANGE) == harmful


def test_call_into_the_replaced_bytes_is_no_jump() -> None:
    code = body(MOV_RBP, MOV_RBP, MOV_RBP)
    distance = 6 - (len(code) // 2 + 5)
    call = "e8" + distance.to_bytes(4, "little", signed=True).hex()
    assert verdict(code + call).mode is Mode.OPTIMIZED


def test_vex_opcode_70_reads_as_a_conditional_jump() -> None:
    """Linux compares opcode bytes: vpshufd with a fitting immediate looks like a jump back."""
    code = body(MOV_RBP, MOV_RBP, MOV_RBP)
    distance = 7 - (len(code) // 2 + 5)
    vpshufd = "c5f970c0" + distance.to_bytes(1, "little", signed=True).hex()
    assert reason(verdict(code + vpshufd)) is Reason.JUMP_INTO_RANGE


@pytest.mark.parametrize(
    "insn",
    ["7410", "e800000000", "c1e004", "d3e0", "f7d8", "ffc0", "67488b07", "2e8b07", "f4", "d9c0", "0fa2"],
)
def test_not_boostable(insn: str) -> None:
    answer = verdict(body(XOR_EAX, insn, MOV_RBP, MOV_RBP))
    assert reason(answer) is Reason.NOT_BOOSTABLE
    assert answer.finding is not None
    assert answer.finding.addr == ADDR + 7


@pytest.mark.parametrize(
    "insn", ["f00fb10f", "9c", "fa", "f3a4", "0fb6c0", "48b80000000000000000", "c5f96fc0"]
)
def test_boostable(insn: str) -> None:
    assert verdict(body(XOR_EAX, insn, MOV_RBP, MOV_RBP)).mode is Mode.OPTIMIZED


def test_breakpoint_in_the_replaced_bytes() -> None:
    assert reason(verdict(FENTRY + XOR_EAX + RET_INT3)) is Reason.NOT_COPYABLE_TO_DETOUR


def test_every_refusal_has_an_errno_and_a_line() -> None:
    refusals = {r for r in Reason if r in ERRNO}
    assert len({r.value for r in Reason}) == len(Reason)
    assert all(ERRNO[r] > 0 for r in refusals)
    answer = verdict(body(MOV_RBP), blacklisted=True)
    assert answer.finding is not None
    assert answer.finding.text == f"{ADDR:#x}: in the kprobe blacklist"
