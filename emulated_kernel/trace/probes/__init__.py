"""Dynamic events: definitions parsed, probes registered on the engine, hits turned into records.

From outside: DynamicEvents with its kinds (KprobeEvents, FprobeEvents, UprobeEvents, EventProbes), and
ProbeEngine. Definitions come under the control lock, while the guest stands still; hits record and no more.
"""
