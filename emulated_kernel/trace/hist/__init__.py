"""Histogram triggers: they count hits by key, share variables between events, and run actions.

Other subpackages use trigger.HistCommand, a command of trigger files, and services.HistServices. All calls
are made under the control lock. Hits are counted in maps. Files read and clear the maps while the guest is
stopped.
"""
