"""What verdicts are computed from: functions, ways into them, tables, data flow.

verdict.py and the architectures ask; reason.Reason and region.Region are for everybody above. Nothing here
touches a machine: bytes and tables in, findings out. No lock.
"""
