"""The objects of the API, each kind declared once: types, rules, versions, texts and views of them.

All is pure: no I/O, no time, nothing of a service. The operator, the agent, the page, snapshotctl
and the generated pages import it. It imports the pure half of `snapshot_shared`, for an object has
orders and reports in its status; `snapshot_shared` does not import it.
"""
