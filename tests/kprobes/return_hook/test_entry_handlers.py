"""Entry handlers in C that call a hooked function before the call of their own kretprobe is hooked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.fprobe import Fprobe
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.return_hook.ret_stack import SHADOW_STACK_SIZE, TRAILER
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.config import MachineConfig
from tests.kprobes.return_hook.test_kretprobe import PER_TASK
from tests.kprobes.test_assembly import settle
from tests.ledger import ledger_mismatches

ARCHES = ("x86_64", "i386", "riscv64")
INNER = "int_sqrt"
ACCEPTS = "call"
"""Function of the module `probing` that calls INNER once and returns 0, so that the call is hooked."""
REFUSES = INNER
"""As an entry handler, INNER returns the square root of an address: not 0, so that the call is not hooked."""
CHAIN = ("bsearch", "lcm", "gcd")
"""Functions of which each calls the next one once, if lcm is the comparison function of bsearch."""
ROUNDS = 5


@pytest.fixture(scope="module", params=SHADOW_STACKS)
def stack(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=ARCHES)
def booted(request: pytest.FixtureRequest, stack: str) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=request.param, return_hook=stack)) as kernel:
        kernel.load_module("probing")
        yield kernel


@pytest.fixture
def kernel(booted: Kernel) -> Iterator[Kernel]:
    yield booted
    settle(booted)
    assert [*booted.kprobes] == []
    assert not booted.kretprobes.hooks.is_used, "no call is pending any more"
    assert ledger_mismatches(booted.machine.text) == []


@pytest.fixture(params=["compiled", "in Python"])
def make_fprobe(kernel: Kernel, request: pytest.FixtureRequest) -> Iterator[Callable[..., Fprobe[Any]]]:
    """Yield a function that registers an fprobe; unregister the fprobes at the end."""
    made: list[Fprobe[Any]] = []

    def register(filter_: str = INNER, **options: Any) -> Fprobe[Any]:
        if request.param == "compiled":
            fprobe = kernel.hit_ring().fprobe(filter_, **options)
        else:
            fprobe = Fprobe(filter_, exit_handler=lambda *_: None, **options)
        kernel.register_fprobe(fprobe)
        made.append(fprobe)
        return fprobe

    yield register
    for fprobe in made:
        kernel.unregister_fprobe(fprobe)


@pytest.fixture
def make_kretprobe(kernel: Kernel) -> Iterator[Callable[..., Kretprobe[Any]]]:
    """Yield a function that registers a kretprobe with handlers in C; unregister the kretprobes at the end.

    Its arguments: the function to probe, the name of the entry handler, and words of the struct kretprobe.
    """
    abi = kernel.image.abi
    memory = kernel.machine.memory
    made: list[int] = []

    def register(function: str, entry_handler: str, **fields: int) -> Kretprobe[Any]:
        at = kernel.machine.records.alloc_pages(PAGE_SIZE)
        memory.write(at, bytes(PAGE_SIZE))
        symbols = kernel.kprobes.symbols
        start, handler, leave = (symbols.lookup_name(name) for name in (function, entry_handler, "call"))
        assert start is not None
        assert handler is not None
        assert leave is not None
        memory.write_word(at + abi["kprobe.addr"], start)
        memory.write_word(at + abi["kretprobe.entry_handler"], handler)
        memory.write_word(at + abi["kretprobe.handler"], leave)
        for name, value in fields.items():
            memory.write_u32(at + abi[f"kretprobe.{name}"], value)
        assert kernel.call("register_kretprobe", at) == 0
        made.append(at)
        return next(
            probe for probe in kernel.kprobes if isinstance(probe, Kretprobe) and probe.address == start
        )

    yield register
    for at in made:
        kernel.call("unregister_kretprobe", at)
        kernel.machine.records.free_pages(at)


def settled(kernel: Kernel) -> None:
    """Call INNER, so that its handlers are compiled."""
    for number in range(4):
        settle(kernel)
        assert kernel.call(INNER, number * number) == number


def returns(probe: Kretprobe[Any] | Fprobe[Any]) -> int:
    """Return the number of handled returns, after a check that no call is pending."""
    assert probe.hook is not None
    assert probe.hook.active == 0
    return probe.hook.returned


def test_accepted(
    kernel: Kernel, make_fprobe: Callable[..., Fprobe[Any]], make_kretprobe: Callable[..., Kretprobe[Any]]
) -> None:
    """Each call of gcd makes two hooked calls of INNER: one at its entry and one at its return."""
    fprobe = make_fprobe()
    settled(kernel)
    rp = make_kretprobe("gcd", ACCEPTS)
    settled(kernel)
    inner = returns(fprobe)
    for _ in range(ROUNDS):
        assert kernel.call("gcd", 12, 18) == 6
    assert returns(fprobe) - inner == 2 * ROUNDS
    assert returns(rp) == ROUNDS
    assert (rp.nmissed, fprobe.nmissed) == (0, 0)


def test_refused(
    kernel: Kernel, make_fprobe: Callable[..., Fprobe[Any]], make_kretprobe: Callable[..., Kretprobe[Any]]
) -> None:
    """The handler is a hooked function itself. One instance is enough, because each refusal gives it back."""
    fprobe = make_fprobe()
    settled(kernel)
    rp = make_kretprobe("gcd", REFUSES, maxactive=1)
    settled(kernel)
    inner = returns(fprobe)
    for _ in range(ROUNDS):
        assert kernel.call("gcd", 12, 18) == 6
    assert returns(fprobe) - inner == ROUNDS
    assert returns(rp) == 0
    assert (rp.nmissed, fprobe.nmissed) == (0, 0)


@pytest.mark.parametrize(
    "handlers",
    [
        (ACCEPTS, ACCEPTS, ACCEPTS),
        (ACCEPTS, REFUSES, ACCEPTS),
        (REFUSES, ACCEPTS, REFUSES),
        (REFUSES, REFUSES, ACCEPTS),
    ],
    ids="-".join,
)
def test_at_each_depth(
    kernel: Kernel,
    make_fprobe: Callable[..., Fprobe[Any]],
    make_kretprobe: Callable[..., Kretprobe[Any]],
    handlers: tuple[str, ...],
) -> None:
    """The calls of a chain of functions are hooked or refused, with data of different sizes."""
    fprobe = make_fprobe()
    settled(kernel)
    probes = [
        make_kretprobe(function, handler, data_size=24 * depth)
        for depth, (function, handler) in enumerate(zip(CHAIN, handlers, strict=True))
    ]
    settled(kernel)
    inner = returns(fprobe)
    compare = kernel.kprobes.symbols.lookup_name("lcm")
    assert compare is not None
    for _ in range(ROUNDS):
        assert kernel.call("bsearch", 4, 6, 1, 1, compare) == 0
    hooked = [handler == ACCEPTS for handler in handlers]
    assert [returns(rp) for rp in probes] == [ROUNDS * accepted for accepted in hooked]
    assert returns(fprobe) - inner == ROUNDS * (len(CHAIN) + sum(hooked))
    assert [rp.nmissed for rp in probes] == [0] * len(CHAIN)
    assert fprobe.nmissed == 0


@pytest.mark.parametrize("handler", [ACCEPTS, REFUSES])
def test_two_on_one_function(
    kernel: Kernel,
    make_fprobe: Callable[..., Fprobe[Any]],
    make_kretprobe: Callable[..., Kretprobe[Any]],
    handler: str,
) -> None:
    """A kretprobe and an fprobe share the stack slot with the return address."""
    fprobe = make_fprobe("[gi][cn][dt]*")
    settled(kernel)
    rp = make_kretprobe("gcd", handler)
    settled(kernel)
    before = returns(fprobe)
    for _ in range(ROUNDS):
        assert kernel.call("gcd", 12, 18) == 6
    accepted = handler == ACCEPTS
    assert returns(rp) == ROUNDS * accepted
    assert returns(fprobe) - before == ROUNDS * (2 + accepted)


@pytest.mark.parametrize("handler", [ACCEPTS, REFUSES])
def test_no_instance_is_left_within(
    kernel: Kernel,
    stack: str,
    make_fprobe: Callable[..., Fprobe[Any]],
    make_kretprobe: Callable[..., Kretprobe[Any]],
    handler: str,
) -> None:
    """The fprobe's only instance belongs to the call of lcm, so it misses the calls of INNER at gcd's hits.

    The tasks' arrays have no such limit.
    """
    fprobe = make_fprobe("[li][cn][mt]*", nr_maxactive=1)
    settled(kernel)
    rp = make_kretprobe("gcd", handler, maxactive=1)
    settled(kernel)
    before = returns(fprobe)
    for _ in range(ROUNDS):
        assert kernel.call("lcm", 4, 6) == 12
        assert kernel.call(INNER, 81) == 9
    accepted = handler == ACCEPTS
    within = ROUNDS * (1 + accepted)
    missed = 0 if stack in PER_TASK else within
    assert returns(fprobe) - before == 2 * ROUNDS + within - missed
    assert fprobe.nmissed == missed
    assert (returns(rp), rp.nmissed) == (ROUNDS * accepted, 0)


@pytest.mark.parametrize("handler", [ACCEPTS, REFUSES])
def test_no_room_is_left_within(
    kernel: Kernel,
    stack: str,
    make_fprobe: Callable[..., Fprobe[Any]],
    make_kretprobe: Callable[..., Kretprobe[Any]],
    handler: str,
) -> None:
    """The kretprobe's own call fills the task's array, so the calls of INNER within its hits are missed."""
    word = kernel.arch.word_size
    fprobe = make_fprobe(nr_maxactive=1)
    settled(kernel)
    # The call of INNER needs one word more than the array has left.
    size = SHADOW_STACK_SIZE - 2 * TRAILER * word - kernel.image.abi["kretprobe_instance.data"]
    rp = make_kretprobe("gcd", handler, maxactive=1, data_size=size)
    settled(kernel)
    before = returns(fprobe)
    for _ in range(ROUNDS):
        assert kernel.call("gcd", 12, 18) == 6
        assert kernel.call(INNER, 81) == 9
    accepted = handler == ACCEPTS
    within = ROUNDS * (1 + accepted)
    missed = within if stack in PER_TASK else 0
    assert returns(fprobe) - before == ROUNDS + within - missed
    assert fprobe.nmissed == missed
    assert (returns(rp), rp.nmissed) == (ROUNDS * accepted, 0)
