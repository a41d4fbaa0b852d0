"""The hardware: memory, vCPUs, traps, text. The only package that imports unicorn.

`machine.Machine` puts it together and boots an image; guest_kernel.py lists what a kernel that
runs there has to answer, task_events.py its tasks' callbacks. Not thread-safe: the control lock is held
around all of it, but for the watchdog's thread (budget.py), which does nothing but stop a run.
"""
