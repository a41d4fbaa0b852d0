"""What joins two equals, host and trace: neither knows the other.

The clock that both follow, directories that appear in the guest with events, and modules that come and go.
"""
