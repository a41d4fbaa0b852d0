"""Synthetic events: events of fields that a user defines and histograms fill."""
