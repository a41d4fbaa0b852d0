"""Return hooks: a function's return address is replaced, and kept on a shadow stack until it returns.

From outside: HookSets, ReturnHooks, ReturnHook and Instance. All state is words of guest memory, on which
guest code works too: Python changes them while the guest stands still, with the control lock held. Locks
among those words (InstanceTable) are taken by guest code alone.
"""
