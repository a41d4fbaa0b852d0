"""Mounts of kprobefs's own kernel: its part in clients' calls on control files, and its scratch/ and dev/.

ScratchFs and ControlFs take the control lock; BuiltinCalls and ClientCalls need it.
"""
