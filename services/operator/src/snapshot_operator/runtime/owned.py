"""Leaves out orders that do not follow from the object that remembers them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from snapshot_operator.core.authority import foreign
from snapshot_shared.objects.kinds import AnyObject, kind_of
from snapshot_shared.objects.meta import OrderStatus

log = logging.getLogger(__name__)


def owned(owner: AnyObject, orders: Iterable[OrderStatus]) -> list[OrderStatus]:
    """Return the orders that may be published for an object. A warning names the others."""
    found = []
    for order in orders:
        if field := foreign(owner, order):
            meta = owner.metadata
            log.warning(
                "order %.128s in the status of %s %s/%s is not carried out: its %s is not that of "
                "the object. Next: find out who may write this status",
                *(order.order, kind_of(owner).name, meta.namespace, meta.name, field),
            )
        else:
            found.append(order)
    return found
