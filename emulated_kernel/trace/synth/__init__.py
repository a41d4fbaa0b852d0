"""Synthetic events: events with fields that a user defines and values that histograms supply.

Other subpackages use SyntheticEvents. Events are defined under the control lock; histograms trigger them
during a hit.
"""
