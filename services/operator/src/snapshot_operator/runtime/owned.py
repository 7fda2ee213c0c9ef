"""Leaves out orders that do not follow from the object that remembers them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from snapshot_operator.core.authority import foreign
from snapshot_shared.objects.kinds import AnyObject, kind_of
from snapshot_shared.objects.meta import OrderStatus

log = logging.getLogger(__name__)


def owned(owner: AnyObject, orders: Iterable[OrderStatus]) -> list[OrderStatus]:
    """Return the orders that may be published for an object. A warning counts the others."""
    found, dropped = [], []
    for order in orders:
        if field := foreign(owner, order):
            dropped.append((order.order, field))
        else:
            found.append(order)
    if dropped:
        meta, (first, field) = owner.metadata, dropped[0]
        # One line for an object, whatever its author has put there.
        log.warning(
            "%d orders in the status of %s %s/%s are not carried out: the %s of %.128s is not that "
            "of the object. Next: find out who may write this status",
            *(len(dropped), kind_of(owner).name, meta.namespace, meta.name, field, first),
        )
    return found
