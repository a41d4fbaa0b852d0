"""LinuxControlCalls: repeats clients' calls on control files in a distribution's kernel.

The host creates directories and files in the guest's root, and replaces their operations by code stubs. A
lookup in one of these directories follows kprobefs's tree, and finds one of the host's directories or files.
Operations on a file return to the host in the middle of the guest's call.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from errno import EINTR, EIO
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

from emulated_kernel.guests.linux.guest.syscalls import AT_REMOVEDIR
from emulated_kernel.guests.linux.guest.tasks import Blocked, LinuxTask, Service
from emulated_kernel.guests.linux.guest_abi import ARM64, RISCV64, GuestAbi
from emulated_kernel.guests.linux.initramfs import TRACEFS
from emulated_kernel.guests.linux.mounts.control_stubs import ControlStubs
from emulated_kernel.guests.linux.mounts.linux_guest import LinuxGuest
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.machine.memory.guest_reader import GuestReader
from emulated_kernel.machine.traps.trap import GuestFault, HardwareError, MemoryFault
from emulated_kernel.util.code_listing import machine_code
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.control_fs import ControlDirectory, ControlFile, GuestCalls, PendingWrite
from emulated_kernel.vfs.core.chunked_write import RunOnce
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Directory

log = logging.getLogger("kprobefs.linux")
READ_SIZE = 128 << 10
"""Maximum number of bytes of one read(2). The host's kernel never requests more."""
_SYMBOLS = (
    "d_instantiate", "noop_llseek", "schedule", "simple_lookup", "stream_open",
)  # fmt: skip
_MEMBERS = (
    "inode.i_op", "inode.i_fop", "inode.i_count", "inode.i_flags",
    "inode_operations.lookup", "inode_operations.mkdir", "inode_operations.rmdir",
    "file_operations.open", "file_operations.read", "file_operations.write", "file_operations.llseek",
    "file.f_mode", "dentry.d_parent", "dentry.d_name", "qstr.hash_len", "qstr.name",
)  # fmt: skip
STUBS = """
    53                              | push rbx
    48 89 f3                        | mov rbx, rsi
    e8 rel32:simple_lookup          | call simple_lookup
    cc                              | int3
    e8 rel32:d_instantiate          | call d_instantiate
    31 c0                           | xor eax, eax
    5b                              | pop rbx
    c3                              | ret
    org:20
    cc                              | int3
    e9 rel32:stream_open            | jmp stream_open
    org:30
    cc                              | int3
    org:40
    52                              | push rdx
    e8 rel32:_copy_to_user          | call _copy_to_user
    59                              | pop rcx
    48 29 c1                        | sub rcx, rax
    48 89 c8                        | mov rax, rcx
    c3                              | ret
    org:50
    cc                              | int3
    org:60
    e8 rel32:schedule               | call schedule
    cc                              | int3
    c3                              | ret
    org:70
    56                              | push rsi
    e8 rel32:stream_open            | call stream_open
    5e                              | pop rsi
    0f ba b6 imm32:f_mode 15        | btr dword ptr [rsi + f_mode], 21
    c3                              | ret
    org:80
"""
"""Code stubs for the operations of the host's directories and files, at the offsets in X86_STUBS.

`lookup` is at 0. The stubs of `open`, `read` and `write` trap to the host, which decides where the call
continues. The open of a file with a position continues at 0x70. The code there calls stream_open, so that the
kernel takes no lock for the position. Then the code clears FMODE_STREAM (bit 21) again.
"""
X86_STUBS = ControlStubs(
    made=partial(machine_code, STUBS),
    size=0x80,
    looked_up=0x09,
    instantiate=0x0A,
    lookup_ends=0x11,
    operations={"open": 0x20, "read": 0x30, "write": 0x50},
    traps=(0x20, 0x30, 0x50),
    is_stream=0x21,
    opened=0x70,
    copy=0x40,
    sleep=0x60,
    woken=0x65,
    returns=0x66,
)
_STREAMS = ("trace_marker", "trace_marker_raw")
"""Names of control files without a position. Mirrors: kernel/trace/trace.c:tracing_mark_open (v6.1)."""
_LONGEST_PATH = 16 << 10
"""Maximum number of bytes that are read for a path: names and members of dentries."""
_DEEPEST = 64
"""Maximum number of parent directories of a dentry. A longer chain must be a loop in corrupt memory."""
_TOPS = {
    TRACEFS: True,
    "/kprobes": True,
    "/machine": True,
    "/sysctl": True,
    "/kprobe_events": False,
    "/kprobe_profile": False,
}
"""Path in the guest -> True for a directory of control files, False for a control file.

The host creates these directories and files in the guest's root.
"""
_EVEN = "/control"
"""Directory in the guest's root. All directories of control files at an even depth share its inode.

The directories in _TOPS are at depth 1. vfs_rmdir() locks a directory and its parent, so the two need
different inodes.
"""
_S_DEAD = 16
"""Flag of the inode of a removed directory. Mirrors: include/linux/fs.h:S_DEAD (v6.1)."""
_MASK = (1 << 64) - 1


def _stubs(abi: GuestAbi) -> ControlStubs:
    """Return the stubs of control files for a processor.

    The module of a processor is imported only for a kernel of that processor.
    """
    if abi is ARM64:
        from emulated_kernel.guests.linux.mounts.arm64_control_stubs import ARM64_STUBS

        return ARM64_STUBS
    if abi is RISCV64:
        from emulated_kernel.guests.linux.mounts.riscv_control_stubs import RISCV_STUBS

        return RISCV_STUBS
    return X86_STUBS


class LinuxControlCalls(GuestCalls):
    """Makes calls of clients on control files in a distribution's kernel; implements GuestCalls.

    The guest makes a client's call only while text of the guest is patched. Otherwise no probe can see the
    call. The host serves the request even if the guest's call fails. During the request, the client's task is
    the guest's current task.
    """

    sees_lookups = False

    def __init__(
        self,
        guest: LinuxGuest,
        engine: LinuxEngine,
        *,
        is_tracefs: bool,
        is_refused: bool = False,
    ) -> None:
        """Prepare the repetition of clients' calls in the guest.

        `is_tracefs`: the root of the control files is the guest's mount point of tracefs; if False, it is the
        guest's root. `is_refused`: the guest makes no calls on control files; if False, it makes them while
        probes could notice them.
        """
        self.guest = guest
        self._tasks = guest.tasks
        self.engine = engine
        self._machine = engine.machine
        self._memory = engine.machine.memory
        self._kernel = engine.kernel
        self._calls = engine.replaced_calls
        self._stubs = _stubs(guest.tasks.machine.abi)
        self._syscalls = guest.syscalls
        self._root = TRACEFS if is_tracefs else ""
        self._file = 0
        """Address of the inode that dentries of control files get; 0 before _prepare()."""
        self._directories = [0, 0]
        """Addresses of the inodes of directories at an even and at an odd depth; 0 before _prepare()."""
        self._is_ready = False
        self._is_refused = is_refused
        self._asleep: WeakKeyDictionary[LinuxTask, ControlFile] = WeakKeyDictionary()
        """Task that waits in a call on a control file -> the file."""
        self._arguments: dict[int, tuple[int, int, int]] = {}
        """Address of a task_struct -> arguments 1, 2 and 4 of the file operation in which the task waits.

        For an open, the first two are the inode and the struct file. For a read or write, the second is the
        task's buffer, and the fourth is the address of the file position.
        """

    @property
    def is_dead(self) -> bool:
        """Whether the guest can't run any more; see GuestCalls."""
        return self.guest.is_dead

    @property
    def is_watched(self) -> bool:
        """Whether a probe could notice a system call of the guest. False if the guest is dead."""
        return bool(self._machine.text.ledger.words) and not self._tasks.machine.death

    def follow_processes(self) -> None:
        """Repeat in the guest the forks and exits of clients' processes; see GuestCalls."""
        self.guest.follow_processes()

    def informed(self, client: Client, opened: str | None = None) -> Client:
        """Return the client with the facts about its process that a request needs; see GuestCalls."""
        del opened
        return self.guest.clients.informed(client)

    @contextmanager
    def request(self, client: Client) -> Iterator[LinuxTask | None]:
        """Return the context manager in whose `with` block a client's request runs; see GuestCalls.

        The manager yields the client's task, which is then the guest's current task. It yields None if the
        guest is dead or cannot run the task.
        """
        guest = self.guest
        if guest.is_closed:
            guest.check_open()
        # Hazard: begins() may let the guest run and change the current task.
        if guest.begins is not None:
            guest.begins()
        task = None
        try:
            if not self._tasks.machine.death:
                with suppress(KernelError, GuestFault, MemoryFault):
                    if self.is_watched:
                        guest.closes.flush()
                    guest.control_closes.flush()
                    task = guest.clients.task_of(client)
                    self._tasks.schedule_in(task)
            yield task
        finally:
            for notify in guest.ended:
                notify()
            guest.see_free_pages()

    # Requests on control files

    def open(self, client: Client, file: ControlFile) -> None:
        """Open a control file on the host and, if probes could notice it, in the guest; see GuestCalls."""
        tree = self.fs.tree
        with self.request(client) as task:
            once = RunOnce(lambda: tree.open(file.path, file.flags, client))
            file.task = task
            if task is not None and self._can_call(task):
                service = self._service(task, once, partial(self._goes_on, file))
                file.fd = self._called(partial(self._opened, task, file, file.flags, service))
            file.inner = once.finish()

    def _opened(self, task: LinuxTask, file: ControlFile, flags: int, service: Service) -> int:
        flags &= ~(os.O_CREAT | os.O_EXCL)
        return self._syscalls.open(task, self._root + file.path, flags, service=service)

    def open_unseen(self, files: Collection[ControlFile]) -> None:
        """Open `files` in the guest by calls of init, before probes can notice the guest's calls.

        The guest's current task stays the same. See GuestCalls.
        """
        # A callback of the running guest arms the probes of a new module: open files can't be opened then.
        if self._tasks.machine.death or self._tasks.machine.is_running:
            return
        standing = self._tasks.current
        init = self._tasks.init
        with suppress(KernelError, GuestFault, MemoryFault, Blocked):
            self._prepare()
            for file in files:
                if file.fd is None and self._is_ready:
                    service = self._service(init, RunOnce(lambda: None), partial(self._goes_on, file))
                    file.fd = self._opened(init, file, file.flags & ~os.O_TRUNC, service)
            if standing is not None:
                self._tasks.schedule_in(standing)

    def opendir(self, client: Client, directory: ControlDirectory) -> None:
        """Open a directory in the guest, if probes could notice it; see GuestCalls."""
        if not self.is_watched:
            return
        with self.request(client) as task:
            if task is not None and self._can_call(task):
                path = self._root + directory.path or "/"
                flags = os.O_RDONLY | os.O_DIRECTORY
                directory.task = task
                directory.fd = self._called(partial(self._syscalls.open, task, path, flags))

    def listed(self, client: Client, directory: ControlDirectory) -> None:
        """Repeat the client's getdents64(2); see GuestCalls.

        Discard the result: the guest does not know all entries of the directory.
        """
        fd = directory.fd
        if fd is None:
            return
        with self.request(client) as task:
            if task is not None and self._can_call(task):
                directory.task = task
                self._called(partial(self._syscalls.getdents64, task, fd))

    def read(self, client: Client, file: ControlFile, size: int, offset: int) -> bytes:
        """Read from a control file, by a call of the client's task if probes could notice it; see GuestCalls.

        Read at most READ_SIZE bytes. Raises: WouldBlock (the task sleeps in its call).
        """
        with self.request(client) as task:
            size = min(size, READ_SIZE)
            once = RunOnce(lambda: file.inner.read_step(size, offset))

            def begin(sleeping: LinuxTask) -> int:
                return self._syscalls.begin_read(
                    sleeping, file.fd or 0, size, None, may_block=False,
                    service=self._service(sleeping, once, partial(self._transfers, file)),
                )  # fmt: skip

            self._transfer(task, file, once, begin)
            return once.finish()

    def write(self, write: PendingWrite) -> int:
        """Do the next step of a client's write; see GuestCalls.

        Each step is a request. After the last step, return the number of bytes written.
        Raises: WouldBlock, as read().
        """
        with self.request(write.client) as task:
            if write.plan is None:
                write.plan = RunOnce(write.by_piece)
            once = cast("RunOnce[int]", write.plan)

            def begin(sleeping: LinuxTask) -> int:
                service = self._service(sleeping, once, partial(self._transfers, write.file))
                return self._syscalls.write(sleeping, write.file.fd or 0, write.data, None, service)

            # A write that has read files of the host makes other calls by the client's task.
            if not write.is_prepared:
                self._transfer(task, write.file, once, begin)
            return once.finish()

    def _transfer(
        self,
        task: LinuxTask | None,
        file: ControlFile,
        once: RunOnce[Any],
        begin: Callable[[LinuxTask], int],
    ) -> None:
        file.task = task or file.task
        if task is not None and task.waits and self._asleep.get(task) is file:
            # The task still sleeps in this call: continue it.
            task.service = self._service(task, once, partial(self._transfers, file))
            begin = self._tasks.wait_for_result
        elif task is None or file.fd is None or not self._can_call(task):
            return
        self._asleep.pop(task, None)
        try:
            self._called(partial(begin, task))
        except WouldBlock:
            self._asleep[task] = file
            raise

    def change(
        self, client: Client, names: tuple[str, ...], path: str, act: Callable[[], None], *args: int
    ) -> None:
        """Create or remove a directory by `act`, in a call of the guest if probes could notice it.

        `act`: changes kprobefs's tree. `args`: arguments of mkdirat(2) after the path; if there are none, the
        client's task calls unlinkat(2). See GuestCalls.
        """
        del names
        place = self._root + path
        # Hazard: in the guest's root, the kernel's own operations would change the directories in _TOPS.
        is_below = os.path.dirname(place) != "/"
        name = "mkdirat" if args else "unlinkat"
        rest = args or (AT_REMOVEDIR,)
        once = RunOnce(act)
        with self.request(client) as task:
            if task is not None and is_below and self._can_call(task):
                service = self._service(task, once, self._succeeds)
                self._called(partial(self._syscalls.on_path, task, name, place, *rest, service=service))
                self._revive_directories()
            once.finish()

    def _succeeds(self, task: LinuxTask, _result: object) -> None:
        self._returns(task, 0)

    def _revive_directories(self) -> None:
        """Clear S_DEAD, which vfs_rmdir() sets, in the inodes of directories.

        Other directories share the inode of the removed directory.
        """
        for inode in self._directories:
            at = inode + self._offsets["inode.i_flags"]
            with suppress(MemoryFault):
                flags = int.from_bytes(self._memory.read(at, 4), "little")
                self._memory.write(at, (flags & ~_S_DEAD).to_bytes(4, "little"))

    def give_up(self, client: Client, file: ControlFile, error: int) -> None:
        """End the call in which the client's task waits for the file; see GuestCalls.

        The call fails with the errno `error`.
        """
        if not any(each is file for each in self._asleep.values()):
            return
        with self.request(client) as task:
            if task is not None and task.waits and self._asleep.get(task) is file:
                del self._asleep[task]
                task.service = lambda: partial(self._returns, task, -error)
                self._called(partial(self._tasks.wait_for_result, task))

    def release(self, file: ControlFile | ControlDirectory) -> None:
        """Close the guest's descriptor of the file; see GuestCalls.

        The last task that used the file closes the descriptor, before the next request.
        """
        self.guest.control_closes.defer(file)

    def close(self) -> None:
        """Release the guest's resources, because the mount ends; see GuestCalls."""
        self.guest.close()

    def _can_call(self, task: LinuxTask) -> bool:
        return self._is_ready and self.is_watched and task.alive and not task.pending

    def _called(self, call: Callable[[], int]) -> int | None:
        try:
            return call()
        except (KernelError, GuestFault, MemoryFault, Blocked):
            return None

    # The host's work in the middle of a guest's call

    def _service(
        self, task: LinuxTask, once: RunOnce[Any], answer: Callable[[LinuxTask, Any], None]
    ) -> Service:
        """Return the Service of a system call that `task` makes.

        The service calls `once`, which does the host's work. Then `answer`, which takes the task and the
        result of `once`, puts the result into the registers. If `once` raises an exception other than
        WouldBlock, the call returns a negative errno.
        """

        def serve() -> Callable[[], None]:
            try:
                return partial(answer, task, once())
            except WouldBlock:
                raise
            except KernelError as error:
                return partial(self._returns, task, -(error.errno or EIO))
            except Exception:
                # RunOnce keeps the exception, and raises it again in the request, which logs it. Only the
                # guest's call must end here.
                return partial(self._returns, task, -EIO)

        return serve

    def _goes_on(self, file: ControlFile, task: LinuxTask, _result: object) -> None:
        """Finish an open(2) of the guest: let the task continue in a stub that calls stream_open().

        For a file with a position, this stub then clears FMODE_STREAM again.
        """
        self._set_arguments(*self._arguments.pop(task.address)[:2])
        is_stream = file.path.rpartition("/")[2] in _STREAMS
        self._go_to(self._stubs.is_stream if is_stream else self._stubs.opened)

    def _set_arguments(self, *values: int) -> None:
        """Set the first arguments of the function that the guest calls next."""
        for name, value in zip(self._calls.argument_names, values, strict=False):
            self._machine.regs.set(name, value)

    def _go_to(self, place: int) -> None:
        """Make the task continue at the offset `place` in the code of the stubs."""
        self._machine.regs.ip = self._code + place

    def _transfers(self, file: ControlFile, task: LinuxTask, result: bytes | int) -> None:
        """End the guest's read or write with `result`: the data that were read, or the return value.

        If data were read, the kernel's _copy_to_user() copies them to the task's buffer, and the call returns
        their size. Also store the new file position in the guest.
        """
        at = self._arguments[task.address][2]
        if at and file.inner.node.has_position:
            with suppress(MemoryFault):
                self._memory.write_word(at, file.inner.position)
        if not isinstance(result, bytes) or not result:
            self._returns(task, result or 0)
            return
        _, to, _ = self._arguments.pop(task.address)
        self._memory.write(self._data, result)
        self._set_arguments(to, self._data, len(result))
        self._go_to(self._stubs.copy)

    def _returns(self, task: LinuxTask, result: int) -> None:
        self._arguments.pop(task.address, None)
        self._return(result)

    def _return(self, result: int) -> None:
        self._machine.regs.set(self._calls.result, result & _MASK)
        self._go_to(self._stubs.returns)

    # Handlers of the stubs' breakpoints

    def _arrives(self, regs: Any) -> None:
        if self._tasks.wait_in_call():
            first, second, _ = self._calls.arguments(regs)
            fourth = getattr(regs, self._calls.argument_names[3])
            self._arguments[self._tasks.running()] = first, second, fourth
        else:
            self._return(-EIO)

    def _wakes(self, _regs: Any) -> None:
        if not self._tasks.woken():
            self._arguments.pop(self._tasks.running(), None)
            self._return(-EINTR)

    def _looks_up(self, regs: Any) -> None:
        """Finish the guest's lookup of a control file or directory, when simple_lookup() has returned.

        If kprobefs's tree has the dentry's path, let the guest call d_instantiate() with a shared inode.
        Otherwise the lookup finds nothing. All files share one inode. All directories whose depth has the
        same parity share one.
        """
        self._go_to(self._stubs.lookup_ends)
        if regs.get(self._calls.result):
            return
        dentry = regs.get(self._tasks.machine.abi.kept[0])
        with suppress(KernelError, MemoryFault):
            path = self._path(dentry)
            node = self.fs.tree.lookup(path.removeprefix(self._root))
            inode = self._directories[path.count("/") % 2] if isinstance(node, Directory) else self._file
            count = inode + self._offsets["inode.i_count"]
            uses = int.from_bytes(self._memory.read(count, 4), "little")
            self._memory.write(count, (uses + 1 & 0xFFFFFFFF).to_bytes(4, "little"))
            self._set_arguments(dentry, inode)
            self._go_to(self._stubs.instantiate)

    def _path(self, dentry: int) -> str:
        """Return the path of the dentry at the address `dentry`, from the guest's root.

        Raises: MemoryFault (a dentry or a name cannot be read).
        """
        reader = GuestReader(self._memory, "path of a dentry", self._machine.damage, size=_LONGEST_PATH)
        word = reader.word
        offset = self._offsets
        names = list[bytes]()
        for _ in range(_DEEPEST):
            parent = word(dentry + offset["dentry.d_parent"])
            if parent == dentry:
                break
            name = dentry + offset["dentry.d_name"]
            size = word(name + offset["qstr.hash_len"]) >> 32
            names.append(reader.read(word(name + offset["qstr.name"]), size))
            dentry = parent
        return "/" + os.fsdecode(b"/".join(reversed(names)))

    # The host's directories and files in the guest

    def _prepare(self) -> None:
        """Create the host's directories and files once, by init's system calls.

        Raises: GuestFault (the guest has died).

        No probe sees these calls yet. If the creation fails, log a warning. Then the guest never makes
        calls on control files.
        """
        if self._is_ready or self._is_refused:
            return
        self._is_refused = True
        try:
            self._make()
        except (KernelError, Blocked, HardwareError, MemoryFault) as error:
            log.warning("calls on control files can't be seen by probes: %s", error)
            return
        self._is_ready = True
        self._is_refused = False

    def _make(self) -> None:
        """Create the stubs, directories and files.

        Raises: KernelError (a symbol or member is missing, or a call fails), Blocked (a call sleeps for too
        long), HardwareError (no memory is left), MemoryFault (guest memory is damaged), GuestFault (the guest
        dies).
        """
        kernel = self._kernel
        machine = self._machine
        names = (*_SYMBOLS, self._stubs.copy_to_user)
        symbols = {name: kernel.required(name) for name in names}
        self._offsets = {path: kernel.btf.offset(path) for path in _MEMBERS}
        stubs = self._stubs
        code = machine.text.alloc_text(stubs.size)
        self._code = code
        symbols["f_mode"] = self._offsets["file.f_mode"]
        machine.text.poke(code, stubs.made(code, symbols))
        handlers = {stubs.looked_up: self._looks_up, stubs.woken: self._wakes}
        for at, handler in (handlers | dict.fromkeys(stubs.traps, self._arrives)).items():
            machine.breakpoints[code + at] = handler
        self._tasks.sleep_in_call = code + stubs.sleep
        self._data = machine.alloc_pages(READ_SIZE)
        self._put_operations(symbols["noop_llseek"])

    def _put_operations(self, llseek: int) -> None:
        """Create the directories and files in the root, and point their operations to the stubs.

        Lookups below the root use the inodes of these directories and files again, under other names.
        `llseek`: address of the kernel's noop_llseek(), the files' operation for lseek(2).
        """
        memory = self._memory
        offset = self._offsets
        size = self._kernel.btf.size
        files = self._machine.alloc_pages(size("file_operations"))
        directories = self._machine.alloc_pages(size("inode_operations"))
        functions = {name: self._code + at for name, at in self._stubs.operations.items()}
        for member, function in (functions | {"llseek": llseek}).items():
            memory.write_word(files + offset[f"file_operations.{member}"], function)
        # The code of read only traps to the host, and the host decides how the call continues.
        changes = dict.fromkeys(("mkdir", "rmdir"), functions["read"])
        for path, is_directory in (_TOPS | {_EVEN: True}).items():
            inode = self._made(path, is_directory)
            operations = inode + offset["inode.i_op"]
            if is_directory:
                self._directories[path != _EVEN] = inode
                table = memory.read(memory.read_word(operations), size("inode_operations"))
                memory.write(directories, table)
                for member, function in (changes | {"lookup": self._code}).items():
                    memory.write_word(directories + offset[f"inode_operations.{member}"], function)
                memory.write_word(operations, directories)
            else:
                self._file = inode
                memory.write_word(inode + offset["inode.i_fop"], files)

    def _made(self, path: str, is_directory: bool) -> int:
        """Create the file or directory `path` in the guest, and return the address of its inode.

        If `path` is the mount point of tracefs, unmount tracefs instead, which uncovers the directory.
        """
        calls = self._syscalls
        init = self._tasks.init
        if path == TRACEFS:
            calls.unmount(path)
        elif is_directory:
            calls.on_path(init, "mkdirat", path, 0o777)
        kind = os.O_DIRECTORY if is_directory else os.O_CREAT
        fd = calls.open(init, path, os.O_RDONLY | kind, 0o666)
        inode = self._tasks.files.inode(fd)
        calls.close(init, fd)
        return inode
