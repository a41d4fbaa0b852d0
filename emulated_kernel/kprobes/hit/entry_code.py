"""EntryCode: guest code that handles the calls from the fentry sites of an ftrace_ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Generic, TypeVar

from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.kprobes.codegen.compiler import SHORTAGES, Compiler
from emulated_kernel.kprobes.codegen.guest_code import CompiledCode
from emulated_kernel.kprobes.hit.ftrace import FtraceSites
from emulated_kernel.kprobes.hit.ftrace_ops import FtraceOps, no_code
from emulated_kernel.kprobes.hit.partial_jumps import PartialJumpDetector

KindT = TypeVar("KindT")
ByKind = Callable[[AbstractSet[int]], Mapping[KindT, AbstractSet[int]]]
"""Function that divides fentry sites; it returns a map: kind of function -> sites of such functions.

A kind says how a tracer treats the calls of a function. Functions of one kind share guest code.
"""


class EntryCode(Generic[KindT]):
    """Guest code that handles the calls of an ftrace_ops; functions of one kind (see ByKind) share it.

    The sites of all functions of a kind call the same jump instruction. The jump leads to guest code, or to
    the trampoline if Python handles the calls. After a change of a tracer's settings, only the targets of
    these few jumps change, not all sites.
    """

    def __init__(
        self, sites: FtraceSites, compiler: Compiler, split_jumps: PartialJumpDetector, ops: FtraceOps
    ) -> None:
        self._sites = sites
        self._compiler = compiler
        self._split_jumps = split_jumps
        self._ops = ops
        self._jumps: dict[KindT, CompiledCode] = {}
        self._codes: list[CompiledCode] = []
        self.is_settled = False
        """Whether make() has run for the current settings, or no code can be compiled for them.

        If it is True, make() need not run until the settings change.
        """

    @property
    def may_make(self) -> bool:
        """Whether make() has to run for the current settings, and may run now.

        It may run if PartialJumpDetector.may_patch() returns True.
        """
        return not self.is_settled and self._split_jumps.may_patch()

    def prepare(self, sites: AbstractSet[int], by_kind: ByKind[KindT]) -> None:
        """Create missing jumps for the kinds of `sites`. Sites call their jump as soon as they are attached.

        `by_kind`: divides sites by the kind of their functions. If there is no memory for the jump of a kind,
        the sites of this kind call the trampoline.
        """
        jumps = self._jumps
        for kind in by_kind(sites):
            if kind not in jumps:
                jump = self._compiler.jump(self._sites.trampoline)
                if jump is not None:
                    jumps[kind] = jump

        def codes_of(sites: AbstractSet[int]) -> Iterable[tuple[int | None, AbstractSet[int]]]:
            for kind, members in by_kind(sites).items():
                jump = jumps.get(kind)
                yield None if jump is None else jump.entry, members

        self._ops.codes_of = codes_of

    def make(
        self,
        sites: AbstractSet[int],
        by_kind: ByKind[KindT],
        emit: Callable[[ProgramBuilder, KindT], object],
    ) -> bool:
        """Compile guest code for the calls from the fentry sites `sites`; calls run it from now on.

        `by_kind`: see prepare(). `emit`: adds to a program the handling of a call from functions of a kind.
        Return False if there is no memory for the code; then Python handles the calls.
        """
        self.is_settled = True
        try:
            self.prepare(sites, by_kind)
            self._sites.set_code(self._ops, self._ops.codes_of)
            for kind in by_kind(sites):
                if kind in self._jumps:
                    self._lead(self._jumps[kind], kind, emit)
        except SHORTAGES as error:
            self._compiler.log_failure(error)
            self.drop()
            self.is_settled = True
            return False
        return True

    def _lead(self, jump: CompiledCode, kind: KindT, emit: Callable[[ProgramBuilder, KindT], object]) -> None:
        builder = ProgramBuilder()
        emit(builder, kind)
        code = self._compiler.entries(builder, self._sites.return_at)
        if code is not None:
            self._codes.append(code)
            self._compiler.lead_to(jump, code.entry)

    def drop(self) -> None:
        """Let Python handle the calls until the next make(); called when the settings have changed."""
        self.is_settled = False
        for jump in self._jumps.values():
            self._compiler.lead_to(jump, self._sites.trampoline)
        codes = self._codes
        self._codes = []
        for code in codes:
            self._compiler.retire(code)

    def close(self) -> None:
        """Free the code and the jumps, after the ftrace_ops was detached from its sites."""
        self.drop()
        for jump in self._jumps.values():
            self._compiler.retire(jump)
        self._jumps.clear()
        self._ops.codes_of = no_code
