"""Properties of a probe that determine which fetch arguments it can have."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.trace.fetch.probe_arg import ProbeArg
from emulated_kernel.trace.interface import Interface, InterfaceRule
from emulated_kernel.trace.text.probe_errors import TraceProbeLog
from emulated_kernel.util.fast_dataclass import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from emulated_kernel.image.linux.btf import Btf
    from emulated_kernel.trace.fetch.btf_args import ProbedFunction


def no_types() -> None:
    """Return None: the default of FetchContext.types, for a kernel without BTF."""


@dataclass(frozen=True, eq=False)
class FetchContext:
    """Properties of the probe or event whose arguments are parsed; they determine the allowed expressions."""

    arch: Arch
    log: TraceProbeLog
    interface: Interface
    on_return: bool = False
    on_entry: bool = False
    in_kernel: bool = True
    """Whether the probe is in the kernel; if False, it is in a user program (uprobe).

    An expression `@SYMBOL` is for the kernel only, and `@+FILE_OFFSET` is for programs only.
    """
    finish: Callable[[ProbeArg], ProbeArg] | None = None
    """Function that checks and completes a parsed argument of an event probe; None for other probes.

    The function checks that the target event has the argument's field, and replaces a symbol by its address.
    """
    in_fprobe: bool = False
    """Whether the probe is an fprobe or on a tracepoint; if so, its arguments must not name registers."""
    types: Callable[[], Btf | None] = no_types
    """Returns the kernel's BTF, or None if the kernel has none."""
    function: str | None = None
    """Name of the probed function, or None if the probe is not at a symbol."""
    first_parameter: int = 0
    """Number of leading parameters of the function that no fetch argument can name.

    In a distribution's kernel, a tracepoint's function has such a parameter: `__data`, before the arguments
    of the tracepoint.
    """
    captured: list[int] = field(default_factory=list)
    """Numbers, from 0, of the function arguments that a return probe must store at the function's entry.

    The parser appends a number when a fetch argument first uses it. The values are stored in this order.
    """

    has_field: Callable[[str], bool] | None = None
    """Returns whether an event probe's target event has a field of the given name; None for other probes."""

    @cached_property
    def btf(self) -> Btf | None:
        """The kernel's BTF, or None if the kernel has none."""
        return self.types()

    @cached_property
    def prototype(self) -> ProbedFunction | None:
        """The prototype of the probed function, or None if BTF does not have it."""
        from emulated_kernel.trace.fetch.btf_args import find_function

        return find_function(self.btf, self.function, self.first_parameter)

    @property
    def has_parameters(self) -> bool:
        """Whether fetch arguments can use the parameters of the probed function, at its entry or return."""
        return self.on_entry or (self.on_return and InterfaceRule.ENTRY_ARGS in self.interface)

    @property
    def on_event(self) -> bool:
        """Whether the arguments are for an event probe. If so, `$NAME` is a field, and `%REG` an error."""
        return self.finish is not None
