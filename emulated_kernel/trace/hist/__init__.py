"""Histogram triggers: counting hits by key, variables shared between events, and actions on hits.

Other subpackages use trigger.HistCommand, a command of trigger files, and services.HistServices. All calls
are made under the control lock. Hits count into maps; files read and clear the maps while the guest is
stopped.
"""
