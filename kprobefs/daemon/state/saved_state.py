"""SavedState: saves trace records and a journal of all definitions in the directory of --state.

The directory contains `journal`, and the file `records.N` that the journal names. `aside.*` are the latest
files that could not be used.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import BinaryIO

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.machine.task_events import TaskObserver
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.registry import EventIds, EventWatcher
from emulated_kernel.trace.text.cmdlines import SAVED_CMDLINES_SIZE
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import asdict
from emulated_kernel.util.safe_read import open_regular
from emulated_kernel.vfs.core.changes import ChangeWatcher
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node_tree import CONTROL, NodeTree
from emulated_kernel.vfs.mount import Mount
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
"""Maximum seconds from a change of hit counts until the journal contains them."""
RETRY_PAUSE = 1.0
"""Minimum seconds from a failed attempt to write a new journal to the next attempt."""
COMPACT_SIZE = 256 << 10
"""Size in bytes above which a journal is replaced by a new one, written from the current definitions.

It is not replaced before it is more than twice as large as it was when it was new, unless writing fails.
"""
_UNSAVED_FILES = re.compile(
    r"tracing/(.*/)?(trace|trace_pipe|trace_pipe_raw|trace_marker|trace_marker_raw|error_log|free_buffer)$"
)
_UNSAVED_PATHS = re.compile(r"tracing/instances/last(\.[^/]*)?(/|$)")
_SAVED_PATHS = re.compile(
    r"tracing/|kprobe_events$|kprobes/(enabled|optimization|return_hook)$|sysctl/|machine/modules$"
    r"|kprobes/stats/.*/(enabled|optimized)$"
)
_OF_LAST = re.compile(r"instances/last(\.[^/]*)?/")


class DamagedState(Exception):
    """Raised if a saved state cannot be used; the message is the reason."""


class _NewIds(EventWatcher):
    """Collects the trace events that were added to the kernel since the last call of take()."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def event_added(self, event: TraceEvent) -> None:
        self.events.append(event)

    def event_removed(self, event: TraceEvent) -> None:
        del event

    def take(self) -> dict[str, list[str]]:
        """Return a map of the new events, and forget these events: id, as decimal text -> [group, name]."""
        events = self.events
        self.events = []
        return {str(event.id): [event.group, event.name] for event in events}


class SavedState(ChangeWatcher, TaskObserver):
    """The state that a daemon restores at its start and saves later.

    If the state is damaged, the daemon serves the mount without it. Callers of all methods except the
    constructor and settle() hold the control lock, or are the kernel's only users. A thread that makes a
    change appends the change to a queue under the lock. Then the thread releases the lock, writes the queue
    to the journal, and waits until its change is written.
    """

    def __init__(self, directory: StateDirectory, root: str) -> None:
        """Create an object that restores and saves the state in `directory`.

        `root`: prefix that turns a path of the mount into the path with `--layout full`. It is "tracing/" if
        the mount has `--layout tracefs`, else "".
        """
        self._directory = directory
        self._root = root
        self._journal: Journal | None = None
        self._kernel: Kernel
        self._mount: Mount
        self._definitions: Callable[[], list[str]]
        self._records = ""
        self._names_at = 0
        self._new_ids = _NewIds()
        self._written: set[int] = set()
        """Handles of open files whose writes are in the journal."""
        self._places: list[previous_boot.ArrayPlace] = []
        self._counts: Counts = {}
        self._timer: threading.Timer | None = None
        self._size = 0
        """Size in bytes that the journal will have when the whole queue is written."""
        self._base_size = 0
        self._queue: deque[Callable[[], None]] = deque()
        """Functions that write the queued changes to the journal, oldest change first. They raise OSError."""
        self._queued = 0
        """Number of changes that were appended to the queue so far."""
        self._settled = 0
        """Number of changes so far that were written, or that could not be written."""
        self._writing = threading.Lock()
        """Lock that a thread holds while it writes the queue.

        While a thread holds this lock, it does not take the control lock.
        """
        self._own = threading.local()
        self._failure = ""
        """Reason why changes are not saved at present, or "" if they are saved."""
        self._again_at = 0.0
        """Earliest monotonic time, in seconds, of the next attempt to save after a failure."""
        self._found = "nothing"
        self._troubles: list[str] = []
        """Messages about the parts of an earlier daemon's state that could not be restored."""

    def text(self) -> Iterator[str]:
        """Yield the lines of machine/state."""
        yield f"directory {escape_for_terminal(str(self._directory.path))}\n"
        yield f"{UNKEPT}: {self._failure}\n" if self._failure else "kept yes\n"
        yield f"last {self._found}\n"
        yield from (f"{TROUBLE}{trouble}\n" for trouble in self._troubles)

    # The earlier daemon's state

    def restore(self, kernel: Kernel, tree: NodeTree) -> bool:
        """Restore the state in a new kernel, and return True. Return False if there is no state.

        `tree`: all files of the kernel. Raises: DamagedState, or any exception that a damaged state causes.
        After an exception, the kernel has only a part of the state.
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
            lost = f"the journal's last {text.lost} bytes are damaged"
            try:
                self._directory.copy_aside(self._directory.journal)
                self._trouble(f"{lost}; aside.journal is a copy of the whole journal")
            except OSError as error:
                self._trouble(f"{lost}, and aside.journal could not be made: {error.strerror}")
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
            self._trouble(f"{path.name}: no such file of records")
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
        """Rename the files of the earlier state to `aside.*`, because the state cannot be used.

        `reason`: the exception that restoring the state raised.
        """
        self._set_aside(str(reason), self._directory.journal, *self._directory.records())

    def _set_aside(self, why: str, *paths: Path) -> None:
        names = self._directory.set_aside(*paths)
        left = [path.name for path in paths if os.path.lexists(path)]
        aside = f": set aside as {', '.join(names)}" if names else ""
        self._trouble(why + aside + (f"; can't be set aside: {', '.join(left)}" if left else ""))

    def _trouble(self, message: str) -> None:
        """Log a message about the earlier state, and add it to the lines of machine/state.

        The mount command prints these lines.
        """
        self._troubles.append(escape_for_terminal(" ".join(message.split())))
        self._complain(message)

    def _complain(self, message: str) -> None:
        log.warning(
            "state in %s: %s", escape_for_terminal(str(self._directory.path)), escape_for_terminal(message)
        )

    # This daemon's state

    def keep(
        self,
        kernel: Kernel,
        mount: Mount,
        definitions: Callable[[], list[str]],
        *,
        is_fresh: bool = False,
    ) -> None:
        """Save the kernel's records and the definitions of the mount's clients from now on.

        `definitions` returns the lines of all definitions and settings. `is_fresh`: there are no definitions
        yet, so the journal starts empty; False: it starts with those that `definitions` returns. If saving is
        impossible, nothing is saved until the next call, and the earlier state stays.
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
            self._rewrite(() if is_fresh else definitions())
        except (OSError, HardwareError) as error:
            self._keep_nothing(error)
            with suppress(OSError):
                os.unlink(file.name)
            # A full disk must not keep buffers from growing.
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
        self._names_at = records.alloc_pages(SAVED_CMDLINES_SIZE)
        cmdlines.keep_in(records.view(self._names_at, SAVED_CMDLINES_SIZE))

    def _rewrite(self, lines: Iterable[str]) -> None:
        """Write a new journal of the current definitions, whose lines are `lines`.

        Raises: OSError (it cannot be written; the old journal is then unchanged).
        """
        data = b"".join(map(journal.encoded, self._entries(lines)))
        with self._writing:
            # The new journal contains the queued changes.
            self._settled += len(self._queue)
            self._queue.clear()
            self._replace_journal(data)
            self._size = self._base_size = len(data)

    def _replace_journal(self, data: bytes) -> None:
        new = Journal(self._directory.journal, data)
        if self._journal is not None:
            self._journal.close()
        self._journal = new
        self._failure = ""

    def _append_to_journal(self, data: bytes) -> None:
        # A failure has lost earlier changes, so that only a new journal is of use.
        if self._journal is not None and not self._failure:
            self._journal.append(data)

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

    def _append(self, entry: Entry, *, is_awaited: bool = True) -> None:
        """Append the change `entry` to the queue, or a whole new journal if one is due (see COMPACT_SIZE).

        If the change has created events or buffers, the entry gets the events' ids or the locations of all
        buffers. `is_awaited`: the next settle() of this thread waits until the entry is written; False: it
        does not wait for this entry. If there is no journal, do nothing.
        """
        if self._journal is None:
            return
        if ids := self._new_ids.take():
            entry["ids"] = ids
        if (places := previous_boot.array_places(self._kernel)) != self._places:
            self._places = places
            entry["arrays"] = [asdict(place) for place in places]
        is_due = self._failure or self._size > max(COMPACT_SIZE, 2 * self._base_size)
        if self._failure and monotonic() < self._again_at:
            return
        # Hazard: if an open file has only a part of a line, the current definitions lack the line.
        is_between_parts = is_due and self._mount.is_between_parts()
        try:
            if is_due and not is_between_parts:
                data = b"".join(map(journal.encoded, self._entries(self._definitions())))
                self._size = self._base_size = len(data)
                self._enqueue(partial(self._replace_journal, data), is_awaited=is_awaited)
            elif not self._failure:
                data = journal.encoded(entry)
                self._size += len(data)
                self._enqueue(partial(self._append_to_journal, data), is_awaited=is_awaited)
        except OSError as error:
            self._fail(error)

    def _enqueue(self, write: Callable[[], None], *, is_awaited: bool) -> None:
        self._queue.append(write)
        self._queued += 1
        if is_awaited:
            self._own.last = self._queued

    def settle(self) -> None:
        """Write the queue to the journal, including all changes of this thread; see ChangeWatcher."""
        last = getattr(self._own, "last", 0)
        if last <= self._settled:
            return
        with self._kernel.lock.waiting(), self._writing:
            self._write_queue()
        self._write_if_nobody_does()

    def _write_if_nobody_does(self) -> None:
        """Write the rest of the queue, for which no request waits.

        Return at once if another thread writes the queue.
        """
        while self._queue and self._writing.acquire(blocking=False):
            try:
                self._write_queue()
            finally:
                self._writing.release()

    def _write_queue(self) -> None:
        while self._queue:
            write = self._queue.popleft()
            try:
                write()
            except OSError as error:
                self._fail(error)
            self._settled += 1

    def _keep_nothing(self, error: Exception) -> None:
        """Close the journal and save no further changes, because of `error`.

        The content of the journal's file stays unchanged, because it belongs to the records of an earlier
        kernel.
        """
        with self._writing:
            if self._journal is not None:
                self._journal.close()
                self._journal = None
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        reason = str(getattr(error, "strerror", None) or error)
        self._again_at = monotonic() + RETRY_PAUSE
        if reason != self._failure:
            self._failure = reason
            self._complain(f"{reason}: later changes are not kept")

    # Changes

    def truncated(self, path: str) -> None:
        """Save that the file at `path` was opened with O_TRUNC; see ChangeWatcher."""
        if name := self._saved_file(path):
            self._append({"truncate": name})

    def written(self, handle: int, path: str, data: bytes, *, failed: bool, is_part: bool) -> None:
        """Save the bytes `data` that a write(2) to the open file `handle` took; see ChangeWatcher.

        `failed`: whether the write has failed; it may have executed a part of `data`. `is_part`: whether the
        text after the last newline continues in the next write, so that it is no whole line.
        """
        if name := self._saved_file(path):
            self._written.add(handle)
            entry = {"write": name, "handle": handle, "data": data.decode("latin-1"), "failed": failed}
            self._append({**entry, "part": True} if is_part else entry)
        self.call_ended()

    def released(self, handle: int) -> None:
        """Save that the open file `handle` was closed, if its writes are saved; see ChangeWatcher."""
        if handle in self._written:
            self._written.remove(handle)
            # The end of the journal closes the files that are still open.
            self._append({"release": handle}, is_awaited=False)

    def made(self, path: str) -> None:
        """Save that the directory `path` was created; see ChangeWatcher."""
        if name := self._saved_path(path):
            self._append({"mkdir": name})

    def removed(self, path: str) -> None:
        """Save that the directory `path` was removed; see ChangeWatcher."""
        if name := self._saved_path(path):
            self._append({"rmdir": name})

    def closed(self) -> None:
        """Save the hit counts for the last time, because the mount ends; see ChangeWatcher."""
        if self._timer is not None:
            self._timer.cancel()
        self._save_counts()

    def _saved_path(self, path: str) -> str:
        """Return the path that `path` has in the full layout, or "" if changes of the file are not saved."""
        name = f"{self._root}{path[1:]}".removeprefix(f"{self._root}{CONTROL}/")
        return name if _SAVED_PATHS.match(name) and not _UNSAVED_PATHS.match(name) else ""

    def _saved_file(self, path: str) -> str:
        name = self._saved_path(path)
        return "" if _UNSAVED_FILES.match(name) else name

    def call_ended(self) -> None:
        """Save the hit counts within COUNTS_AGE seconds, because a call has ended.

        The call is a system call of a guest task; see TaskObserver.
        """
        if self._timer is None and self._journal is not None:
            self._timer = threading.Timer(COUNTS_AGE, self._save_later)
            self._timer.daemon = True
            self._timer.start()

    def _save_later(self) -> None:
        # No request waits for entries such as "release", so they may still be in the queue.
        self._write_if_nobody_does()
        with self._kernel.lock:
            self._timer = None
            if self._queue:
                # The host's file system does not answer, so do not append to the queue now.
                self.call_ended()
            else:
                self._save_counts(is_awaited=False)
        self._write_if_nobody_does()

    def _save_counts(self, *, is_awaited: bool = True) -> None:
        now = counts(self._kernel)
        changed = {name: found for name, found in now.items() if self._counts.get(name) != found}
        self._counts = now
        if changed:
            self._append({"counts": changed}, is_awaited=is_awaited)


def fingerprint(kernel: Kernel) -> str:
    """Return a text with the architecture, CPUs, profile, program version and image checksum of `kernel`.

    A kernel for which this text differs cannot read the trace records of `kernel`.
    """
    config = kernel.config
    profile = kernel.kprobes.profile.name
    return f"{config.arch} {config.cpus} {profile} {__version__} {kernel.image.checksum:08x}"


def _ids(entries: list[Entry]) -> EventIds:
    names: dict[int, tuple[str, str]] = {}
    for entry in entries:
        for number, (group, name) in entry.get("ids", {}).items():
            names[int(number)] = (group, name)
    return EventIds(max([int(entries[0]["next id"]), *(number + 1 for number in names)]), names)
