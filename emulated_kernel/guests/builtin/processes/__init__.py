"""Guest tasks that represent host processes.

`process_tracker.ProcessTracker` keeps a guest task for each host process. A ProcessWatch reports forks, exits
and names of the host's processes. `isolated.IsolatedProcesses` is a watch that reports only clients.
"""
