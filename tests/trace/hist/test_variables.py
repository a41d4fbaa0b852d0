"""Histogram variables, actions such as onmatch and onmax, and the synthetic events that actions fire."""

from __future__ import annotations

import re

import pytest

from tests.trace.events.kernel import Hit, errno_of
from tests.trace.trigger.control import TriggerKernel

_NAME = 0xFFFF888000001000


@pytest.fixture
def kernel() -> TriggerKernel:
    """Return a kernel with the events `begin` and `end`, and a synthetic event `delay`."""
    made = TriggerKernel()
    made.define(
        "p:begin vfs_read id=%di:u32 prio=%si:s32 file=+0(%dx):string\n",
        "p:end vfs_write id=%di:u32 result=%si:s64 left=%cx:u32 name=$comm\n",
    )
    made.synthetic.write(b"delay u64 usecs; u32 id; s32 prio\n")
    return made


def _begin(kernel: TriggerKernel, time: int, **regs: int) -> None:
    _hit(kernel, 0, time, regs)


def _end(kernel: TriggerKernel, time: int, **regs: int) -> None:
    _hit(kernel, 1, time, regs)


def _hit(kernel: TriggerKernel, number: int, time: int, regs: dict[str, int]) -> None:
    kernel.control.time = time
    hit = Hit(memory={_NAME: b"/etc/passwd\0"})
    for name, value in {"dx": _NAME, **regs}.items():
        setattr(hit.regs, name, value)
    handle = kernel.kernel.backend.handles[number]
    if handle.enabled:
        handle.user.hit(hit)


def _enable(kernel: TriggerKernel, name: str) -> None:
    kernel.event(name).file(kernel.kernel.recorder).enable()


def _printed(kernel: TriggerKernel) -> list[str]:
    return [event.print_record(data, kernel.kernel.symbols) for event, data in kernel.kernel.recorder.entries]


def test_a_delay_between_two_events(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=id:t0=common_timestamp.usecs,p=prio", "begin")
    kernel.write(
        "hist:keys=id:d=common_timestamp.usecs-$t0:onmatch(kprobes.begin).delay($d,id,kprobes.begin.$p)",
        "end",
    )
    assert kernel.show("end") == (
        "hist:keys=id:vals=hitcount:d=common_timestamp.usecs-$t0:sort=hitcount:size=2048:clock=global"
        ":onmatch(kprobes.begin).delay($d,id,kprobes.begin.$p) [active]\n"
    )
    assert kernel.control.clock_name == "global"
    _enable(kernel, "delay")
    _begin(kernel, 5000, di=7, si=3)
    _end(kernel, 9000, di=8)
    _end(kernel, 12000, di=7)
    assert _printed(kernel) == ["usecs=7 id=7 prio=3"]
    _end(kernel, 15000, di=7)
    assert len(_printed(kernel)) == 1, "the reference in an expression takes the variable"


def test_a_variable_of_the_same_command_stands_for_its_first_operand(kernel: TriggerKernel) -> None:
    """As in Linux, a reference to a variable of the same command means the first operand of the variable's
    expression. Other uses are refused.
    """
    kernel.write("hist:keys=id:a=prio*2-id,b=$a", "begin")
    assert ":a=prio*2-id,b=prio:" in kernel.show("begin")
    for command in ("d=$c,c=prio-id", "c=-(prio),d=$c", "c=prio-id:vals=$c", "c=prio-id,d=$c,e=$d"):
        line = f"hist:keys=prio:{command}"
        assert errno_of(lambda line=line: kernel.write(line, "begin")) == "EINVAL"


def test_fields_of_the_matching_event(kernel: TriggerKernel) -> None:
    """If an argument of an action is a field of the matching event, a histogram with this field is added to
    the matching event.

    The removal of the command removes this histogram.
    """
    kernel.write("hist:keys=id:t0=common_timestamp.usecs", "begin")
    command = "hist:keys=id:d=common_timestamp.usecs-$t0:onmatch(kprobes.begin).trace(delay,$d,id,prio)"
    kernel.write(command, "end")
    assert "synthetic_prio=prio" in kernel.show("begin")
    _enable(kernel, "delay")
    _begin(kernel, 5000, di=7, si=0xFFFFFFFF)
    _end(kernel, 6000, di=7)
    assert _printed(kernel) == ["usecs=1 id=7 prio=-1"]
    kernel.write(f"!{command}", "end")
    assert "synthetic_prio" not in kernel.show("begin")
    assert kernel.system.with_variables(kernel.kernel.recorder) != []


def test_strings_and_names_travel(kernel: TriggerKernel) -> None:
    kernel.synthetic.write(b"opened char file[]; char comm[16]; char task[]\n")
    kernel.write("hist:keys=common_pid:f=file,c=common_pid.execname", "begin")
    assert errno_of(
        lambda: kernel.write("hist:keys=common_pid:onmatch(kprobes.begin).opened($f,$c,$c)", "end")
    ) == ("EINVAL")
    assert "Param type doesn't match synthetic event field type" in kernel.errors()
    kernel.synthetic.write(b"renamed char file[]; char task[]\n")
    kernel.write("hist:keys=common_pid:onmatch(kprobes.begin).renamed($f,$c)", "end")
    kernel.write("hist:keys=file", "renamed")
    _enable(kernel, "renamed")
    _begin(kernel, 1)
    _end(kernel, 2)
    assert _printed(kernel) == ["file=/etc/passwd task=python3"]
    assert kernel.entries("renamed") == [f"{{ file: {'/etc/passwd':<50} }} hitcount:          1"]


def test_references_keep_histograms_alive(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=id:t0=common_timestamp", "begin")
    kernel.write("hist:keys=id:d=common_timestamp-$t0", "end")
    assert errno_of(lambda: kernel.write("!hist:keys=id:t0=common_timestamp", "begin")) == "EBUSY"
    kernel.triggers.truncate(kernel.event("begin"))
    assert "t0" in kernel.show("begin")
    kernel.write("!hist:keys=id:d=common_timestamp-$t0", "end")
    kernel.write("!hist:keys=id:t0=common_timestamp", "begin")
    assert kernel.system.with_variables(kernel.kernel.recorder) == []


def test_a_synthetic_event_in_use_stays(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=id", "delay")
    assert errno_of(lambda: kernel.synthetic.write(b"!delay\n")) == "EBUSY"
    assert errno_of(kernel.synthetic.clear) == "EBUSY"
    kernel.write("!hist:keys=id", "delay")
    kernel.write("hist:keys=id:t0=common_timestamp.usecs", "begin")
    command = "hist:keys=id:x=id:onmatch(kprobes.begin).delay(begin,$x,prio)"
    assert errno_of(lambda: kernel.write(command, "end")) == "EINVAL"
    assert kernel.synthetic.find("delay") is not None
    kernel.synthetic.clear()
    assert list(kernel.synthetic.records()) == []


def test_onmax_saves_fields(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=id:r=result:onmax($r).save(left,common_pid)", "end")
    assert kernel.show("end").endswith(":size=2048:onmax($r).save(left,common_pid) [active]\n")
    for result, left in ((5, 1), (9, 2), (7, 3)):
        _end(kernel, 0, si=result, cx=left)
    assert (
        "{ id:          0 } hitcount:          3\n"
        "\tmax:          9  left:          2  common_pid:         42\n"
    ) in kernel.hist("end")


def test_what_is_saved_has_what_is_left_of_its_name(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=id:r=result:onmax($r).save(kprobes.end.left)", "end")
    assert kernel.show("end").endswith(":onmax($r).save(kprobes) [active]\n")
    _end(kernel, 0, si=5, cx=1)
    assert "\tmax:          5  kprobes:          1\n" in kernel.hist("end")


def test_a_string_that_was_never_saved(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=id:r=result:onmax($r).save(name)", "end")
    _end(kernel, 0, si=0)
    assert f"\tmax:          0  name: {'(null)':32}\n" in kernel.hist("end")


def test_onchange_fires_a_synthetic_event(kernel: TriggerKernel) -> None:
    kernel.synthetic.write(b"changed s64 result\n")
    kernel.write("hist:keys=id:r=result:onchange($r).trace(changed,$r)", "end")
    _enable(kernel, "changed")
    for result in (1, 1, 2, 1):
        _end(kernel, 0, si=result)
    assert _printed(kernel) == ["result=1", "result=2", "result=1"]
    assert "\tchanged:          1\n" in kernel.hist("end")


@pytest.mark.parametrize("handler", ["onmax", "onchange"])
def test_a_string_counts_once_for_each_entry(kernel: TriggerKernel, handler: str) -> None:
    """With onmax or onchange on a string, only the first hit of a histogram entry counts, as in Linux.

    Linux compares the address of the entry's copy of the string, which does not change.
    """
    kernel.write(f"hist:keys=id:n=name:{handler}($n).save(left):{handler}($n).snapshot()", "end")
    for number, left in ((0, 1), (0, 2), (7, 3), (7, 4)):
        _end(kernel, 0, di=number, cx=left)
    found = re.findall(r"id: +(\d).*\n.* left: +(\d)", kernel.hist("end"))
    assert sorted(found) == [("0", "1"), ("7", "3")]
    assert kernel.control.actions.count("snapshot") == 2


def test_snapshots_of_the_greatest(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=id:r=result:onmax($r).save(left):onmax($r).snapshot()", "end")
    assert errno_of(lambda: kernel.write("hist:keys=result:l=left:onmax($l).snapshot()", "end")) == "EBUSY"
    for result in (3, 2, 8):
        _end(kernel, 0, di=result, si=result)
    assert kernel.control.actions.count("snapshot") == 2
    assert (
        "\nSnapshot taken (see tracing/snapshot).  Details:\n"
        "\ttriggering value { onmax($r) }:          8"
        "\ttriggered by event with key: { id:          8 }\n"
    ) in kernel.hist("end")
    kernel.triggers.truncate(kernel.event("end"))
    assert kernel.control.snapshot.condition is None


def test_variables_of_one_name_need_the_event(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=id:x=prio", "begin")
    kernel.write("hist:keys=id:x=left", "end")
    kernel.define("p:third vfs_mkdir id=%di:u32\n")
    assert errno_of(lambda: kernel.write("hist:keys=id:y=$x", "third")) == "EINVAL"
    assert "Variable name not unique" in kernel.errors()
    kernel.write("hist:keys=id:vals=kprobes.end.$x:y=kprobes.begin.$x", "third")
    assert kernel.show("third").startswith(
        "hist:keys=id:vals=hitcount,$kprobes.end.x:y=$kprobes.begin.x:sort=hitcount"
    )


def test_constants_fold(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=id:k=10*6-4,half=result/2,third=result/3", "end")
    assert ":k=56,half=result/2,third=result/3:" in kernel.show("end")


@pytest.mark.parametrize(
    ("command", "told", "column"),
    [
        ("hist:keys=id:a=result-1:b=$a", None, 0),
        ("hist:keys=id:a=5/$a", "Couldn't find field", 15),
        ("hist:keys=id:a=5+2:b=result-$a", "Couldn't find field", 15),
        ("hist:keys=id:a=result-1:b=$a-1:c=$b-1", "Couldn't find field", 33),
        ("hist:keys=id:a=kprobes.begin.$p:b=$a", "Couldn't find field", 15),
    ],
)
def test_what_parsing_leaves_of_a_variable(
    command: str, told: str | None, column: int, kernel: TriggerKernel
) -> None:
    """As in Linux, only the first operand of a variable's expression remains, and a reference to the variable
    means this operand.
    """
    kernel.write("hist:keys=id:p=prio", "begin")
    if told is None:
        kernel.write(command, "end")
        assert ":a=result-1,b=result:" in kernel.show("end")
        return
    assert errno_of(lambda: kernel.write(command, "end")) == "EINVAL"
    lines = "".join(kernel.kernel.events.error_log.records()).splitlines()
    assert told in lines[-3]
    assert lines[-1].index("^") == len("  Command: ") + column


def test_a_folded_constant_is_removed_as_it_is_shown(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=id:five=10/2", "begin")
    shown = kernel.show("begin").partition(" [")[0]
    assert ":five=5:" in shown
    kernel.write(f"!{shown}", "begin")
    assert shown not in kernel.show("begin")


@pytest.mark.parametrize("modifier", ["buckets=3", "log2"])
def test_a_negated_bucket_has_no_name(modifier: str, kernel: TriggerKernel) -> None:
    kernel.write(f"hist:keys=id:z=-(prio.{modifier})", "begin")
    assert ":z=:" in kernel.show("begin")
