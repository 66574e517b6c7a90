"""Metrics: one catalogue, cheap recording in the children, merging, exposition.

`catalogue` names every family; `recording` counts in one process; `requests` records a frontend's
work (the router's is `lightserve.router.metrics`); once a second a process sends
`Recorder.snapshot()` to the supervisor, whose `ledger` adds the processes up and renders them.
Only `ledger`, and only the supervisor, imports prometheus_client.
"""
