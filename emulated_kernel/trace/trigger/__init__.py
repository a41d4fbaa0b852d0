"""Event triggers: the commands that set them, and their actions on a trace array.

Other subpackages use a trace array's EventTriggers, and the commands. Triggers are set under the control
lock. Hits run triggers, so a trigger must not register or free a probe.
"""
