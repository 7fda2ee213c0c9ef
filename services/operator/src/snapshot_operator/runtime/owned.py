"""Leaves out orders that do not follow from the object that remembers them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from snapshot_api.kinds import AnyObject, kind_of
from snapshot_api.meta import OrderStatus
from snapshot_operator.core.authority import foreign
from snapshot_operator.runtime.world import Warned, unwarned
from snapshot_shared.errors import SnapbackError

log = logging.getLogger(__name__)


class ForeignOrders(SnapbackError):
    """A status has orders that do not follow from its object: the operator did not write them."""

    default_next_step = "find out who may write this status"


def owned(
    owner: AnyObject, orders: Iterable[OrderStatus], warned: Warned = unwarned
) -> list[OrderStatus]:
    """Return the orders that may be published for an object. One warning counts the others."""
    found, dropped = [], []
    for order in orders:
        if field := foreign(owner, order):
            dropped.append((order.order, field))
        else:
            found.append(order)
    if dropped:
        meta, (first, field) = owner.metadata, dropped[0]
        # One line for an object, whatever its author has put there.
        failure = ForeignOrders(
            f"{len(dropped)} orders in the status are not carried out: the {field} of "
            f"{first[:128]} is not that of the object"
        ).to_failure()
        log.warning("%s %s/%s: %s", kind_of(owner).name, meta.namespace, meta.name, failure)
        warned(owner, failure)
    return found
