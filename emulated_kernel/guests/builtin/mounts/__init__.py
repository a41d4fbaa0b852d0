"""Mounts of kprobefs's own kernel: the guest's directories scratch/ and dev/, and calls on control files.

The guest repeats clients' calls on control files, so that probes can notice them. ScratchFs and ControlFs
take the control lock; BuiltinCalls and ClientCalls need it.
"""
