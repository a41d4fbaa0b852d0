"""Event triggers: their commands, and what they do to a trace array.

From outside: EventTriggers of a trace array, and the commands. Set under the control lock; a hit runs them,
and none may register or free a probe.
"""
