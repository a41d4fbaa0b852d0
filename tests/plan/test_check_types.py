"""`kprobefs check` compares the types of arguments with those of parameters, members and results."""

from __future__ import annotations

import pytest

from kprobefs.definitions.syntax import Line
from kprobefs.plan.check import check_lines
from kprobefs.plan.planned_kernel import planned_kernel


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        ("a=$arg1:s32 b=$arg2:u64 c=$arg3:x64", []),
        ("a=$arg1:x32 b=$arg2", []),
        ("a=$arg1", ["type-size"]),
        ("a=$arg1:u32", ["type-sign"]),
        ("a=$arg1:u64", ["type-size"]),
        ("b=$arg2:u32", ["type-size"]),
        ("b=%si:u32", ["type-size"]),
        ("c=+0($arg3):s32", []),
        ("c=+8($arg3)", []),
        ("c=+010($arg3) d=+0x8($arg3)", []),
        ("c=+012($arg3)", ["no-member"]),
        ("c=+0($arg3):u64", ["type-size"]),
        ("c=+4($arg3):u32", ["no-member"]),
        ("c=+1($arg3):s32", ["no-member"]),
        ("c=+12($arg3):u64", ["no-member"]),
        ("c=+1($arg3):string", ["no-member"]),
        ("c=+9($arg3):x8[4]", ["no-member"]),
        ("c=+8($arg3):x8[4]", []),
        ("c=+8($arg3):string", ["type-size"]),
        ("c=+8($arg3):symbol", []),
        ("c=+16($arg3):u64", ["no-member"]),
        ("c=+6($arg3):u16 d=+6($arg3):u8 e=+7($arg3):x8 f=+7($arg3):s8", []),
        ("c=+7($arg3):u16 d=+7($arg3):string e=+7($arg3):u8[1] f=+5($arg3):u8", ["no-member"] * 4),
        ("c=+0(%dx):u8 d=%r8:u8", ["type-size"]),
        ("d=$comm e=@linux_banner:string", []),
        ("e=$arg4:u64", ["no-parameter"]),
        ("c=$arg3:x64 e=+8(+0($arg12)):u8 f=%si:u64", ["no-parameter"]),
    ],
)
def test_types_are_compared_with_those_of_the_kernel(typed: str, words: str, rules: list[str]) -> None:
    kernel = planned_kernel(None, typed, None, None)
    (answer,) = check_lines(kernel, [Line("x", 1, f"p:x f {words}")])
    assert [finding.rule for finding in answer.findings] == rules
    for finding in answer.findings:
        assert finding.column is not None
        assert f"p:x f {words}"[finding.column - 1] == " "


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        ("a=+8(+8($arg1)):u64 b=+0(+8(+16(+16($arg1)))):s32", []),
        ("a=+4(+8($arg1)):u32", ["no-member"]),
        ("a=+8(+9($arg1)):u64", ["no-member"]),
        ("a=+8(+8(+17($arg1))):u64", ["no-member"]),
        ("a=+8(+8(+16(+200($arg1)))):u64", ["no-pointer"]),
        ("a=+0(+16(+8($arg1))):u64", ["no-member"]),
        ("a=+16(+8($arg1)):u64", ["no-member"]),
        ("a=+0(+8($arg1)):u64", ["type-size"]),
        ("a=+0(+0($arg1)):u64", ["no-pointer"]),
        ("a=+0(+4($arg1)):u64", ["no-pointer"]),
        ("a=+0(+24($arg1)):u64 b=+0($arg5):u8", []),
        ("a=+0(+32($arg1)):u64", ["no-pointer"]),
        ("a=+0($arg2):u64", ["no-pointer"]),
        ("a=+0(+40($arg1)):string b=+40($arg1):string", ["type-size"]),
        ("a=+48($arg1):string b=+51($arg1):string", []),
        ("a=+0(+48($arg1)):string", ["no-pointer"]),
        ("a=+99(+56($arg1)):u16 b=+99($arg4):u16", []),
        ("a=+0(+64($arg1)):s32 b=+40(+64($arg1)):x64", []),
        ("a=+12(+64($arg1)):u32", ["no-member"]),
        ("a=+72($arg1):string b=+99($arg1):string", []),
        ("a=+99($arg1):u16", ["type-size"]),
        ("a=+4($arg1):b3@0/8 b=+5($arg1):u8 c=+6($arg1):u16", []),
        ("a=+7($arg1):u8 b=+0($arg1):b1@3/8", []),
        ("a=+0(+8($arg3)):string b=+8($arg3):x64", []),
        ("a=+8($arg3):u32 b=+8($arg3):string", ["type-size"] * 2),
        ("a=-8($arg1):u64 b=+-8($arg1):u64", ["no-member"] * 2),
        ("a=+u8(+u8($arg1)):u32", ["type-size"]),
    ],
)
def test_types_are_followed_through_pointers(typed: str, words: str, rules: list[str]) -> None:
    kernel = planned_kernel(None, typed, None, None)
    (answer,) = check_lines(kernel, [Line("x", 1, f"p:x g {words}")])
    assert [finding.rule for finding in answer.findings] == rules


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("p:x g a=+9(node):u8", ["no-member"]),
        ("p:x g a=+0(+8(node)):s32 b=node->pair", []),
        ("p:x g a=+0(length):u64", ["no-pointer"]),
        ("r:x g a=+9($arg1):u8 b=+9(node):u8 c=+9($retval):u8 d=+9(%di):u8", ["no-member"] * 3),
    ],
)
def test_types_of_parameters_by_name_and_at_the_return(typed: str, line: str, rules: list[str]) -> None:
    """`check` uses the types of parameters that are given by name or as $argN, and the type of the return
    value.

    At the return, a register such as %di may have any value, and so it has no type.
    """
    (answer,) = check_lines(planned_kernel(None, typed, None, "linux-6.12"), [Line("x", 1, line)])
    assert [finding.rule for finding in answer.findings] == rules


@pytest.mark.parametrize(
    ("offset", "said"),
    [(16, "part.more"), (20, "part.last"), (18, ""), (24, ""), (12, "")],
)
def test_an_offset_beyond_a_structure_names_larger_ones_that_begin_with_it(
    typed: str, offset: int, said: str
) -> None:
    """If an offset is beyond a structure, the finding names members of larger structures that begin with this
    structure.

    struct part begins with struct pair, which has 16 bytes.
    """
    (answer,) = check_lines(
        planned_kernel(None, typed, None, None), [Line("x", 1, f"p:x f c=+{offset}($arg3):u32")]
    )
    (finding,) = answer.findings
    assert finding.rule == "no-member"
    assert ("part." in finding.message) is bool(said)
    assert said in finding.message


@pytest.mark.parametrize(
    ("line", "messages"),
    [
        ("f:x f a=$arg3 b=$arg4", ["$arg4 is no parameter: f has 3 parameters, so the value is undefined"]),
        ("f:x f%return a=$arg4", ["$arg4 is no parameter: f has 3 parameters, so the value is undefined"]),
        ("f:x * a=$arg4", []),
        ("f:x many a=$arg9", []),
        ("t:x event a=$arg1 b=$arg2", []),
        ("t:x event a=$arg3", ["$arg3 is no parameter: event has 2 parameters, so the value is undefined"]),
        ("t:x none a=$arg3", []),
        ("r:x f a=$arg4", ["$arg4 is no parameter: f has 3 parameters, so the value is undefined"]),
    ],
)
def test_parameters_that_a_function_does_not_have(typed: str, line: str, messages: list[str]) -> None:
    kernel = planned_kernel(None, typed, None, "linux-6.12")
    (answer,) = check_lines(kernel, [Line("x", 1, line)])
    assert not answer.is_error
    found = [finding for finding in answer.findings if finding.rule == "no-parameter"]
    assert [finding.message for finding in found] == messages
    assert [line[finding.column :] for finding in found] == [line.rsplit(maxsplit=1)[-1]] * len(found)


@pytest.mark.parametrize(
    ("argument", "rules"),
    [
        ("+0($arg1):u16", []),
        ("+0($arg1):u32", ["type-size"]),
        ("+2($arg1):u16", []),
        ("+4($arg1):x32", []),
        ("+20($arg1):x64", []),
    ],
)
def test_a_socket_address_has_the_members_of_its_family(typed: str, argument: str, rules: list[str]) -> None:
    """Only the family is known of the address to which a struct sockaddr pointer points."""
    (answer,) = check_lines(
        planned_kernel(None, typed, None, None), [Line("x", 1, f"p:x connect a={argument}")]
    )
    assert [finding.rule for finding in answer.findings] == rules


@pytest.mark.parametrize(("kind", "rules"), [("s32", []), ("u32", ["type-sign"]), ("s64", ["type-size"])])
def test_the_type_of_a_result(typed: str, kind: str, rules: list[str]) -> None:
    kernel = planned_kernel(None, typed, None, None)
    (answer,) = check_lines(kernel, [Line("x", 1, f"r:x f ret=$retval:{kind}")])
    assert [finding.rule for finding in answer.findings] == rules


def test_a_function_without_a_result(typed: str) -> None:
    for line, rules in (("r whole a=$retval", ["no-result"]), ("r f a=$retval:s32", []), ("r whole", [])):
        (answer,) = check_lines(planned_kernel(None, typed, None, None), [Line("x", 1, line)])
        assert [finding.rule for finding in answer.findings if finding.rule != "other-calls"] == rules
