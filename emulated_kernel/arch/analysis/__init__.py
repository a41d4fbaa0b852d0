"""Analysis of functions for the probe checks: their code, references into them, tables, data flow.

The probe checks of each architecture use these modules. All layers above may use RejectReason and Region.
Nothing here touches a machine: the input is bytes and tables, the output is rejections. No lock is needed.
"""
