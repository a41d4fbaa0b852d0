"""`--state DIR`: what outlives the daemon: its records in a file, and a journal of what was defined.

DIR has `journal`, the `records.N` that it names, and of what couldn't be used the latest, as `aside.*`.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import BinaryIO

from emulated_kernel.guests.builtin.mounts.guest_mount import GuestMount
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.machine.task_events import TaskObserver
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.registry import EventIds, EventWatcher
from emulated_kernel.trace.text.cmdlines import KEPT_SIZE
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.safe_read import open_regular
from emulated_kernel.vfs.core.changes import ChangeWatcher
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node_tree import CONTROL, NodeTree
from kprobefs import __version__
from kprobefs.common.errors import escape_for_terminal
from kprobefs.daemon.state import journal, previous_boot
from kprobefs.daemon.state.hit_counters import Counts, counts, set_counts
from kprobefs.daemon.state.journal import Entry, Journal
from kprobefs.daemon.state.replay import Replay
from kprobefs.daemon.state.state_directory import TROUBLE, UNKEPT, StateDirectory

log = logging.getLogger("kprobefs")

VERSION = 1
COUNTS_AGE = 1.0
"""Seconds that hit counts may be behind in the journal."""
RETRY_PAUSE = 1.0
"""Seconds at least between two attempts to write a journal anew that fail."""
COMPACT_SIZE = 256 << 10
"""Bytes of a journal until it is written anew, from what is defined then."""
_UNKEPT_FILE = re.compile(
    r"tracing/(.*/)?(trace|trace_pipe|trace_pipe_raw|trace_marker|trace_marker_raw|error_log|free_buffer)$"
)
_UNKEPT = re.compile(r"tracing/instances/last(\.[^/]*)?(/|$)")
_KEPT = re.compile(
    r"tracing/|kprobe_events$|kprobes/(enabled|optimization|return_hook)$|sysctl/|machine/modules$"
    r"|kprobes/stats/.*/(enabled|optimized)$"
)
_OF_LAST = re.compile(r"instances/last(\.[^/]*)?/")


class DamagedState(Exception):
    """A state that can't be used, and why."""


class _NewIds(EventWatcher):
    """Ids of events that came since they were last written down."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def event_added(self, event: TraceEvent) -> None:
        self.events.append(event)

    def event_removed(self, event: TraceEvent) -> None:
        del event

    def take(self) -> dict[str, list[str]]:
        """By id, group and name."""
        events = self.events
        self.events = []
        return {str(event.id): [event.group, event.name] for event in events}


class SavedState(ChangeWatcher, TaskObserver):
    """What a daemon leaves, and finds. Nothing that is wrong with it keeps the daemon from serving.

    All methods but the constructor need the kernel's lock, or a kernel that nobody else knows yet.
    """

    def __init__(self, directory: StateDirectory, root: str) -> None:
        """`root`: what stands in front of the mount's paths in a mount that has everything."""
        self._directory = directory
        self._root = root
        self._journal: Journal | None = None
        self._kernel: Kernel
        self._mount: GuestMount
        self._definitions: Callable[[], list[str]]
        self._records = ""
        self._names_at = 0
        self._new_ids = _NewIds()
        self._written: set[int] = set()
        """Handles of open files that the journal has writes of."""
        self._places: list[previous_boot.ArrayPlace] = []
        self._counts: Counts = {}
        self._timer: threading.Timer | None = None
        self._base_size = 0
        self._failure = ""
        """Why nothing is kept now."""
        self._again_at = 0.0
        """When it may be tried to keep all again."""
        self._found = "nothing"
        self._troubles: list[str] = []
        """What was wrong with what an earlier daemon has left."""

    def text(self) -> Iterator[str]:
        """What machine/state shows."""
        yield f"directory {escape_for_terminal(str(self._directory.path))}\n"
        yield f"{UNKEPT}: {self._failure}\n" if self._failure else "kept yes\n"
        yield f"last {self._found}\n"
        yield from (f"{TROUBLE}{trouble}\n" for trouble in self._troubles)

    # What the daemon before has left

    def restore(self, kernel: Kernel, tree: NodeTree) -> bool:
        """Let a new kernel have what a state says; `tree` has all of its files. Whether there was one.

        Raises: DamagedState, whatever a state that makes no sense leads to (with the kernel half done).
        """
        if not self._directory.attempts.begin():
            raise DamagedState("the daemon ended each time that it was brought back")
        try:
            text = journal.read(self._directory.journal)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise DamagedState(f"{error.strerror}") from error
        if not text.entries:
            raise DamagedState("no journal of kprobefs")
        head = text.entries[0]
        if head.get("kprobefs state") != VERSION:
            raise DamagedState(f"of version {head.get('kprobefs state')!r}; this program reads {VERSION}")
        if text.lost:
            lost = f"the journal's last {text.lost} bytes make no sense"
            try:
                self._directory.copy_aside(self._directory.journal)
                self._trouble(f"{lost}: aside.journal has all of it")
            except OSError as error:
                self._trouble(f"{lost}, and aside.journal can't be made: {error.strerror}")
        is_same = head["kernel"] == fingerprint(kernel)
        events = kernel.tracing.system.events
        replay = Replay(tree, Client(os.getpid(), tree.owner.uid, tree.owner.gid))
        with events.keeping(_ids(text.entries)) if is_same else nullcontext():
            for told in replay.run(text.entries):
                self._trouble(told)
        known: Counts = {}
        for entry in text.entries:
            known |= entry.get("counts", {})
        set_counts(kernel, known)
        self._counts = known
        self._find_records(kernel, text.entries, is_same=is_same)
        return True

    def _find_records(self, kernel: Kernel, entries: list[Entry], *, is_same: bool) -> None:
        head = entries[0]
        path = self._directory.path / entries[0]["records"]
        if path not in self._directory.records():
            self._trouble(f"{path.name}: the records are gone")
            return
        if not is_same:
            self._set_aside(f"{path.name}: records of another kernel, {head['kernel']}", path)
            return
        places: list[previous_boot.ArrayPlace] = []
        for entry in entries:
            if "arrays" in entry:
                places = [previous_boot.ArrayPlace(**each) for each in entry["arrays"]]
        try:
            with open_regular(path, os.O_NOFOLLOW) as file:
                found, cmdlines = previous_boot.read_records(file, kernel, places, head["names"])
        except (OSError, ValueError) as error:
            self._set_aside(f"{path.name}: {getattr(error, 'strerror', None) or error}", path)
            return
        refused = previous_boot.show(kernel, found, cmdlines)
        why = [*found.damage, *(f"instances/{name}: {reason}" for name, reason in refused.items())]
        if why:
            self._set_aside(f"{path.name}: {', '.join(why)}", path)
        self._found = f"{len(found)} records, {found.torn} torn"

    def refuse(self, reason: Exception) -> None:
        """What is there can't be used: begin anew."""
        self._set_aside(str(reason), self._directory.journal, *self._directory.records())

    def _set_aside(self, why: str, *paths: Path) -> None:
        names = self._directory.set_aside(*paths)
        left = [path.name for path in paths if os.path.lexists(path)]
        aside = f": set aside as {', '.join(names)}" if names else ""
        self._trouble(why + aside + (f"; can't be set aside: {', '.join(left)}" if left else ""))

    def _trouble(self, message: str) -> None:
        """Whoever mounts is told too."""
        self._troubles.append(escape_for_terminal(" ".join(message.split())))
        self._complain(message)

    def _complain(self, message: str) -> None:
        log.warning(
            "state in %s: %s", escape_for_terminal(str(self._directory.path)), escape_for_terminal(message)
        )

    # What this one leaves

    def keep(
        self,
        kernel: Kernel,
        mount: GuestMount,
        definitions: Callable[[], list[str]],
        *,
        is_fresh: bool = False,
    ) -> None:
        """From now on, what this kernel records and what the mount's clients define is kept.

        `definitions` tells all that is defined and switched on: nothing yet if `is_fresh`. Where that can't
        be, nothing is kept until the next call; what an earlier one has left stays.
        """
        self._kernel = kernel
        self._mount = mount
        self._definitions = definitions
        self._directory.attempts.end()
        try:
            previous_boot.show_empty(kernel)
        except KernelError as error:
            self._complain(f"instances/{previous_boot.LAST}: {error.strerror}")
        self._new_ids = _NewIds()
        kernel.tracing.system.events.watch(self._new_ids)
        kernel.guest.runner.events.watch(self)
        mount.watch(self)
        former = self._directory.records()
        try:
            file = self._directory.new_records()
        except OSError as error:
            self._keep_nothing(error)
            return
        try:
            self._move(file)
            self._write_anew(() if is_fresh else definitions())
        except (OSError, HardwareError) as error:
            self._keep_nothing(error)
            with suppress(OSError):
                os.unlink(file.name)
            # A disk that is full must not keep buffers from growing.
            with suppress(OSError):
                kernel.machine.records.keep_in(os.fdopen(os.memfd_create("kprobefs-records"), "r+b"))
            return
        for path in former:
            with suppress(OSError):
                path.unlink()

    def _move(self, file: BinaryIO) -> None:
        records = self._kernel.machine.records
        cmdlines = self._kernel.tracing.system.cmdlines
        records.keep_in(file)
        self._records = Path(file.name).name
        self._names_at = records.alloc_pages(KEPT_SIZE)
        cmdlines.keep_in(records.view(self._names_at, KEPT_SIZE))

    def _write_anew(self, lines: Iterable[str]) -> None:
        """A journal that says what is so now. Raises: OSError (with the one before as it is)."""
        new = Journal(self._directory.journal, self._entries(lines))
        if self._journal is not None:
            self._journal.close()
        self._journal = new
        self._base_size = new.size
        self._failure = ""

    def _entries(self, lines: Iterable[str]) -> Iterator[Entry]:
        ids = self._kernel.tracing.system.events.ids()
        self._new_ids.take()
        yield {
            "kprobefs state": VERSION,
            "program": __version__,
            "kernel": fingerprint(self._kernel),
            "records": self._records,
            "names": self._names_at,
            "next id": ids.next_id,
            "ids": {str(number): list(name) for number, name in ids.names.items()},
        }
        with suppress(KernelError):
            yield {"modules": [file.name for file in self._kernel.modules.files()]}
        yield {"lines": [line.rstrip("\n") for line in lines if not _OF_LAST.match(line)]}
        self._places = previous_boot.array_places(self._kernel)
        yield {"arrays": [asdict(place) for place in self._places]}
        self._counts = counts(self._kernel)
        yield {"counts": self._counts}

    def _append(self, entry: Entry) -> None:
        """Write down a change that was made, and what came of it."""
        if self._journal is None:
            return
        if ids := self._new_ids.take():
            entry["ids"] = ids
        if (places := previous_boot.array_places(self._kernel)) != self._places:
            self._places = places
            entry["arrays"] = [asdict(place) for place in places]
        is_due = self._failure or self._journal.size > max(COMPACT_SIZE, 2 * self._base_size)
        if self._failure and monotonic() < self._again_at:
            return
        # Definitions don't tell of a line that an open file has a part of.
        is_between_parts = is_due and self._mount.is_between_parts()
        try:
            if is_due and not is_between_parts:
                self._write_anew(self._definitions())
            elif not self._failure:
                self._journal.append(entry)
        except OSError as error:
            self._fail(error)

    def _keep_nothing(self, error: Exception) -> None:
        """Leave the journal as it is: the records that it names aren't those of this kernel."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        reason = str(getattr(error, "strerror", None) or error)
        self._again_at = monotonic() + RETRY_PAUSE
        if reason != self._failure:
            self._failure = reason
            self._complain(f"{reason}: what changes from now on isn't kept")

    # Changes

    def truncated(self, path: str) -> None:
        """See ChangeWatcher."""
        if name := self._kept_file(path):
            self._append({"truncate": name})

    def written(self, handle: int, path: str, data: bytes, *, failed: bool, is_part: bool) -> None:
        """See ChangeWatcher."""
        if name := self._kept_file(path):
            self._written.add(handle)
            entry = {"write": name, "handle": handle, "data": data.decode("latin-1"), "failed": failed}
            self._append({**entry, "part": True} if is_part else entry)
        self.call_ended()

    def released(self, handle: int) -> None:
        """See ChangeWatcher."""
        if handle in self._written:
            self._written.remove(handle)
            self._append({"release": handle})

    def made(self, path: str) -> None:
        """See ChangeWatcher."""
        if name := self._kept(path):
            self._append({"mkdir": name})

    def removed(self, path: str) -> None:
        """See ChangeWatcher."""
        if name := self._kept(path):
            self._append({"rmdir": name})

    def closed(self) -> None:
        """See ChangeWatcher."""
        if self._timer is not None:
            self._timer.cancel()
        self._save_counts()

    def _kept(self, path: str) -> str:
        """A path as a mount that has everything names it; "" where what happens there isn't kept."""
        name = f"{self._root}{path[1:]}".removeprefix(f"{self._root}{CONTROL}/")
        return name if _KEPT.match(name) and not _UNKEPT.match(name) else ""

    def _kept_file(self, path: str) -> str:
        name = self._kept(path)
        return "" if _UNKEPT_FILE.match(name) else name

    def call_ended(self) -> None:
        """Hits may have been counted."""
        if self._timer is None and self._journal is not None:
            self._timer = threading.Timer(COUNTS_AGE, self._save_later)
            self._timer.daemon = True
            self._timer.start()

    def _save_later(self) -> None:
        with self._kernel.lock:
            self._timer = None
            self._save_counts()

    def _save_counts(self) -> None:
        now = counts(self._kernel)
        changed = {name: found for name, found in now.items() if self._counts.get(name) != found}
        self._counts = now
        if changed:
            self._append({"counts": changed})


def fingerprint(kernel: Kernel) -> str:
    """What two kernels have to agree in for one to read the other's records."""
    config = kernel.config
    profile = kernel.kprobes.profile.name
    return f"{config.arch} {config.cpus} {profile} {__version__} {kernel.image.checksum:08x}"


def _ids(entries: list[Entry]) -> EventIds:
    names: dict[int, tuple[str, str]] = {}
    for entry in entries:
        for number, (group, name) in entry.get("ids", {}).items():
            names[int(number)] = (group, name)
    return EventIds(max([int(entries[0]["next id"]), *(number + 1 for number in names)]), names)
