"""TracedCalls: records calls for a function tracer, from the second call on in guest code if possible."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from emulated_kernel.kprobes.hit.entry_code import EntryCode
from emulated_kernel.trace.compiled.calls import CompiledCalls
from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.tracers.call_sites import CallRecorder, KernelFunctions


class TracedCalls:
    """An ftrace_ops that records the calls from its fentry sites for a function tracer.

    A CallRecorder records the first call. Guest code records later calls if it can be compiled; otherwise the
    CallRecorder does.
    """

    def __init__(self, functions: KernelFunctions, recorder: CallRecorder, symbol: Callable[[], str]) -> None:
        """Create an ftrace_ops without sites. `symbol`: see KernelFunctions.user()."""
        self._functions = functions
        self._recorder = recorder
        self._ops = functions.user(self._called, symbol)
        self._code = functions.entry_code(self._ops)

    def attach(self, sites: AbstractSet[int]) -> None:
        """From now on, record the calls from the fentry sites `sites`, and no others."""
        if self._code is not None and self._settings() is not None:
            # New sites call the jump at once, because writing all sites again takes long.
            self._code.prepare(sites, _of_one_kind)
        self._functions.attach(self._ops, sites)

    def detach(self) -> None:
        """Stop recording the calls from all sites, and free the guest code."""
        self._functions.detach(self._ops)
        if self._code is not None:
            self._code.close()

    def settings_changed(self) -> None:
        """Drop the guest code, because compiled() of the recorder returns other settings now."""
        if self._code is not None:
            self._code.drop()

    def _settings(self) -> CompiledCalls | None:
        return self._recorder.compiled() if self._functions.may_compile else None

    def _called(self, site: int, hit: ProbeHit) -> None:
        self._recorder.record(site, hit)
        code = self._code
        if code is not None and code.may_make:
            self._compile(code)

    def _compile(self, code: EntryCode[None]) -> None:
        """Compile guest code into `code`, if the recorder's settings allow it.

        Otherwise Python continues to handle the calls.
        """
        settings = self._settings()
        if settings is None:
            code.is_settled = True
            return
        functions = self._functions
        code.make(
            self._ops.sites,
            _of_one_kind,
            lambda builder, _: settings.emit(builder, functions.arch, functions.places),
        )


def _of_one_kind(sites: AbstractSet[int]) -> dict[None, AbstractSet[int]]:
    """Return the map that an EntryCode needs: kind of function -> fentry sites.

    It has one kind, None, with all of `sites`, because all functions share their guest code.
    """
    return {None: sites}
