"""Histograms of later kernels: `nohitcount`, the keys `common_stacktrace` and `common_comm`, and errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.util.errors import KernelError

EVENT = "tracing/events/kprobes/calls"
DEFINITION = "p:calls gcd a=%di:u64 b=%si:u64"


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with Kernel(profile=profile_named("linux-6.12")) as kernel:
        kernel.write_file("tracing/kprobe_events", DEFINITION)
        yield kernel


@pytest.mark.parametrize("word", ["nohitcount", "NOHC"])
def test_the_number_of_hits_is_not_shown(kernel: Kernel, word: str) -> None:
    kernel.write_file(f"{EVENT}/trigger", f"hist:keys=a:vals=b:{word}")
    assert kernel.read_file(f"{EVENT}/trigger") == (
        "hist:keys=a:vals=b:sort=hitcount:size=2048:nohitcount [active]\n"
    )
    kernel.call("gcd", 12, 18)
    kernel.call("gcd", 12, 18)
    (line,) = [line for line in kernel.read_file(f"{EVENT}/hist").splitlines() if line.startswith("{")]
    assert line.split() == ["{", "a:", "12", "}", "b:", "36"]


@pytest.mark.parametrize("modifier", [".log2", ".buckets=5", ".hex"])
def test_a_call_chain_ignores_modifiers(kernel: Kernel, modifier: str) -> None:
    """Modifiers of the key common_stacktrace are ignored, as in Debian's 6.12.117. With .log2 or .buckets,
    the call chain cannot be a sort key.
    """
    kernel.write_file(f"{EVENT}/trigger", f"hist:keys=common_stacktrace{modifier}")
    assert kernel.read_file(f"{EVENT}/trigger") == (
        "hist:keys=common_stacktrace:vals=hitcount:sort=hitcount:size=2048 [active]\n"
    )
    kernel.call("gcd", 12, 18)
    assert "Hits: 1\n" in kernel.read_file(f"{EVENT}/hist")
    kernel.write_file(f"{EVENT}/trigger", f"!hist:keys=common_stacktrace{modifier}")
    if modifier != ".hex":
        with pytest.raises(KernelError) as refused:
            kernel.write_file(
                f"{EVENT}/trigger", f"hist:keys=common_stacktrace{modifier}:sort=common_stacktrace"
            )
        assert refused.value.name == "EINVAL"


def test_another_value_is_needed(kernel: Kernel) -> None:
    with pytest.raises(KernelError) as refused:
        kernel.write_file(f"{EVENT}/trigger", "hist:keys=a:nohitcount")
    assert refused.value.name == "ENOENT"
    assert "Non-hitcount value is required for 'nohitcount'\n" in kernel.read_file("tracing/error_log")


@pytest.mark.parametrize("key", ["stacktrace", "common_stacktrace"])
def test_a_call_chain_has_its_common_name(kernel: Kernel, key: str) -> None:
    kernel.write_file(f"{EVENT}/trigger", f"hist:keys={key}:sort=common_stacktrace")
    assert kernel.read_file(f"{EVENT}/trigger") == (
        "hist:keys=common_stacktrace:vals=hitcount:sort=common_stacktrace:size=2048 [active]\n"
    )
    kernel.call("gcd", 12, 18)
    assert "{ common_stacktrace:\n" in kernel.read_file(f"{EVENT}/hist")


@pytest.mark.parametrize(("key", "shown"), [("common_comm", "common_comm"), ("comm", "comm")])
def test_the_name_of_the_task_is_a_key(key: str, shown: str) -> None:
    """The task's name is a key under the name common_comm or comm. The file hist shows the written name, but
    trigger shows common_comm.
    """
    with Kernel(profile=profile_named("linux-7.2")) as later:
        later.write_file("tracing/kprobe_events", DEFINITION)
        later.write_file(f"{EVENT}/trigger", f"hist:keys={key},a:vals=b:sort={key}")
        assert later.read_file(f"{EVENT}/trigger") == (
            "hist:keys=common_comm,a:vals=hitcount,b:sort=common_comm:size=2048 [active]\n"
        )
        later.call("gcd", 12, 18)
        later.call("gcd", 12, 18)
        (line,) = [line for line in later.read_file(f"{EVENT}/hist").splitlines() if line.startswith("{")]
    assert line.split() == ["{", f"{shown}:", "kprobefs", ",", "a:", "12", "}", "hitcount:", "2", "b:", "36"]


@pytest.mark.parametrize("key", ["common_comm", "comm"])
def test_6_12_has_no_key_for_the_name_of_the_task(kernel: Kernel, key: str) -> None:
    with pytest.raises(KernelError) as refused:
        kernel.write_file(f"{EVENT}/trigger", f"hist:keys={key}")
    assert refused.value.name == "EINVAL"
    assert "Couldn't find field\n" in kernel.read_file("tracing/error_log")


@pytest.mark.parametrize("trigger", ["hist:keys=a", "traceoff"])
def test_a_wrong_filter_of_a_trigger_is_in_error_log(kernel: Kernel, trigger: str) -> None:
    with pytest.raises(KernelError):
        kernel.write_file(f"{EVENT}/trigger", f"{trigger} if nothing == 1")
    log = kernel.read_file("tracing/error_log")
    assert "event filter parse error: error: Field not found\n  Command: nothing == 1\n" in log


def test_6_1_has_none_of_these() -> None:
    with Kernel() as kernel:
        kernel.write_file("tracing/kprobe_events", DEFINITION)
        for trigger in ("hist:keys=a:vals=b:nohitcount", "hist:keys=common_stacktrace"):
            with pytest.raises(KernelError) as refused:
                kernel.write_file(f"{EVENT}/trigger", trigger)
            assert refused.value.name == "EINVAL"
        with pytest.raises(KernelError):
            kernel.write_file(f"{EVENT}/trigger", "traceoff if nothing == 1")
        assert "event filter parse error" not in kernel.read_file("tracing/error_log")
        kernel.write_file(f"{EVENT}/trigger", "hist:keys=stacktrace")
        assert "hist:keys=stacktrace:" in kernel.read_file(f"{EVENT}/trigger")


CHAIN = "tracing/events/synthetic/lat"


@pytest.fixture
def chain(kernel: Kernel) -> Kernel:
    """Return a kernel with a synthetic event that has a call chain between two numbers. A histogram fires
    this event.
    """
    kernel.write_file("tracing/dynamic_events", "s:lat u64 n; unsigned long[] stack; u64 m")
    kernel.write_file(f"{CHAIN}/enable", "1")
    kernel.write_file(
        f"{EVENT}/trigger",
        "hist:keys=a:s=common_stacktrace,n=a:onmatch(kprobes.calls).trace(lat,$n,$s,$n)",
    )
    return kernel


def test_a_call_chain_is_a_variable_and_a_field_of_a_synthetic_event(chain: Kernel) -> None:
    chain.write_file(f"{EVENT}/trigger", "hist:keys=common_stacktrace")
    chain.write_file(f"{CHAIN}/trigger", "hist:keys=stack.stacktrace,n")
    chain.call("gcd", 12, 18)
    counted = chain.read_file(f"{EVENT}/hist").partition("{ common_stacktrace:")[2].partition("}")[0]
    callers = counted.split()
    assert callers[0].startswith("gcd+")
    assert len(callers) > 1
    text = chain.read_file("tracing/trace").partition(": lat: ")[2]
    lines = "".join(f"=> {each}\n" for each in callers)
    assert text == f"n=12 stack=STACK:\n{lines}m=12\n"
    key = chain.read_file(f"{CHAIN}/hist").partition("{ stack.stacktrace")[2].partition("}")[0]
    assert key.replace(",", "").split() == [*callers, "n:", "12"]


def test_only_a_call_chain_is_the_value_of_a_call_chain(chain: Kernel) -> None:
    for arguments in ("$t,$t,$m", "$m,$m,$m", "$m,a,$m"):
        command = f"hist:keys=b:t=common_stacktrace,m=b:onchange($m).trace(lat,{arguments})"
        with pytest.raises(KernelError) as refused:
            chain.write_file(f"{EVENT}/trigger", command)
        assert refused.value.name == "EINVAL"
        assert "Param type doesn't match synthetic event field type" in chain.read_file("tracing/error_log")


@pytest.mark.parametrize(
    "trigger", ["keys=n.stacktrace", "keys=n:vals=stack", "keys=n:vals=common_stacktrace"]
)
def test_call_chains_are_no_values_and_numbers_no_call_chains(chain: Kernel, trigger: str) -> None:
    with pytest.raises(KernelError) as refused:
        chain.write_file(f"{CHAIN}/trigger", f"hist:{trigger}")
    assert refused.value.name == "EINVAL"
    assert "Invalid field modifier" in chain.read_file("tracing/error_log")


def test_6_1_has_no_variables_that_are_call_chains() -> None:
    with Kernel() as kernel:
        kernel.write_file("tracing/kprobe_events", DEFINITION)
        for trigger in ("keys=a:s=common_stacktrace", "keys=a:s=stacktrace", "keys=a.stacktrace"):
            with pytest.raises(KernelError) as refused:
                kernel.write_file(f"{EVENT}/trigger", f"hist:{trigger}")
            assert refused.value.name == "EINVAL"
