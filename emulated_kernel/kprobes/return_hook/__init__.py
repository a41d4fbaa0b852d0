"""Return hooks: a function's return address is replaced, and kept on a shadow stack until it returns.

From outside: HookSets, ReturnHooks, ReturnHook and RethookNode. All state is words of guest memory, on which
guest code works too: Python changes them while the guest stands still, with the control lock held. Locks
among those words (KretprobeInstTable) are taken by guest code alone.
"""
