"""SessionLoop: reads requests from /dev/fuse, and answers most of them without libfuse."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from time import sleep

from emulated_kernel.guests.common.proc import has_signal, is_dying
from emulated_kernel.util.fast_named_tuple import NamedTuple
from emulated_kernel.vfs.core.client import Stat
from kprobefs.fuse.known_nodes import KnownNodes, attr_bytes
from kprobefs.fuse.libfuse import INT_MAX, library, served
from kprobefs.fuse.own_paths import CHANGES
from kprobefs.fuse.protocol import (
    ATTR_OUT,
    FIRST_WORD,
    FOPEN_DIRECT_IO,
    FOPEN_NONSEEKABLE,
    FORGET_IN,
    FORGET_ONE,
    FORGET_ONE_OFFSET,
    FUSE_BATCH_FORGET,
    FUSE_FORGET,
    FUSE_GETATTR,
    FUSE_INIT,
    FUSE_INTERRUPT,
    FUSE_LOOKUP,
    FUSE_OPEN,
    FUSE_READ,
    FUSE_RELEASE,
    FUSE_RMDIR,
    FUSE_WRITE,
    GETATTR_IN,
    HANDLE_FLAGS,
    IN_HEADER,
    INTERRUPT_IN,
    MAX_ERRNO,
    OPCODE,
    OPCODE_OFFSET,
    OPEN_OUT,
    OUT_HEADER,
    READ_IN,
    RELEASE_IN,
    UNIQUE,
    WRITE_IN,
    WRITE_OUT,
)
from kprobefs.fuse.read_turns import LOOK, Reader, ReadTurns
from kprobefs.fuse.reply_channels import ReplyChannels
from kprobefs.fuse.worker_threads import FAILED

RELEASE_PAUSE = 0.0001
"""Seconds between two checks whether another thread has replied to its RELEASE request."""
RETRY_DELAY = 0.01
"""Seconds between two attempts to send a reply, if the first attempt failed for lack of memory."""
JOINED = 4096
"""Maximum size in bytes of a reply's data that is copied behind the header, into one buffer.

For larger data, a write of two buffers takes less time.
"""
_INTERRUPTED = (errno.EINTR, errno.EAGAIN, errno.ENOENT)
"""Errnos of a failed read of /dev/fuse after which the thread reads the next request."""
_NO_MEMORY = struct.pack("=Ii", OUT_HEADER.size, -errno.ENOMEM)
"""First bytes of a reply with the error ENOMEM, up to the field `unique`, which is not included."""
_DONE = b"done"
"""Result of a function that has already sent the reply to its request."""


class _LoopState:
    """The request to which a thread of a SessionLoop replies now. Other threads read this state."""

    def __init__(self, request: bytearray) -> None:
        self._request = request
        self._stat = f"/proc/self/task/{threading.get_native_id()}/stat"
        self.interrupted = 0
        """The field `unique` of the thread's last request that was interrupted; 0 if there is none.

        The INTERRUPT may come from a signal that only stops the client.
        """

    @property
    def _opcode(self) -> int:
        """Opcode of the request, or 0 if the thread has read no request since clear()."""
        opcode: int = OPCODE.unpack_from(self._request, OPCODE_OFFSET)[0]
        return opcode

    def clear(self) -> None:
        """Forget the request, because the thread has replied to it."""
        OPCODE.pack_into(self._request, OPCODE_OFFSET, 0)

    @property
    def unique(self) -> int:
        """The field `unique` of the request."""
        unique: int = IN_HEADER.unpack_from(self._request)[1]
        return unique

    @property
    def is_serving(self) -> bool:
        """Whether the thread answers a request."""
        return self._opcode != 0

    @property
    def is_interrupted(self) -> bool:
        """Whether the client of the request has a signal to handle, so that the request must end.

        False if no INTERRUPT has come for the request.
        """
        if not self.is_serving or self.interrupted != self.unique:
            return False
        *_, pid = IN_HEADER.unpack_from(self._request)
        return has_signal(pid)

    def is_writing(self, unique: int) -> bool:
        """Return True if the request is the WRITE with this field `unique`."""
        return self._opcode == FUSE_WRITE and self.unique == unique

    @property
    def handle(self) -> int:
        """The handle fh of the request, which must be a WRITE."""
        handle: int = WRITE_IN.unpack_from(self._request, IN_HEADER.size)[0]
        return handle

    def has_killed_client(self) -> bool:
        """Return True if the client's thread has been killed, so that it waits only for the reply."""
        *_, pid = IN_HEADER.unpack_from(self._request)
        return is_dying(pid)

    @property
    def is_releasing(self) -> bool:
        """Whether the request is a RELEASE."""
        return self._opcode == FUSE_RELEASE

    def may_be_releasing(self) -> bool:
        """Return True if the thread may be answering a RELEASE that left /dev/fuse's queue before this call.

        Hazard: the host's kernel takes a request out of the queue before it copies the request to the
        thread's buffer. So a thread whose buffer has no request may still have taken one, unless the thread
        sleeps.
        """
        if not self.is_serving and self._is_running():
            return True
        return self.is_releasing

    def _is_running(self) -> bool:
        try:
            with open(self._stat, "rb") as stat_file:
                return stat_file.read().rpartition(b")")[2].split()[:1] != [b"S"]
        # The thread has ended.
        except OSError:
            return False


class AtOnce(NamedTuple):
    """The operations of a mount that SessionLoop calls without libfuse.

    The functions raise nothing. If an operation fails, its function returns -errno.
    """

    read: Callable[[int, int, int, int, int, int, int, int], bytes | int | None]
    """Reads from an open file.

    The arguments are the client's uid, gid and pid, the handle fh, offset and size in bytes, the lock owner,
    and the flags of the request. Returns the data, or -errno if the read fails. If the read has to wait,
    returns None; then SessionLoop passes the request to libfuse, which waits.
    """
    release: Callable[[int], object]
    """Releases the open file with the handle fh."""
    getattr: Callable[[int, int, int, str], Stat | int]
    """Returns the attributes of a control file, given the client's uid, gid and pid, and the path."""
    fgetattr: Callable[[int, int, int, int], Stat | int]
    """Returns the attributes of an open file, given the client's uid, gid and pid, and the handle fh."""
    open: Callable[[int, int, int, str, int], tuple[int, bool] | int]
    """Opens a file, given the client's uid, gid and pid, path and flags.

    Returns (handle fh, whether the file is a stream, which cannot seek).
    """
    write: Callable[[int, int, int, int, int, int, memoryview], int | None]
    """Writes to an open file, given the client's uid, gid and pid, fh, offset in bytes, flags and data.

    Returns the number of bytes written, or None if libfuse has to write.
    """
    skip_client: Callable[[], None]
    """Records that the guest must not repeat this thread's next getattr as a client's system call."""
    validity: int
    """Nanoseconds for which the host's kernel may use the attributes in a reply."""


class SessionLoop:
    """The loop that reads requests from /dev/fuse. Several threads may run it; they read in turn.

    The loop itself answers READ, RELEASE, and WRITE of files whose writes read no host files. It also answers
    LOOKUP, GETATTR and OPEN of control files with known nodes, and OPEN of files in `OwnPaths`. It passes all
    other requests to libfuse.

    close(2) returns when its RELEASE is in the queue of /dev/fuse, and no program waits for the reply. So a
    later request could be answered before the close has had its effect. While the close of an open file would
    have an effect, a thread that has read a request waits until other threads have answered earlier RELEASEs.
    Before a request that removes or changes a name, a thread always waits for them.

    Replaces: fuse_session_loop().
    Needed for: ReplyChannels; replies when the host has no free memory, because a client that waits for one
    cannot even be killed (test_session_loop.py:test_who_asks_where_there_is_no_memory_is_answered); the
    effect of a close(2) (test_session_loop.py:test_a_request_after_a_close_sees_its_effect).
    The loop's READ saves a fifth of the time of a small pread(2). It saves a quarter of the time of one of
    128 KiB, whose data libfuse would copy again. The RELEASE saves 4 % of the time of an open, read and
    close.
    """

    def __init__(
        self,
        session: int,
        replies: ReplyChannels,
        operations: AtOnce,
        nodes: KnownNodes | None = None,
        acting: Collection[int] = (),
    ) -> None:
        """Make a loop over the struct fuse_session at the address `session`.

        `nodes`: the known nodes of control files. If `nodes` is None, libfuse replies to the requests about
        them. `acting`: the handle fh of each open file whose release has an effect that other files show. A
        handle stays in `acting` until the release has returned.
        """
        self._session = session
        self._replies = replies
        self._device = replies.device
        self._read = operations.read
        self._release = operations.release
        self._operations = operations
        self._nodes = nodes
        self._acting = acting
        self._turns = ReadTurns()
        self._states: dict[int, _LoopState] = {}
        """The loop's threads: threading.get_ident() -> state of the thread."""
        self._abandoned: dict[int, _LoopState] = {}
        """`unique` of a WRITE that was answered before its end -> state of the thread that executes it.

        The early answer was sent because the client was killed. The entry of a WRITE may remain for some time
        after the WRITE has ended.
        """
        self._postponed: dict[int, int] = {}
        """`unique` of a WRITE in `_abandoned` -> handle fh that is released at the end of the WRITE."""
        self._answers: dict[int, Callable[[KnownNodes, bytearray, int], bytes | int | None]] = {
            FUSE_LOOKUP: self._look_up,
            FUSE_GETATTR: self._get_attributes,
            FUSE_OPEN: self._open,
            FUSE_WRITE: self._write,
            FUSE_FORGET: self._forget,
            FUSE_BATCH_FORGET: self._forget_batch,
            FUSE_RMDIR: self._remove,
            FUSE_INIT: self._initialise,
            FUSE_INTERRUPT: self._interrupt,
        }
        """Opcode -> function that tries to reply to a request without libfuse.

        The arguments are the known nodes, the buffer that contains the request, and the request's size in
        bytes. The function returns the data of the reply, or -errno for a reply with an error. It returns
        _DONE if no reply is left to send, and None if libfuse has to reply.
        """

    def run(self) -> int:
        """Answer requests until the mount is gone; return 0.

        Return FAILED if the thread has no memory for its buffer, or cannot read requests.
        """
        try:
            buffer = bytearray(self._replies.request_size)
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            refusal = _NO_MEMORY, memoryview(buffer)[UNIQUE]
            state = _LoopState(buffer)
            self._states[threading.get_ident()] = state
        except MemoryError:
            return FAILED
        try:
            return self._answer(buffer, address, refusal, state)
        finally:
            self._turns.give_up()
            del self._states[threading.get_ident()]

    def give_up_turn(self) -> None:
        """Let another thread read requests, because the calling thread waits for long."""
        self._turns.give_up()

    def is_client_killed(self, thread: int) -> bool:
        """Return True if the client of the request that a thread of this loop answers has been killed.

        `thread` is the thread's threading.get_ident(); any thread may call this method. Also return True
        after the killed client got an early reply to its WRITE: the host may then have no process of the
        client any more.
        """
        state = self._states.get(thread)
        if state is None or not state.is_serving:
            return False
        return state.unique in self._abandoned or state.has_killed_client()

    def is_client_interrupted(self, thread: int) -> bool:
        """Return True if a thread of this loop answers a request whose client must handle a signal.

        `thread` is the thread's threading.get_ident(); any thread may call this method.
        """
        state = self._states.get(thread)
        return state is not None and state.is_interrupted

    def _answer(
        self, buffer: bytearray, address: int, refusal: tuple[bytes, memoryview], state: _LoopState
    ) -> int:
        reader = Reader()
        turns = self._turns
        while True:
            try:
                state.clear()
                reader.is_busy = False
                if turns.reader is not reader and not turns.is_shared:
                    turns.await_turn(reader)
                try:
                    size = os.readv(self._device, (buffer,))
                except OSError as error:
                    if error.errno in _INTERRUPTED:
                        continue
                    return 0 if error.errno == errno.ENODEV else FAILED
                reader.requests += 1
                if reader.requests % LOOK == 1:
                    turns.look_at_load()
                reader.is_busy = True
                if turns.is_parked:
                    turns.wake()
                if self._acting:
                    self._await_releases()
                if not self._process(buffer, address, size):
                    self._refuse(refusal)
                if self._postponed:
                    self._release_postponed(state)
            # ctypes raises ArgumentError if there is no memory for an argument.
            except (MemoryError, ctypes.ArgumentError):
                self._refuse(refusal)
                sleep(RETRY_DELAY)

    def _process(self, request: bytearray, address: int, size: int) -> bool:
        """Answer the request of `size` bytes in the buffer `request`, whose address is `address`.

        Return False if the reply may not have been sent for lack of memory, else True.
        """
        opcode, unique, node, uid, gid, pid = IN_HEADER.unpack_from(request)
        served.opcode = opcode
        found: bytes | int | None = None
        if opcode == FUSE_READ:
            found = self._read(uid, gid, pid, *READ_IN.unpack_from(request, IN_HEADER.size))
        elif opcode == FUSE_RELEASE:
            (handle,) = RELEASE_IN.unpack_from(request, IN_HEADER.size)
            if not self._abandoned or not self._postpones(handle):
                self._release(handle)
            found = b""
        elif self._nodes is not None and (answer := self._answers.get(opcode)) is not None:
            found = answer(self._nodes, request, size)
            if found is _DONE:
                return True
        # libfuse answers a read that has to wait, because libfuse notices an interrupt of the client.
        if found is None:
            channel = self._replies.select(opcode, node, request, size)
            if opcode in CHANGES:
                self._change_names(opcode, node, request, address, size, channel)
            else:
                library.fuse_session_process(self._session, address, size, channel)
            return channel == self._replies.channel
        error, data = (found, b"") if isinstance(found, int) else (0, found)
        head = OUT_HEADER.pack(OUT_HEADER.size + len(data), error, unique)
        try:
            if len(data) <= JOINED:
                os.write(self._device, head + data)
            else:
                os.writev(self._device, (head, data))
        # The client was interrupted, or the mount is gone.
        except OSError:
            if opcode == FUSE_OPEN and data:
                self._release(*OPEN_OUT.unpack(data)[:1])
        return True

    def _change_names(
        self, opcode: int, directory: int, request: bytearray, address: int, size: int, channel: int
    ) -> None:
        """Make libfuse execute a request that removes or changes a name in a directory.

        `directory`: node id of the directory. `channel`: channel through which libfuse replies. Other
        parameters: see _process().
        """
        # An open file may keep its directory from being removed.
        self._await_releases()
        # A RENAME has other fields before its names, and concerns all paths.
        name = bytes(request[IN_HEADER.size : size - 1])
        with self._replies.own_paths.changing(opcode, directory, name):
            library.fuse_session_process(self._session, address, size, channel)

    def _look_up(self, nodes: KnownNodes, request: bytearray, size: int) -> bytes | int | None:
        """Answer the LOOKUP of a known control file. Results: see `_answers`.

        If the name gets a validity, the file's attributes get no validity.
        """
        _, unique, directory, uid, gid, pid = IN_HEADER.unpack_from(request)
        name = bytes(memoryview(request)[IN_HEADER.size : size - 1])
        node = nodes.by_name.get((directory, name))
        if node is None or self._replies.is_lasting(node.id):
            return None
        ends = nodes.ends
        found = self._operations.getattr(uid, gid, pid, node.path)
        if isinstance(found, int):
            return found
        if nodes.answer(unique, directory, name, node, ends, attr_bytes(found), self._operations.validity):
            return _DONE
        # The client's call is repeated in the guest already.
        self._operations.skip_client()
        return None

    def _get_attributes(self, nodes: KnownNodes, request: bytearray, _size: int) -> bytes | int | None:
        """Return the reply to the GETATTR of a known control file. Other results: see `_answers`."""
        _, _, number, uid, gid, pid = IN_HEADER.unpack_from(request)
        node = nodes.by_id.get(number)
        if node is None or self._replies.is_lasting(number):
            return None
        flags, handle = GETATTR_IN.unpack_from(request, IN_HEADER.size)
        if flags & HANDLE_FLAGS[FUSE_GETATTR]:
            found = self._operations.fgetattr(uid, gid, pid, handle)
        else:
            found = self._operations.getattr(uid, gid, pid, node.path or "/")
        if isinstance(found, int):
            return found
        validity = 0 if nodes.lets_names_last else self._operations.validity
        return ATTR_OUT.pack(0, validity) + attr_bytes(found)

    def _open(self, nodes: KnownNodes, request: bytearray, _size: int) -> bytes | int | None:
        """Open a known control file or a file with a path in OwnPaths, and return the reply.

        Other results: see `_answers`. An open(2) that truncates can take long, so libfuse answers it.
        """
        _, _, number, uid, gid, pid = IN_HEADER.unpack_from(request)
        (flags,) = FIRST_WORD.unpack_from(request, IN_HEADER.size)
        if flags & os.O_TRUNC:
            return None
        node = nodes.by_id.get(number)
        if node is not None:
            found = self._operations.open(uid, gid, pid, node.path, flags)
        else:
            own = self._replies.own_paths
            opened = own.begin_open(number)
            if opened is None:
                return None
            try:
                found = self._operations.open(uid, gid, pid, opened[1], flags)
            finally:
                own.end_open(opened[0])
        if isinstance(found, int):
            return found
        handle, is_stream = found
        return OPEN_OUT.pack(handle, FOPEN_DIRECT_IO | is_stream * FOPEN_NONSEEKABLE)

    def _write(self, _nodes: KnownNodes, request: bytearray, size: int) -> bytes | int | None:
        """Execute a WRITE to a file whose writes read no host files, and return the reply.

        Other results: see `_answers`.
        """
        _, _, _, uid, gid, pid = IN_HEADER.unpack_from(request)
        handle, offset, _, flags = WRITE_IN.unpack_from(request, IN_HEADER.size)
        with memoryview(request)[IN_HEADER.size + WRITE_IN.size : size] as data:
            count = self._operations.write(uid, gid, pid, handle, offset, flags, data)
        if count is None or -MAX_ERRNO <= count < 0:
            return count
        # A damaged guest may return any number.
        return WRITE_OUT.pack(count) if 0 <= count <= INT_MAX else -errno.EIO

    def _interrupt(self, _nodes: KnownNodes, request: bytearray, _size: int) -> None:
        """Record that a client got a signal. If the client was killed, reply EINTR to its WRITE. Return None.

        The write may take long in a slow guest, and the killed client could not end before the reply. No
        program sees the reply. libfuse also handles the interrupt, so that a WRITE that waits ends.
        """
        (unique,) = INTERRUPT_IN.unpack_from(request, IN_HEADER.size)
        for state in self._states.copy().values():
            if state.is_serving and state.unique == unique:
                state.interrupted = unique
            if state.is_writing(unique) and state.has_killed_client():
                self._abandoned[unique] = state
                # If the write fails, the request was answered meanwhile.
                with suppress(OSError):
                    os.write(self._device, OUT_HEADER.pack(OUT_HEADER.size, -errno.EINTR, unique))

    def _postpones(self, handle: int) -> bool:
        """Let the thread that executes an abandoned WRITE to `handle` release the handle; return True.

        Return False if there is no such thread. Abandoned WRITEs: see `_abandoned`.
        """
        for unique, state in self._abandoned.copy().items():
            if state.is_writing(unique) and state.handle == handle:
                self._postponed[unique] = handle
                # Order matters: if the WRITE has just ended, only one of the threads gets the entry.
                return state.is_writing(unique) or self._postponed.pop(unique, None) is None
            if not state.is_writing(unique):
                self._abandoned.pop(unique, None)
        return False

    def _release_postponed(self, state: _LoopState) -> None:
        """Release the handle of the WRITE that the calling thread executed, if the release was postponed.

        `state`: the thread's state, which is cleared.
        """
        unique = state.unique
        state.clear()
        handle = self._postponed.pop(unique, None)
        if handle is not None and not self._postpones(handle):
            self._release(handle)

    @staticmethod
    def _forget(nodes: KnownNodes, request: bytearray, _size: int) -> bytes | int | None:
        """Pass a FORGET to `nodes`; reduce its count to the number of LOOKUPs that libfuse has answered.

        Return _DONE if the count is then 0; otherwise None, after which libfuse handles the request.
        """
        (count,) = FORGET_IN.unpack_from(request, IN_HEADER.size)
        _, _, number, *_ = IN_HEADER.unpack_from(request)
        count = nodes.forget(number, count)
        FORGET_IN.pack_into(request, IN_HEADER.size, count)
        return None if count else _DONE

    @staticmethod
    def _forget_batch(nodes: KnownNodes, request: bytearray, size: int) -> None:
        """Pass a BATCH_FORGET to `nodes`; reduce each count to the LOOKUPs that libfuse has answered."""
        for at in range(FORGET_ONE_OFFSET, size, FORGET_ONE.size):
            number, count = FORGET_ONE.unpack_from(request, at)
            FORGET_ONE.pack_into(request, at, number, nodes.forget(number, count))

    @staticmethod
    def _remove(nodes: KnownNodes, request: bytearray, size: int) -> None:
        """Drop the known nodes of a directory and of its descendants, before libfuse executes an rmdir(2)."""
        _, _, directory, *_ = IN_HEADER.unpack_from(request)
        nodes.remove(directory, bytes(request[IN_HEADER.size : size - 1]))

    @staticmethod
    def _initialise(nodes: KnownNodes, request: bytearray, _size: int) -> None:
        """Record in `nodes` whether the host's kernel can expire names, as the INIT request says."""
        nodes.initialise(request)

    def _await_releases(self) -> None:
        """Wait until other threads have answered the RELEASEs that they read before this call.

        If the calling thread's own request is a RELEASE, do not wait.
        """
        own = self._states.get(threading.get_ident())
        if own is not None and own.is_releasing:
            return
        for state in self._states.copy().values():
            while state is not own and state.may_be_releasing():
                sleep(RELEASE_PAUSE)

    def _refuse(self, refusal: tuple[bytes, memoryview]) -> None:
        """Reply ENOMEM to the calling thread's latest request, unless a reply was sent already.

        `refusal`: (_NO_MEMORY, field `unique` of the request), which form this reply. Without a reply, the
        client could not even be killed.
        """
        while True:
            try:
                os.writev(self._device, refusal)
            except MemoryError:
                sleep(RETRY_DELAY)
                continue
            # The write fails if the request was answered already.
            except OSError:
                pass
            return
