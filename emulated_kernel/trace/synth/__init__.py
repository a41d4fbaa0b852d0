"""Synthetic events: events of fields that a user defines and histograms fill.

From outside: SyntheticEvents. Defined under the control lock; histograms fire them within a hit.
"""
