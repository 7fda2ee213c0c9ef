"""The objects of the API, each kind declared once: types, rules, versions, texts and views of them.

All is pure: no I/O, no time, nothing of a service. The operator, the page, snapshotctl and the
generated pages import it. Of `snapshot_shared` it knows the values of the wire alone, for an object
has orders and reports in its status; `snapshot_shared` knows nothing of it.
"""
