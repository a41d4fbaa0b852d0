"""FtraceOps, the users of fentry sites, and the list of them with an index by site."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from itertools import count, islice
from typing import Any

from emulated_kernel.kprobes.codegen.asm_handlers import AssemblyOwner
from emulated_kernel.util.fast_dataclass import dataclass, field

Called = Callable[[int, Any], object]
"""Handler of a call; it takes the site's address and the saved registers. The saved ip is after the site."""
CodesOf = Callable[[AbstractSet[int]], Iterable[tuple[int | None, AbstractSet[int]]]]
"""Function that divides fentry sites by the guest code that they call.

Each item of the result has the address of the code, or None if Python handles the calls, and a set of sites.
The function handles sets, because there may be tens of thousands of sites.
"""

_FEW = 16
"""Maximum number of sites of an ftrace_ops that FtraceOpsList puts into its index by site."""


def no_code(sites: AbstractSet[int]) -> Iterable[tuple[int | None, AbstractSet[int]]]:
    """Return all `sites` as one group, whose calls Python handles; this function is a CodesOf."""
    return ((None, sites),)


def one_code(address: int) -> CodesOf:
    """Return a CodesOf for the guest code at `address`, which handles the calls from all sites."""
    return lambda sites: ((address, sites),)


@dataclass(eq=False)
class FtraceOps:
    """A user of fentry sites: a function that is called at hits of the sites, and its requirements.

    A user is a tracer, an fprobe, or one of the two objects that serve all kprobes.
    Mirrors: include/linux/ftrace.h:struct ftrace_ops (v6.1).
    """

    func: Called
    symbol: Callable[[], str]
    """Function that returns the name of the Linux function that does the work of `func`.

    The file enabled_functions shows this name.
    """
    saves_regs: bool = False
    """Whether `func` needs all registers. Mirrors: include/linux/ftrace.h:FTRACE_OPS_FL_SAVE_REGS (v6.1)."""
    modifies_ip: bool = False
    """Whether `func` may change the saved ip, at which the guest continues.

    Mirrors: include/linux/ftrace.h:FTRACE_OPS_FL_IPMODIFY (v6.1).
    """
    sub_symbols: tuple[str, str] | None = None
    """Names of the entry function and the return function of this ftrace_ops in Linux, or None.

    The names are given if the Linux function that symbol() names serves several ftrace_ops. The file
    enabled_functions shows the two names as subops.
    Mirrors: include/linux/ftrace.h:struct ftrace_ops, subop_list (v7.2).
    """
    codes_of: CodesOf = no_code
    """Function that divides fentry sites by the guest code for their calls; see CodesOf.

    The code does the same as `func`. A site calls the code only if no other ftrace_ops hooks the site.
    """
    assembly: AssemblyOwner | None = field(default=None, init=False)
    """Object that has the user's handlers in assembly; None if there are no such handlers.

    At a site with several users, these handlers run before the `func` of any user.
    """
    sites: set[int] = field(default_factory=set, init=False)
    """Addresses of the fentry sites that this ftrace_ops hooks. Only FtraceOpsList changes the set."""


@dataclass(eq=False)
class SiteGroups:
    """Fentry sites, divided by their users."""

    unused: set[int]
    """The sites without a user."""
    single: dict[FtraceOps, set[int]]
    """User -> the sites that have no other user."""
    several: set[int]
    """The sites with several users."""


class FtraceOpsList:
    """The users (FtraceOps) of all sites.

    Thousands of fprobes may hook a few sites each, and a tracer hooks nearly all sites. The work for a change
    of one user does not grow with the number of users that have few sites.
    Mirrors: kernel/trace/ftrace.c:ftrace_ops_list (v6.1).
    """

    def __init__(self) -> None:
        self._numbers: dict[FtraceOps, int] = {}
        """User -> a number, which is greater for newer users."""
        self._next = count()
        self._few: dict[int, dict[FtraceOps, None]] = {}
        """Site -> its users that have at most _FEW sites."""
        self._many: dict[FtraceOps, None] = {}
        """The users that have more than _FEW sites."""

    def __contains__(self, ops: FtraceOps) -> bool:
        return ops in self._numbers

    def __iter__(self) -> Iterator[FtraceOps]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def join(self, ops: FtraceOps, sites: Collection[int]) -> None:
        """Add `sites` to the sites of `ops`. If `ops` is not in the list yet, add it as the newest user."""
        if ops not in self._numbers:
            self._numbers[ops] = next(self._next)
        if ops not in self._many and len(ops.sites) + len(sites) > _FEW:
            self._drop(ops, ops.sites)
            self._many[ops] = None
        ops.sites.update(sites)
        if ops not in self._many:
            for site in sites:
                self._few.setdefault(site, {})[ops] = None

    def leave(self, ops: FtraceOps, sites: Collection[int]) -> None:
        """Remove `sites` from the sites of `ops`. `ops` stays in the list even if it has no sites left."""
        if ops not in self._many:
            self._drop(ops, sites)
        ops.sites.difference_update(sites)

    def remove(self, ops: FtraceOps) -> set[int]:
        """Remove `ops` from the list. Return the sites that it had."""
        del self._numbers[ops]
        sites = ops.sites
        if ops in self._many:
            del self._many[ops]
        else:
            self._drop(ops, sites)
        ops.sites = set()
        return sites

    def _drop(self, ops: FtraceOps, sites: Iterable[int]) -> None:
        for site in sites:
            users = self._few[site]
            del users[ops]
            if not users:
                del self._few[site]

    def any_order(self, site: int) -> Iterator[FtraceOps]:
        """Yield the users of a site, in any order."""
        yield from self._few.get(site, ())
        for ops in self._many:
            if site in ops.sites:
                yield ops

    def users(self, site: int) -> list[FtraceOps]:
        """Return the users of a site, newest first, which is the order of their calls."""
        return sorted(self.any_order(site), key=self._numbers.__getitem__, reverse=True)

    def groups(self, sites: set[int]) -> SiteGroups:
        """Return `sites`, divided by their users.

        For speed, most sites are handled by operations on whole sets.
        """
        found = SiteGroups(sites, {}, set())
        few = sites & self._few.keys()
        for site in few:
            users = [*islice(self.any_order(site), 2)]
            if len(users) == 1:
                found.single.setdefault(users[0], set()).add(site)
            else:
                found.several.add(site)
        others = sites - few if few else sites
        found.unused = others
        for ops in self._many:
            inside = others & ops.sites
            shared = inside - found.unused
            if shared:
                found.several |= shared
                found.single = {user: its - shared for user, its in found.single.items()}
            alone = inside - shared if shared else inside
            if ops in found.single:
                found.single[ops] |= alone
            else:
                found.single[ops] = alone
            found.unused = found.unused - alone
        return found
