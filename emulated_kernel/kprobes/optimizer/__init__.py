"""Jump optimization: Linux's delayed optimizer, and djprobe, whose jumps a user's commit writes.

The probe checks of arch decide which probes can be optimized. Both optimizers change text and lists only
under the control lock, never during a hit.
"""
