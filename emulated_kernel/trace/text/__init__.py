"""Text on its way in and out: commands' words and numbers, printf, error_log, the lines of a trace.

Anything may be taken: functions and small tables. error_log and the saved comms change under the control
lock.
"""
