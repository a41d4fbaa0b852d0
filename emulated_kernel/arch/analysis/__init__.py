"""What verdicts are computed from: functions, ways into them, tables, data flow."""
