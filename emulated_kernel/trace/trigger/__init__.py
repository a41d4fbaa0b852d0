"""Event triggers: their commands, and their effects on a trace array.

Other subpackages use a trace array's EventTriggers, and the commands. Triggers are set under the control
lock. A hit runs them, and they may not register or free a probe.
"""
