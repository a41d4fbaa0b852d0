"""What differs between instruction sets, behind one list of hooks.

From outside: `architectures.arch_named()`, which gives an `Arch` of base.py, and the verdict of verdict.py.
Nothing here takes a lock. Bytes and tables come in; code, findings and regions go out, and no kernel is
changed, but for emulations: a hit runs them on its registers and memory.
"""
