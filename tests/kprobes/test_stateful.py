"""Random operations on probes of kprobefs's own kernel, compared with a model."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.errors import KernelError
from tests.kprobes.modelled import PICKS, PLACES, Modelled, reference, run


def inside_an_instruction() -> Kprobe:
    boundary = next(b for b in reference("x86_64").boundaries if b.size > 1)
    return Kprobe(addr=boundary.addr + 1)


REFUSED: tuple[tuple[Callable[[], Kprobe], int], ...] = (
    (lambda: Kprobe(symbol_name="no_such_function"), errno.ENOENT),
    (lambda: Kprobe(symbol_name="gcd", addr=1), errno.EINVAL),
    (Kprobe, errno.EINVAL),
    (lambda: Kprobe(addr=0x1000), errno.ENOENT),
    (lambda: Kprobe(symbol_name="init_task"), errno.EINVAL),
    (lambda: Kprobe(symbol_name="asm_host_interrupt"), errno.EINVAL),
    (inside_an_instruction, errno.EILSEQ),
)


class Probing(Modelled):
    """A state machine for kprobes that are registered alone or in arrays, some of which are refused."""

    @rule(number=PLACES, disabled=st.booleans(), by_name=st.booleans(), stepped=st.booleans())
    def register(self, number: int, disabled: bool, by_name: bool, stepped: bool) -> None:
        addr = self.place(number)
        kprobe = self.kprobe(addr, disabled=disabled, by_name=by_name, stepped=stepped)
        self.kernel.register_kprobe(kprobe)
        assert kprobe.address == addr
        self.model.register(addr, kprobe, disabled)

    @initialize(numbers=st.lists(PLACES, min_size=2, max_size=6))
    def begin(self, numbers: list[int]) -> None:
        self.register_batch(numbers, None)

    @rule(refused=st.sampled_from(REFUSED))
    def register_refused(self, refused: tuple[Callable[[], Kprobe], int]) -> None:
        make, expected = refused
        with pytest.raises(KernelError) as caught:
            self.kernel.register_kprobe(make())
        assert caught.value.errno == expected

    @precondition(lambda self: self.model.points)
    @rule(number=PICKS)
    def register_again(self, number: int) -> None:
        _, entry = self.pick(number)
        with pytest.raises(KernelError) as caught:
            self.kernel.register_kprobe(entry.kprobe)
        assert caught.value.errno == errno.EINVAL

    @rule(numbers=st.lists(PLACES, min_size=1, max_size=5), bad=st.none() | st.sampled_from(REFUSED))
    def register_batch(self, numbers: list[int], bad: tuple[Callable[[], Kprobe], int] | None) -> None:
        made = [(addr, self.kprobe(addr, stepped=n % 2 == 0)) for n in numbers for addr in (self.place(n),)]
        batch = [kprobe for _, kprobe in made]
        for addr, kprobe in made:
            self.model.register(addr, kprobe, disabled=False)
        if bad is None:
            self.kernel.register_kprobes(batch)
            return
        with pytest.raises(KernelError) as caught:
            self.kernel.register_kprobes([*batch, bad[0]()])
        assert caught.value.errno == bad[1]
        for addr, kprobe in made:
            self.model.forget(addr, kprobe)


@pytest.mark.stateful
def test_probing() -> None:
    run(Probing, 200)
