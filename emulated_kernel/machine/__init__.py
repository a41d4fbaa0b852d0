"""The hardware: memory, vCPUs, traps, text. The only package that imports unicorn.

`machine.Machine` puts it together and boots an image; standing_tasks.py is what patching asks a kernel that
runs there, task_events.py its tasks' callbacks. Not thread-safe: the control lock is held
around all of it, but for the watchdog's thread (budget.py), which does nothing but stop a run.
"""
