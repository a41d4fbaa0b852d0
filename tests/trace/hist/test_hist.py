"""Histograms: keys, values, order, modifiers, and what their files show."""

from __future__ import annotations

import pytest

from tests.trace.events.kernel import Hit, errno_of
from tests.trace.trigger.control import TriggerKernel

_NAME = 0xFFFF888000001000


@pytest.fixture
def kernel() -> TriggerKernel:
    made = TriggerKernel()
    made.define(
        "p:a vfs_read n=%di:u32 s=%si:s16 big=%cx:u64 ip=%ip:symbol name=+0(%dx):string\n", "p:b vfs_write\n"
    )
    return made


def _hit(kernel: TriggerKernel, name: bytes = b"bash", comm: bytes = b"python3", **regs: int) -> None:
    hit = Hit(comm=comm, memory={_NAME: name + b"\0"})
    kernel.hit(hit, dx=_NAME, **regs)


def test_the_whole_file(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=n:vals=big")
    _hit(kernel, di=7, cx=100)
    _hit(kernel, di=7, cx=23)
    _hit(kernel, di=1)
    assert kernel.hist() == (
        "# event histogram\n"
        "#\n"
        "# trigger info: hist:keys=n:vals=hitcount,big:sort=hitcount:size=2048 [active]\n"
        "#\n"
        "\n"
        "{ n:          1 } hitcount:          1  big:          0\n"
        "{ n:          7 } hitcount:          2  big:        123\n"
        "\n"
        "Totals:\n    Hits: 3\n    Entries: 2\n    Dropped: 0\n"
    )
    assert kernel.enabled() == "0*"


def test_an_entry_that_no_page_takes_is_not_counted(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=n")
    _hit(kernel, name=b"x" * 4000)
    _hit(kernel, name=b"x" * 4090)
    assert "    Hits: 1\n" in kernel.hist()


def test_several_histograms_stand_below_each_other(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=n")
    kernel.write("hist:keys=s")
    assert kernel.hist().count("# event histogram\n") == 2
    assert "Dropped: 0\n\n\n# event" in kernel.hist()


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("n", "n:        300"),
        ("n.hex", "n: 12c"),
        ("s", "s: 18446744073709551614"),
        ("n.log2", "n: ~ 2^9 "),
        ("n.buckets=128", "n: ~ 256-383"),
        ("n.bucket=0x100", "n: ~ 256-511"),
        ("n.syscall", "n: unknown_syscall               [300]"),
        ("big.syscall", "big: sys_read                      [  0]"),
        ("common_pid.execname", "common_pid: python3         [        42]"),
        ("name", f"name: {'bash':<50}"),
        ("ip.sym", f"ip: [ffffffff8134cc51] {'vfs_read':<45}"),
        ("ip.sym-offset", f"ip: [ffffffff8134cc51] {'vfs_read+0x1/0x100':<55}"),
        ("n,s.hex", "n:        300, s: fffffffffffffffe"),
        ("common_cpu", "common_cpu:          0"),
        ("cpu", "cpu:          0"),
        ("n-s", "n-s:        302"),
        ("n+s*2", "n+s*2:        296"),
        ("n/7", "n/7:         43"),
        ("-(n)", "-(n): 18446744073709551316"),
        ("common_timestamp", "common_timestamp:    1234567"),
        ("common_timestamp.usecs", "common_timestamp:       1235"),
    ],
)
def test_keys(kernel: TriggerKernel, key: str, shown: str) -> None:
    kernel.control.time = 1234567
    kernel.write(f"hist:keys={key}")
    _hit(kernel, di=300, si=0xFFFE, ip=0xFFFFFFFF8134CC51)
    assert kernel.entries() == [f"{{ {shown} }} hitcount:          1"]


def test_stacktrace(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=stacktrace")
    _hit(kernel)
    assert (
        "{ stacktrace:\n         vfs_mkdir+0x1/0x140\n         vfs_read+0x10/0x100\n} hitcount:          1\n"
    ) in kernel.hist()


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("hitcount", [3, 1, 2]),
        ("hitcount.descending", [2, 1, 3]),
        ("n", [1, 2, 3]),
        ("n.descending", [3, 2, 1]),
        ("s,n.descending", [3, 1, 2]),
        ("big", [2, 1, 3]),
    ],
)
def test_order(kernel: TriggerKernel, sort: str, order: list[int]) -> None:
    kernel.write(f"hist:keys=n,s:vals=big:sort={sort}")
    for n, s, hits, big in ((1, 0xFFFF, 2, 4), (2, 0, 3, 1), (3, 0xFFFF, 1, 9)):
        for _ in range(hits):
            _hit(kernel, di=n, si=s, cx=big)
    assert [int(line.split()[2].rstrip(",")) for line in kernel.entries()] == order


def test_percent_graph_and_hex_values(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=n:vals=big.percent,s.graph:sort=n")
    _hit(kernel, di=1, cx=1, si=10)
    _hit(kernel, di=2, cx=2, si=5)
    assert kernel.entries() == [
        f"{{ n:          1 }} hitcount:          1  big (%):  33.33  s: {'#' * 20}",
        f"{{ n:          2 }} hitcount:          1  big (%):  66.66  s: {'#' * 10:<20}",
    ]
    kernel.write("hist:keys=n:vals=big.hex")
    _hit(kernel, di=1, cx=255)
    assert kernel.entries()[-1].endswith("  big:         ff")


def test_filter(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=n if n > 5")
    _hit(kernel, di=5)
    _hit(kernel, di=6)
    assert len(kernel.entries()) == 1
    assert kernel.show().endswith(":size=2048 if n > 5 [active]\n")


def test_a_full_map_drops(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=n:size=128")
    for n in range(130):
        _hit(kernel, di=n)
    assert "Hits: 128\n    Entries: 128\n    Dropped: 2\n" in kernel.hist()


def test_pause_continue_and_clear(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=n")
    _hit(kernel)
    kernel.write("hist:keys=n:pause")
    assert kernel.show().endswith("[paused]\n")
    _hit(kernel)
    kernel.write("hist:keys=n:cont")
    _hit(kernel)
    assert "Hits: 2" in kernel.hist()
    kernel.write("hist:keys=n:clear")
    assert "Hits: 0" in kernel.hist()
    assert kernel.show().endswith("[active]\n")


def test_enable_hist_and_disable_hist(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=n:pause")
    kernel.write("enable_hist:kprobes:a", "b")
    _hit(kernel)
    _hit(kernel)
    assert "Hits: 2" in kernel.hist()
    kernel.write("!enable_hist:kprobes:a", "b")
    kernel.write("disable_hist:kprobes:a", "b")
    _hit(kernel)
    assert kernel.show().endswith("[paused]\n")


def test_named_histograms_share_their_data(kernel: TriggerKernel) -> None:
    kernel.define("p:c vfs_write n=%di:u32 s=%si:s16\n")
    kernel.write("hist:name=foo:keys=n")
    kernel.write("hist:name=foo:keys=n", "c")
    assert kernel.show("c").startswith("hist:name=foo:keys=n:vals=hitcount")
    _hit(kernel, di=4)
    assert kernel.entries("a") == kernel.entries("c") == ["{ n:          4 } hitcount:          2"]
    assert errno_of(lambda: kernel.write("hist:name=foo:keys=s", "c")) == "EINVAL"
    assert "Named hist trigger doesn't match existing named trigger" in kernel.errors()
    kernel.write("!hist:name=foo:keys=n")
    assert kernel.show().startswith("# Available")
    _hit(kernel, di=4)
    assert kernel.entries("c") == ["{ n:          4 } hitcount:          3"]
    kernel.write("!hist:name=foo:keys=n", "c")
    assert not kernel.hists.owners


def test_removal(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=n:vals=big:sort=n.descending if n > 1")
    kernel.write("!hist:keys=n:vals=big:sort=n.descending")
    assert kernel.show() != "# Available"
    kernel.write("!hist:keys=n:vals=hitcount,big:sort=n.descending:size=2048 if n > 1")
    assert kernel.show().startswith("# Available")
    assert kernel.enabled() == "0"


def test_truncating_removes_all(kernel: TriggerKernel) -> None:
    kernel.write("hist:keys=n")
    kernel.write("hist:keys=s")
    kernel.write("stacktrace")
    kernel.triggers.truncate(kernel.event("a"))
    assert kernel.show() == "stacktrace:unlimited\n"


@pytest.mark.parametrize(
    ("written", "name", "message", "column"),
    [
        ("hist:keys=n:vals=-", "EINVAL", "", 0),
        ("hist:keys=n:sort=", "EINVAL", "Empty assignment", 12),
        ("hist:keys=n:sort=n,", "EINVAL", "Empty sort field", 12),
        ("hist:keys=n:sort=n,n,n", "EINVAL", "Too many sort fields (Max = 2)", 12),
        ("hist:keys=n:sort=big", "EINVAL", "Sort field must be a key or a val", 17),
        ("hist:keys=n:vals=n,s,big", "EINVAL", "", 0),
        ("hist:keys=n,s,big,n", "EINVAL", "", 0),
        ("hist:keys=n:vals=n.log2", "EINVAL", "Invalid field modifier", 17),
        ("hist:keys=n.percent", "EINVAL", "Invalid field modifier", 12),
        ("hist:keys=n:x=1+n/0", "EDOM", "Division by zero", 18),
        ("hist:keys=n:x=5a", "EINVAL", "Expecting numeric literal", 14),
        ("hist:keys=n:x=n+name", "EINVAL", "String type can not be an operand in expression", 16),
        ("hist:keys=n:x=n+n+n+n+n", "EINVAL", "Too many subexpressions (3 max)", 10),
        ("hist:keys=n:x=-(n)+1", "EINVAL", "Unary minus not supported in sub-expressions", 16),
        ("hist:keys=n:x=common_timestamp.usecs-common_timestamp", "EINVAL", "Timestamp units", 0),
        ("hist:keys=n:x=n,x=s", "EINVAL", "Variable already defined", 12),
        ("hist:keys=n:x=n,s", "EINVAL", "Malformed assignment", 2),
        ("hist:keys=n,s,big:cont", "ENOENT", "Can't clear or continue a nonexistent hist trigger", 0),
        ("hist:keys=n:onmax(n).save(big)", "EINVAL", "For onmax(x) or onchange(x), x must be a variable", 10),
        ("hist:keys=n:x=n:onmax($x).save(zz)", "EINVAL", "Couldn't create field variable", 31),
        ("hist:keys=n:x=n:onmax($x).save(s)", "EINVAL", "Invalid action param", 2),
        ("hist:keys=n:x=n:onmax($x).save(key.a.zz)", "EINVAL", "Couldn't create field variable", 5),
        ("hist:keys=n:vals=key.a.n.log2", "EINVAL", "Invalid field modifier", 5),
        ("hist:keys=n:onmatch(kprobes.b).save(big)", "EINVAL", "Handler doesn't support action", 31),
        ("hist:keys=n:onmatch(kprobes).trace(x)", "EINVAL", "Missing subsystem", 20),
        ("hist:keys=n:onmatch(kprobes.zz).trace(x)", "EINVAL", "Invalid subsystem or event name", 28),
        ("hist:keys=n:onmatch(kprobes.b", "EINVAL", "No closing paren found", 20),
        ("hist:keys=n:onmatch(kprobes.b).zz", "EINVAL", "No action found", 0),
        ("hist:keys=n:onmatch(kprobes.b).zz(big)", "EINVAL", "Couldn't find synthetic event", 31),
        ("hist:keys=n:clock=none:x=common_timestamp", "EINVAL", "Couldn't set trace_clock", 18),
    ],
)
def test_errors(kernel: TriggerKernel, written: str, name: str, message: str, column: int) -> None:
    assert errno_of(lambda: kernel.write(written)) == name
    if message:
        last = kernel.errors().rpartition("hist:kprobes:a: error: ")[2]
        assert last.startswith(message)
        assert last.splitlines()[2].index("^") - len("  Command: ") == column
    else:
        assert kernel.errors() == ""
    assert kernel.show().startswith("# Available")


def test_a_failing_event_loses_its_errno(kernel: TriggerKernel) -> None:
    backend = kernel.kernel.backend
    backend.refuse_enabling.add(backend.handles[0].address)
    assert errno_of(lambda: kernel.write("hist:keys=n:name=x")) == "EPERM"
    assert not kernel.hists.owners
