"""Fentry sites: their nops become calls of one trampoline, which serves probes, fprobes and tracers."""

from __future__ import annotations

from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.codegen.asm_handlers import AssemblyOwner, HandlerPoint
from emulated_kernel.kprobes.codegen.compiler import Compiler
from emulated_kernel.kprobes.hit.ftrace_ops import Called, CodesOf, FtraceOps, FtraceOpsList, SiteGroups
from emulated_kernel.kprobes.hit.handling import CallHandler, HitHandling
from emulated_kernel.kprobes.hit.partial_jumps import PartialJumpDetector
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.text.text import shrink_dict
from emulated_kernel.machine.text.text_poke import TextPoker
from emulated_kernel.util.control_lock import ControlLock

FTRACE_TRAMPOLINE = "ftrace_regs_caller"
"""Name of the trampoline that armed fentry sites call, in symbols and disassembly."""
OPS_LIST_FUNC = "arch_ftrace_ops_list_func"
"""Name of the Linux function that fentry sites call if several ftrace_ops hook them."""


class FtraceSites:
    """Arms fentry sites, and calls the users (FtraceOps) of a site when the site is hit.

    Mirrors: kernel/kprobes.c:arm_kprobe_ftrace, disarm_kprobe_ftrace (v6.1).
    """

    def __init__(
        self,
        machine: ProbedMachine,
        arch: Arch,
        hits: HitHandling,
        compiler: Compiler,
        poker: TextPoker,
        split_jumps: PartialJumpDetector,
        lock: ControlLock,
    ) -> None:
        self._lock = lock
        text = machine.text
        self._machine = machine
        self._text = text
        self._memory = machine.memory
        self._breakpoints = machine.breakpoints
        self._arch = arch
        self._hits = hits
        self._compiler = compiler
        self._poker = poker
        self._split_jumps = split_jumps
        stub = arch.ftrace_trampoline()
        self.trampoline_size = len(stub.code)
        self.trampoline = text.alloc_text(self.trampoline_size)
        """Address of the trampoline that armed sites call, except sites that call compiled handlers."""
        text.poke(self.trampoline, stub.code)
        self.return_at = self.trampoline + self.trampoline_size - arch.return_size
        """Address of the return instruction at the trampoline's end; compiled handlers end there."""
        self._calls: dict[int, Called] = {}
        """Address of an fentry site -> handler of calls from the site.

        The first call from a site adds an item, and a change of the site's users removes it. So the map is
        small even if a tracer hooks tens of thousands of sites.
        """
        self._breakpoints[self.trampoline + stub.trap] = self._make_on_call()
        self._callers: dict[int, AggrKprobe] = {}
        """Address of an fentry site -> AggrKprobe of the armed probes at the site."""
        self._by_call: dict[int, CallHandler] = {}
        """Address of an fentry site -> function that handles the hits of the site's probes in Python.

        A site has an item from the first hit on.
        """
        self._deferred_sites: set[int] = set()
        """Sites whose users changed while the sites were being patched; they are updated afterwards."""
        self._calling: dict[int, int] = {}
        """Address of an armed fentry site -> target of the site's call."""
        self._with_regs: set[int] = set()
        self.keeps_history = False
        """Whether `touched` and `modified` are kept. They take megabytes when all functions are traced."""
        self.touched: set[int] = set()
        """Sites that have ever been armed. Mirrors: include/linux/ftrace.h:FTRACE_FL_TOUCHED (v6.12)."""
        self.modified: set[int] = set()
        """Sites that have had a user that may change ip.

        Mirrors: include/linux/ftrace.h:FTRACE_FL_MODIFIED (v6.12).
        """
        self.enabled = 1
        """Value of sysctl kernel.ftrace_enabled; while it is 0, all sites are nops."""
        self.calls = 0
        """Number of calls, made by fentry sites, that Python has handled."""
        self._ops = FtraceOpsList()
        self._leaving: dict[FtraceOps, set[int]] = {}
        """User -> sites that it has left, but whose text is still a call. The user still gets these calls."""
        self._lists: dict[tuple[FtraceOps, ...], Called] = {}
        """Users, newest first -> handler of the sites with these users. A change of users empties the map."""
        self._of_kprobes = tuple(
            FtraceOps(self._hit_probe, lambda: "kprobe_ftrace_handler", saves_regs=True, modifies_ip=modifies)
            for modifies in (False, True)
        )
        """The FtraceOps of all kprobes: first that of those without a post_handler, then that of others.

        Each of the two takes its place in the order of calls when its first probe is armed.
        Mirrors: kernel/kprobes.c:kprobe_ftrace_ops, kprobe_ipmodify_ops (v6.1).
        """

    # Handling of calls

    def _make_on_call(self) -> Callable[[Any], None]:
        """Return the handler of the breakpoint in ftrace's trampoline.

        At the breakpoint, sp points at the saved registers. The saved ip is the address after the fentry
        site. The trampoline returns to the saved ip, which handlers may change.
        """
        find = self._calls.get
        frames = self._hits.frames
        call_size = self._arch.call_size

        def call(regs: Any) -> None:
            self.calls += 1
            frame = frames[regs.sp]
            site = frame.ip - call_size
            hit = find(site) or self._find_handler(site)
            if hit is not None:
                hit(site, frame)

        return call

    def install(self, head: AggrKprobe) -> None:
        """At the next call from a probe's site, look for the handler again: the probe's state has changed.

        If the probe is not armed, do nothing.
        """
        if head.address in self._callers:
            self._route({head.address})

    def _route(self, sites: set[int]) -> SiteGroups:
        """Forget the handlers of the calls from `sites`; return the sites, grouped by their users.

        At the next call from a site, Python looks for the handler again. Compiled handlers of probes are
        dropped at sites with other users.
        """
        groups = self._ops.groups(sites)
        self._lists.clear()
        for site in self._calls.keys() & sites:
            del self._calls[site]
        for ops, members in groups.single.items():
            if ops not in self._of_kprobes:
                self._drop_codes(members)
        self._drop_codes(groups.several)
        return groups

    def _drop_codes(self, sites: set[int]) -> None:
        """Drop compiled handlers that `sites` call directly, so that other users see the calls too."""
        for site in self._callers.keys() & sites:
            self.drop_code(self._callers[site])

    def _find_handler(self, site: int) -> Called | None:
        """Find the handler of calls from `site`, store it in `_calls` and return it.

        Return None if the site has no users.
        """
        users = tuple(self._ops.users(site))
        if not users:
            users = tuple(ops for ops, sites in self._leaving.items() if site in sites)
        if not users:
            return None
        if len(users) == 1 and users[0] in self._of_kprobes:
            handler: Called = partial(self._first_by_call, self._callers[site])
        else:
            handler = self._lists.get(users) or self._lists.setdefault(users, self._handler_for(users))
        self._calls[site] = handler
        return handler

    def _handler_for(self, users: Sequence[FtraceOps]) -> Called:
        """Return a handler of calls from a site. `users`: all users (FtraceOps) of the site, newest first.

        The handler first runs the users' handlers in assembly, if there are any. Then it calls the users'
        functions `func`, those of newer users first.
        """
        at = next((number for number, ops in enumerate(users) if ops in self._of_kprobes), None)
        if len(users) == 1:
            handler = users[0].func
        elif at is None:
            handler = self._list([ops.func for ops in users])
        else:
            # The guest runs the probe's handlers in assembly. Older users must be called after those.
            older = _each([*(ops.func for ops in users[at + 1 :]), self._list_ends])
            newer = [ops.func for ops in users[:at]]
            handler = self._list([*newer, partial(self._hit_probe, older=older)], ends=False)
        owners = tuple(ops.assembly for ops in users if ops.assembly is not None)
        return partial(self._run_asm_handlers, owners, handler) if owners else handler

    def _run_asm_handlers(
        self, owners: tuple[AssemblyOwner, ...], on_return: Called, site: int, frame: Any
    ) -> None:
        """Let the guest run the assembly handlers of `owners`, then call `on_return(site, frame)`.

        If there is no room for the assembly handlers' code, only `on_return` is called. `frame`: the saved
        registers.
        """
        hits = self._hits
        regs = self._machine.regs
        if not hits.asm_thunks.run_asm_handlers(
            owners, HandlerPoint.PRE, regs, in_frame=True, on_return=lambda _regs: on_return(site, frame)
        ):
            on_return(site, frame)

    def _list(self, calls: Sequence[Called], *, ends: bool = True) -> Called:
        """Return a handler that calls `calls`, the handlers of several users of a site.

        KprobeCtlblk.in_ops_list is set during the calls. `ends`: whether the handler clears the flag after
        the last call. If `ends` is False, one of `calls` clears the flag.
        Mirrors: kernel/trace/ftrace.c:__ftrace_ops_list_func (v6.1).
        """
        call_each = _each([*calls, self._list_ends] if ends else calls)

        def call(site: int, frame: Any) -> None:
            ctlblk = self._hits.ctlblk
            ctlblk.in_ops_list = True
            try:
                call_each(site, frame)
            except BaseException:
                ctlblk.in_ops_list = False
                raise

        return call

    def _list_ends(self, _site: int, _frame: Any) -> None:
        self._hits.ctlblk.in_ops_list = False

    def _handler_of(self, head: AggrKprobe) -> CallHandler:
        handle = self._by_call.get(head.address)
        if handle is None:
            handle = self._by_call[head.address] = self._hits.by_call(head)
        return handle

    def _hit_probe(self, site: int, frame: Any, older: Called = lambda _site, _frame: None) -> None:
        # Another user's handler may just have disarmed the probe.
        head = self._callers.get(site)
        if head is None or not self._handler_of(head)(site, frame, partial(older, site, frame)):
            older(site, frame)

    def _first_by_call(self, head: AggrKprobe, site: int, frame: Any) -> None:
        """Handle the first call from an fentry site after a change of the probe's handlers.

        Afterwards, compile the handlers if possible. `site`: address of the fentry site. `frame`: the saved
        registers.
        """
        handle = self._handler_of(head)
        if not head.may_compile or head.is_disabled:
            self._calls[site] = handle
            handle(site, frame)
            return
        route = self._calls[site]
        if (
            handle(site, frame)
            and self._calls.get(site) is route
            and head.compiled is None
            and self._split_jumps.may_patch()
            and self._compiler.may_make(head.nr_handlers)
        ):
            self._compiler.keep_sample(head, frame)
            self.compile_call(head)

    def compile_call(self, head: AggrKprobe) -> None:
        """Compile the probe's handlers, if possible. The probe's site calls the code from the next hit on."""
        code = self._compiler.call(head, self.return_at)
        head.compiled = code
        head.is_python = code is None
        if code is not None:
            self._start_and_stop({head.address: code.entry})

    def drop_code(self, head: AggrKprobe) -> None:
        """Let Python handle the probe's hits until the next compilation; called when its handlers change."""
        head.cost.forget()
        head.is_python = False
        code = head.compiled
        head.compiled = None
        if code is not None:
            if self._poker.is_patching(head.address):
                self._deferred_sites.add(head.address)
            elif head.address in self._callers and self.enabled:
                self._start_and_stop({head.address: self.trampoline})
            self._compiler.retire(code)

    # Probes

    def arm(self, heads: Sequence[AggrKprobe]) -> None:
        """Make the fentry sites of the probes `heads` call the probes.

        Mirrors: kernel/kprobes.c:__arm_kprobe_ftrace (v6.1).
        """
        for head in heads:
            self._callers[head.address] = head
            self._join(self._of_kprobes[head.has_post_handler], [head.address])
        self._update([head.address for head in heads])

    def disarm(self, heads: Sequence[AggrKprobe]) -> None:
        """Stop the calls from fentry sites to the probes `heads`; sites without other users become nops.

        Mirrors: kernel/kprobes.c:__disarm_kprobe_ftrace (v6.1).
        """
        sites = [head.address for head in heads]
        for site in sites:
            for ops in self._of_kprobes:
                if site in ops.sites:
                    self._ops.leave(ops, [site])
                    self._leaving.setdefault(ops, set()).add(site)
                    if not ops.sites:
                        self._ops.remove(ops)
                        self._drop_regs([site])
        self._update(sites)
        for site, head in zip(sites, heads, strict=True):
            self._callers.pop(site, None)
            self._by_call.pop(site, None)
            self.drop_code(head)

    # All users

    def enable(self, value: int) -> None:
        """Set sysctl kernel.ftrace_enabled to `value`. If it is 0, all sites are nops, but keep their users.

        In Linux, setting it to 0 fails with EBUSY while a live patch is registered. This kernel has no live
        patches.
        Mirrors: kernel/trace/ftrace.c:ftrace_enable_sysctl (v6.1).
        """
        self._lock.assert_held()
        was_on = bool(self.enabled)
        self.enabled = value
        if was_on != bool(value):
            self._update({site for ops in self._ops for site in ops.sites})

    def attach(self, ops: FtraceOps, sites: Collection[int]) -> None:
        """Make `ops` hook the fentry sites `sites`, and no others.

        If `ops` had no sites, its sites call it before all FtraceOps that were attached earlier. The guest
        must not run while this method executes.
        Mirrors: kernel/trace/ftrace.c:register_ftrace_function, ftrace_hash_move_and_update_ops (v6.1).
        """
        self._lock.assert_held()
        changed = ops.sites.symmetric_difference(sites)
        gone = changed & ops.sites
        self._ops.leave(ops, gone)
        self._leaving[ops] = gone
        self._join(ops, changed - gone)
        self._update(changed)

    def detach(self, ops: FtraceOps) -> None:
        """Remove `ops` from all of its sites, so that they no longer call it.

        Mirrors: kernel/trace/ftrace.c:unregister_ftrace_function (v6.1).
        """
        self._lock.assert_held()
        if ops in self._ops:
            sites = self._ops.remove(ops)
            self._leaving[ops] = sites
            if ops.saves_regs:
                self._drop_regs(sites)
            self._update(sites)

    def set_code(self, ops: FtraceOps, codes_of: CodesOf) -> None:
        """Make the sites of `ops` call the guest code that `codes_of` selects, in place of Python."""
        self._lock.assert_held()
        ops.codes_of = codes_of
        calling = self._calling
        self._update(
            [
                site
                for code, sites in codes_of(ops.sites)
                for site in sites
                if calling.get(site) != (code or self.trampoline)
            ]
        )

    def set_assembly(self, ops: FtraceOps, owner: AssemblyOwner | None) -> None:
        """Set the object whose assembly handlers run at the sites of `ops`.

        `owner`: this object, or None if no assembly handlers run any more.
        """
        self._lock.assert_held()
        if ops.assembly is not owner:
            ops.assembly = owner
            self._update(ops.sites)

    def _join(self, ops: FtraceOps, sites: Collection[int]) -> None:
        self._ops.join(ops, sites)
        if ops.saves_regs:
            self._with_regs.update(sites)

    def _drop_regs(self, sites: Iterable[int]) -> None:
        """Forget that `sites` save all registers, except sites with a user that still needs all registers.

        Mirrors: kernel/trace/ftrace.c:test_rec_ops_needs_regs (v6.1).
        """
        for site in sites:
            if not any(ops.saves_regs for ops in self._ops.any_order(site)):
                self._with_regs.discard(site)

    def forget(self, sites: Iterable[int]) -> None:
        """Remove sites from `touched` and `modified`, because their text is about to be freed."""
        self.touched.difference_update(sites)
        self.modified.difference_update(sites)

    @property
    def has_tracers(self) -> bool:
        """Whether any site has a user (FtraceOps) that does not serve kprobes, such as a tracer's."""
        for ops in self._ops:  # noqa: SIM110 - a generator would cost more calls
            if ops not in self._of_kprobes:
                return True
        return False

    @property
    def is_used(self) -> bool:
        """Whether any site has a user (FtraceOps)."""
        return bool(self._ops)

    def users(self) -> Mapping[int, tuple[int, Sequence[FtraceOps]]]:
        """Return a map for all armed sites: site -> (target of its call, list of its users, newest first)."""
        return {site: (target, self._ops.users(site)) for site, target in self._calling.items()}

    def saves_regs(self, site: int) -> bool:
        """Return True if a user of the site needs all registers.

        The result stays True after a probe that needed them was removed, as long as the site has other users.
        Mirrors: include/linux/ftrace.h:FTRACE_FL_REGS (v6.1), which a probe leaves set as long as the site
        has users.
        """
        return site in self._with_regs

    def _update(self, sites: Iterable[int]) -> None:
        """Write at `sites` the calls that their users require, and nops at sites without users.

        The handler of a site's calls is removed after the site has become a nop.
        """
        if not isinstance(sites, set):
            sites = set(sites)
        calling = self._calling
        sizes = len(self._calls), len(calling)
        groups = self._route(sites)
        self._with_regs -= groups.unused
        busy = set(filter(self._poker.is_patching, sites)) if self._poker.is_busy else set()
        self._deferred_sites |= busy
        starting = self._targets(groups) if self.enabled else {}
        if busy or not calling.keys().isdisjoint(starting):
            same = [site for site, target in starting.items() if site in busy or calling.get(site) == target]
            for site in same:
                del starting[site]
        not_calling = groups.unused if self.enabled else sites
        stopping = {site for site in not_calling if site in calling and site not in busy}
        if self.keeps_history and self.enabled:
            for ops in self._of_kprobes:
                if ops.modifies_ip:
                    self.modified |= ops.sites & sites
        self._start_and_stop(starting, sorted(stopping))
        self._leaving.clear()
        self._route(stopping)
        shrink_dict(self._calls, sizes[0])
        shrink_dict(calling, sizes[1])

    def _targets(self, groups: SiteGroups) -> dict[int, int]:
        """Return a map site -> address that the site calls, for the sites that have users.

        A site with one user calls the guest code that the user's `codes_of` selects, if any. Other sites call
        the trampoline. So does a probe's site until the first hit, at which compile_call() may change the
        target.
        """
        trampoline = self.trampoline
        targets = dict.fromkeys(groups.several, trampoline)
        for ops, members in groups.single.items():
            for code, sites in ops.codes_of(members):
                # Tens of thousands of sites take a tenth less time in the order of their addresses.
                targets.update(dict.fromkeys(sorted(sites), code or trampoline))
        return targets

    def _start_and_stop(self, starting: Mapping[int, int], stopping: Collection[int] = ()) -> None:
        """Write calls at some fentry sites, and nops at others.

        `starting`: site -> target of the call. `stopping`: sites that get nops.
        """
        insns = _CallInsns(starting, self._arch)
        breakpoints: dict[int, Callable[[Any], None]] = {}
        if not self._poker.takes_one_step(len(insns) + len(stopping)):
            breakpoints.update(dict.fromkeys(starting, self._call(starting)))
            breakpoints.update(dict.fromkeys(stopping, self._skip))
            self._breakpoints.update(breakpoints)
        for site in stopping:
            del self._calling[site]
        if self.keeps_history:
            self.touched.update(starting)
        self._split_jumps.start_again([*(site for site in starting if site in self._calling), *stopping])
        self._calling.update(starting)
        if insns or stopping:
            self._poker.replace_all(insns, stopping, self._arch.call_size)
        for site in breakpoints:
            del self._breakpoints[site]
        again = {site for site in self._deferred_sites if not self._poker.is_patching(site)}
        if again:
            self._deferred_sites -= again
            self._update(again)

    def _call(self, targets: Mapping[int, int]) -> Callable[[Any], None]:
        """Return a handler of breakpoints at sites that are being patched.

        The handler performs the call that is being written. `targets`: address of a site -> target of the
        site's call. One handler serves all sites, because a kernel has tens of thousands of sites.
        """
        word = self._arch.word_size
        call_size = self._arch.call_size
        trap_size = len(self._arch.breakpoint)
        memory = self._memory
        link = self._arch.call_link

        def push_and_go(regs: Any) -> None:
            site = regs.ip - trap_size
            memory.write(regs.sp - word, (site + call_size).to_bytes(word, "little"))
            regs.sp -= word
            regs.ip = targets[site]

        def link_and_go(regs: Any) -> None:
            assert link is not None
            site = regs.ip - trap_size
            setattr(regs, link, site + call_size)
            regs.ip = targets[site]

        return push_and_go if link is None else link_and_go

    def _skip(self, regs: Any) -> None:
        regs.ip += self._arch.call_size - len(self._arch.breakpoint)


class _CallInsns(Mapping[int, bytes]):
    """Address of a site -> the call instruction to write there; each lookup makes the instruction again."""

    def __init__(self, targets: Mapping[int, int], arch: Arch) -> None:
        self._targets = targets
        self._arch = arch

    def __getitem__(self, site: int) -> bytes:
        return self._arch.relative_call(site, self._targets[site])

    def items(self) -> ItemsView[int, bytes]:
        return _CallItems(self, self._arch.relative_calls(self._targets))

    def __iter__(self) -> Iterator[int]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


class _CallItems(ItemsView[int, bytes]):
    """The items of a _CallInsns, whose instructions the architecture encodes all at once."""

    def __init__(self, insns: _CallInsns, encoded: Iterable[tuple[int, bytes]]) -> None:
        super().__init__(insns)
        self._encoded = encoded

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return iter(self._encoded)


def _each(calls: Sequence[Called]) -> Called:
    """Return a handler that calls all of `calls` in their order."""
    if len(calls) == 1:
        return calls[0]

    def call(site: int, frame: Any) -> None:
        for handle in calls:
            handle(site, frame)

    return call
