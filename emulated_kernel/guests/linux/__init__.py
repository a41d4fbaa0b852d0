"""A distribution's own kernel, booted in the machine from its first instruction.

- The machine: pc.py is the computer, cpu.py what the emulator leaves out of its CPU, memory.py and
  exception_cells.py its RAM, linux_clock.py its time; boot.py brings a kernel to its init (init.py), and
  snapshot.py keeps that.
- The guest: tasks.py makes clients tasks of that kernel (clients.py, executions.py, undo.py), syscalls.py
  makes its system calls for them, and kernel_files.py, read_files.py and file_times.py read what it has of
  its files.
- The engine: engine.py and tracing.py put ours around it, over probed_linux.py (machine), kernel_stacks.py
  (tasks), kernel_tracepoints.py (events), linux_context.py (records) and module_watch.py (modules).
- The mounts: linux_mount.py serves its own files, engine_mount.py ours beside them (engine_tree.py,
  control_files.py, control_calls.py), core_mount.py those over a dump (core_*.py).

From outside: the mounts, start.started() and snapshot.py.
Everything but reading files of modules is done under the control lock, the mount's. Below that is
NativeMount's condition of who waits for activity: nothing is called while it is held.
"""
