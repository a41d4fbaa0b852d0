"""Return hooks: replace a function's return address, and keep the real one on a shadow stack.

Other subpackages use HookSets, ReturnHooks, ReturnHook and RethookNode. All state is words of guest memory,
which guest code changes too. Python changes them while the guest is stopped, with the control lock held. Only
guest code takes the locks among these words (KretprobeInstTable).
"""
