"""Analysis of kernel functions for the probe checks: code, references from outside, tables, data flow.

The probe checks of each architecture use these modules. All layers above may use RejectReason and Region. No
module in this subpackage accesses a machine: the input is machine code and the kernel's tables, the output is
rejections of probes. No lock is needed.
"""
