"""The emulated hardware: memory, virtual CPUs, traps and text. The only package that uses Unicorn.

`machine.Machine` combines the parts and boots an image. The guest kernel implements task_stacks.TaskStacks
for text patching, and calls the observers of task_events. Nothing is thread-safe: the control lock is held
around all calls, except in the watchdog's thread (run_watchdog.py), which only stops runs.
"""
