"""What happens in the guest, told to trace and to whom it concerns beside it; without knowing host.

The machine's clock that records read (ClockSwitch), modules that come and go for image, kprobes and trace
(ModuleNotifier), and directories in the guest of events in trace (GuestDirectories). What host does for them
are functions that the builders hand over, for our kernel and for a distribution's. All of it is called under
the control lock, by who runs the guest or writes a file.
"""
