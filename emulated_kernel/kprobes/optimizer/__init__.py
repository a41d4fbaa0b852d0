"""Jump optimization: Linux's delayed optimizer, and as a variant of it djprobe's commit.

The probe checks of arch decide which probes can be optimized. Both optimizers change text and lists only
under the control lock, never during a hit.
"""
