"""Mounts of kprobefs's own kernel: repetition of clients' calls on control files, and scratch/ and dev/.

ScratchFs and ControlFs take the control lock; BuiltinCalls and ClientCalls need it.
"""
