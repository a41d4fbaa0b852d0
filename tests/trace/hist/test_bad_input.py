"""Any text that is written to trigger, synthetic_events or dynamic_events takes effect, or fails with an
errno and changes nothing.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_kernel.util.errors import KernelError
from tests.sample import fewer
from tests.trace.events.kernel import Hit
from tests.trace.trigger.control import TriggerKernel

_WORDS = (
    *("hist", "keys", "vals", "sort", "size", "name", "clock", "pause", "cont", "clear", "if", "stacktrace"),
    *("n", "s", "name", "common_pid", "common_timestamp", "common_cpu", "cpu", "hitcount", "x", "$x", "$y"),
    *("onmatch", "onmax", "onchange", "save", "snapshot", "trace", "syn", "kprobes", "a", "b", "execname"),
    *("hex", "sym", "sym-offset", "log2", "buckets", "usecs", "percent", "graph", "descending", "syscall"),
    *("traceoff", "enable_event", "disable_hist", "u64", "char", "unsigned", "[]", "[16]", "e", "synthetic"),
    *(":", ":", ":", "=", "=", ",", ",", ".", ".", "(", ")", "+", "-", "*", "/", " ", "!", "0", "1", "128"),
    *("\t", ";", "$", "%", '"', "\0", "\xff", "s", "==", "&&"),
)
_TEXTS = st.lists(st.sampled_from(_WORDS), max_size=24).map("".join)
_HISTS = st.tuples(
    st.sampled_from(["keys=n", "keys=s,n", "keys=name", "keys=common_pid.execname", "keys=n+s"]),
    st.lists(
        st.sampled_from(
            [
                *(
                    "vals=s",
                    "vals=n.hex,s",
                    "sort=n",
                    "sort=hitcount.descending",
                    "size=128",
                    "name=q",
                    "pause",
                ),
                *("x=n", "y=$x", "x=name", "x=n/s", "t=common_timestamp.usecs", "z=common_timestamp-$t"),
                *(
                    "onmax($x).save(name)",
                    "onmax($x).snapshot()",
                    "onchange($x).trace(syn,$x)",
                    "clear",
                    "cont",
                ),
                *(
                    "onmatch(kprobes.b).syn(n)",
                    "onmatch(kprobes.b).trace(syn,$y)",
                    "onmatch(kprobes.a).syn(sx)",
                ),
            ]
        ),
        max_size=4,
    ),
    st.sampled_from(["", " if n > 1", " if name == 'x'"]),
).map(lambda parts: "hist:" + ":".join([parts[0], *parts[1]]) + parts[2])


def _kernel() -> TriggerKernel:
    kernel = TriggerKernel()
    kernel.define(
        "p:a vfs_read n=%di:u32 s=%si:s16 name=+0(%dx):string\n", "p:b vfs_write n=%di:u32 sx=%si:u32\n"
    )
    kernel.synthetic.write(b"syn u32 n\n")
    return kernel


def _state(kernel: TriggerKernel) -> tuple[object, ...]:
    """Return the state that a failed write must not change."""
    events = [kernel.event(name) for name in ("a", "b", "syn")]
    return (
        [[*kernel.triggers.records(event)] for event in events],
        [(event.references, event.is_enabled) for event in events],
        [*kernel.kernel.dynamic_events.records()],
        tuple(kernel.system.with_variables(kernel.kernel.recorder)),
        list(kernel.hists.owners),
        kernel.control.snapshot.condition,
        [each.hist_references for each in (kernel.synthetic.find("syn"),) if each],
    )


def _hit(kernel: TriggerKernel) -> None:
    for n in (0, 1, 7):
        kernel.hit(Hit(memory={0x1000: b"x\0"}), di=n, si=3, dx=0x1000)


@settings(max_examples=fewer(300, 6))
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "syn"]), st.booleans(), _HISTS), min_size=1, max_size=6))
def test_histograms(writes: list[tuple[str, bool, str]]) -> None:
    kernel = _kernel()
    for event, removes, text in writes:
        before = _state(kernel)
        try:
            kernel.triggers.execute(kernel.event(event), f"{'!' * removes}{text}")
        except KernelError:
            assert _state(kernel) == before
        _hit(kernel)
        kernel.hist(event)
    for event in ("a", "b", "syn") * 2:
        kernel.triggers.truncate(kernel.event(event))
    kernel.synthetic.clear()
    kernel.kernel.events.clear()
    assert not kernel.hists.owners


@settings(max_examples=fewer(500, 10))
@given(
    st.sampled_from(["trigger", "synthetic", "dynamic"]),
    st.one_of(_TEXTS, _TEXTS.map("hist:keys=n:".__add__)),
)
def test_any_text(file: str, text: str) -> None:
    kernel = _kernel()
    before = _state(kernel)
    data = text.encode("latin-1")
    try:
        if file == "trigger":
            kernel.triggers.write(kernel.event("a"), data)
        elif file == "synthetic":
            kernel.synthetic.write(data)
        else:
            kernel.kernel.dynamic_events.write(data)
    except KernelError:
        assert _state(kernel) == before or file != "trigger"
    _hit(kernel)
    kernel.hist()


@pytest.mark.parametrize("operator", "+-*/")
@pytest.mark.parametrize("head", ["hist:keys=n:x=", "hist:keys=n:vals=", "hist:keys="])
def test_thousands_of_operators(head: str, operator: str) -> None:
    """An expression with thousands of operators is refused and changes nothing. Linux allows at most three
    subexpressions.
    """
    kernel = _kernel()
    before = _state(kernel)
    for text in (operator.join("1" * 2000), "-(" * 1300 + "n" + ")" * 1300):
        with pytest.raises(KernelError):
            kernel.write(f"{head}{text}")
    assert _state(kernel) == before
