"""BTF is read as the C declarations say: offsets, bit fields and parameters. Damaged BTF raises a
KernelError.
"""

from __future__ import annotations

import struct
from errno import ENOENT, ENOEXEC

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_kernel.image.linux.btf import Btf, Kind
from emulated_kernel.util.errors import KernelError
from tests.image.linux import made
from tests.sample import fewer


def sample() -> made.Btf:
    btf = made.Btf()
    integer = btf.add(1, "int", 4, struct.pack("<I", 0x01000020))
    char = btf.add(1, "char", 1, struct.pack("<I", 8))
    const_char = btf.add(10, "", char)
    text = btf.add(2, "", const_char)
    array = btf.add(3, "", 0, struct.pack("<III", char, integer, 16))
    inner = btf.structure("", 8, ("low", integer, 0), ("high", integer, 4))
    either = btf.structure("", 8, ("whole", integer, 0), ("", inner, 0), union=True)
    task = btf.structure(
        "task_struct", 40, ("pid", integer, 0), ("comm", array, 4), ("", either, 24), ("next", text, 32)
    )
    pointer = btf.add(2, "", task)
    typedef = btf.add(8, "task_t", task)
    btf.structure("holder", 48, ("task", typedef, 8))
    bits = struct.pack("<III", btf.text("flag"), integer, 1 << 24 | 3)
    btf.add(4, "bits", 4, bits, 1, flag=True)
    handler = btf.prototype(0, ("", pointer), ("", integer))
    handler_pointer = btf.add(2, "", handler)
    const_pointer = btf.add(10, "", pointer)
    read = btf.prototype(integer, ("task", const_pointer), ("name", text), ("run", handler_pointer))
    btf.add(12, "read_task", read, count=1)
    printk = btf.prototype(integer, ("fmt", text), ("", 0))
    btf.add(12, "printk", printk)
    btf.enum("colours", RED=1, BLUE=0xFFFFFFFF)
    big = struct.pack("<III", btf.text("HUGE"), 1, 2)
    btf.add(19, "wide", 8, big, 1)
    return btf


BTF = sample().data()


def test_a_kept_index_finds_a_name_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    types = made.Btf()
    for number in range(1000):
        types.structure(f"s{number}", 8 * number)
    btf = Btf(types.data())
    kept = Btf(types.data(), {name: memoryview(part) for name, part in btf.parts().items()})
    read = list[int]()
    name = Btf._name
    monkeypatch.setattr(Btf, "_name", lambda self, offset: [read.append(offset), name(self, offset)][1])
    assert kept.size("s321") == 8 * 321
    assert len(read) <= 15
    assert kept.size("s321") == 8 * 321
    assert len(read) <= 15
    assert [kept.size(f"s{number}") for number in range(1000)] == [8 * number for number in range(1000)]


def test_a_type_is_found_beside_an_enumerator_of_its_name() -> None:
    types = made.Btf()
    types.enum("kinds", both=7)
    types.structure("both", 24)
    types.enum("both", other=1)
    types.structure("both", 32)
    btf = Btf(types.data())
    assert [btf.find(kind, "both") for kind in (Kind.STRUCT, Kind.ENUM)] == [2, 3]
    assert btf.size("both") == 24
    assert btf.constant("both") == 7


def test_offsets_through_anonymous_members_typedefs_and_arrays() -> None:
    btf = Btf(BTF)
    assert btf.size("task_struct") == 40
    paths = {"task_struct.pid": 0, "task_struct.comm": 4, "task_struct.high": 28, "holder.task.low": 32}
    assert {path: btf.offset(path) for path in paths} == paths
    assert btf.has("holder.task")
    assert not btf.has("holder.tusk")
    assert not btf.has("nothing")


def test_a_second_question_has_the_answer_of_the_first() -> None:
    btf = Btf(BTF)
    assert btf.locate("bits.flag") == btf.locate("bits.flag")
    messages = []
    for path in ("bits.absent", "bits.absent", "absent.flag", "absent.flag"):
        with pytest.raises(KernelError) as failure:
            btf.locate(path)
        assert failure.value.errno == ENOENT
        messages.append(failure.value.strerror)
    assert messages[0] == messages[1] != messages[2] == messages[3]


def test_bit_fields_have_their_place_and_width() -> None:
    offset, member = Btf(BTF).locate("bits.flag")
    assert (offset, member.width) == (3, 1)


def test_functions_have_their_parameters() -> None:
    assert [Btf(BTF).parameters(name) for name in ("read_task", "printk")] == [3, 1]


def test_enumerators_of_both_sizes() -> None:
    btf, values = Btf(BTF), {"RED": 1, "BLUE": 0xFFFFFFFF, "HUGE": 2 << 32 | 1}
    assert btf.constants == values
    assert {name: btf.constant(name) for name in values} == values


@pytest.mark.parametrize(
    "ask",
    [
        lambda btf: btf.find(Kind.STRUCT, "nothing"),
        lambda btf: btf.offset("task_struct.nothing"),
        lambda btf: btf.offset("task_struct"),
        lambda btf: btf.parameters("nothing"),
        lambda btf: btf.constant("nothing"),
        lambda btf: btf.constant("colours"),
    ],
)
def test_what_it_does_not_have(ask: object) -> None:
    with pytest.raises(KernelError) as caught:
        ask(Btf(BTF))  # type: ignore[operator]
    assert caught.value.errno == ENOENT


def circle() -> bytes:
    btf = made.Btf()
    btf.add(10, "", 2)
    btf.add(10, "", 1)
    btf.structure("self", 8, ("", 3, 0))
    return btf.data()


@pytest.mark.parametrize("ask", [lambda btf: btf.resolve(1), lambda btf: btf.offset("self.x")])
def test_types_in_a_circle_end(ask: object) -> None:
    with pytest.raises(KernelError, match=r"circle|each other") as caught:
        ask(Btf(circle()))  # type: ignore[operator]
    assert caught.value.errno == ENOEXEC


def doubled() -> bytes:
    """Return BTF in which each type contains the next type twice, so that 2 ** 60 paths lead to the last of
    60 types.
    """
    btf = made.Btf()
    last = btf.add(1, "int", 4, struct.pack("<I", 32))
    for _ in range(60):
        last = btf.structure("", 8, ("", last, 0), ("", last, 4))
    btf.structure("wide", 8, ("", last, 0), ("x", last, 0))
    return btf.data()


def test_types_that_are_too_many_to_look_through() -> None:
    btf = Btf(doubled())
    assert btf.has("wide.x")
    assert not btf.has("wide.y")


@settings(max_examples=fewer(200, 4))
@given(st.data())
def test_damaged(data: st.DataObject) -> None:
    raw = bytearray(BTF)
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    for whole in (bytes(raw), cut):
        try:
            btf = Btf(whole)
            for name in ("read_task", "printk"):
                btf.parameters(name)
            btf.offset("holder.task.high")
            assert btf.constants is not None
        except KernelError as error:
            if error.errno not in (ENOENT, ENOEXEC):
                raise
