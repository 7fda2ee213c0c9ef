"""What an agent keeps of a restore that was given up."""

from __future__ import annotations

from snapshot_agent.handlers.restores import subject_of
from snapshot_shared.ledger import Ledger, Tombstoned
from snapshot_shared.orders import AbortOrder, ArtifactRef, PlaceOrder, PodRef, RestoreOrder
from tests.support import builders
from tests.support.operator_world import DIGEST

POD = PodRef(namespace="default", name="copy", uid="0000000b-0000-4000-8000-00000000000b")
ARTIFACT = ArtifactRef(
    namespace="default", content_uid=builders.UID, generation=1, root_digest=DIGEST
)


def test_no_restore_begins_that_was_given_up_before_the_journal_was_compacted() -> None:
    abort = builders.work_order(AbortOrder, pod=POD)
    ledger = Ledger()
    ledger.apply(builders.accepted(order=abort.order))
    ledger.apply(Tombstoned(subject=subject_of(abort), attempt=1))
    # In a cluster no order belongs to the pod.
    kept = ledger.without((), ())
    for kind in (PlaceOrder, RestoreOrder):
        late = builders.work_order(kind, pod=POD, artifact=ARTIFACT)
        assert kept.is_tombstoned(subject_of(late), late.attempt)
