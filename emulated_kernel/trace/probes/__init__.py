"""Dynamic events: parsing their definitions, registering their probes, and recording their hits.

Other subpackages use DynamicEvents with its kinds (KprobeEvents, FprobeEvents, UprobeEvents, EventProbes),
and ProbeEngine. Callers create and remove events under the control lock while the guest is stopped. Handling
a hit creates and removes no event.
"""
