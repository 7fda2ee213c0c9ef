"""Metrics that a good standalone run does not record; tests of `test_faults.py` do."""

from snapshot_shared import instruments
from snapshot_shared.instruments import Instrument

RECORDED_ELSEWHERE: dict[Instrument, str] = {
    instruments.RECONNECTIONS: "test_a_connection_that_comes_back_is_counted",
    instruments.SPANS_DROPPED: "test_spans_that_nobody_could_take_are_counted",
    instruments.REPEATED: "test_a_repeated_order_is_counted_and_not_accepted_again",
    instruments.DEAD_LETTERS: "test_a_dead_letter_is_counted_by_its_reason",
    instruments.UNPUBLISHED: "test_an_order_that_waits_for_the_sweep_is_counted",
    instruments.API_REQUEST_DURATION: "test_a_request_to_the_kubernetes_api_is_counted",
    instruments.ADMISSION_DURATION: "test_an_admission_is_counted_by_its_webhook_and_outcome",
    instruments.CLIENTS_REFUSED: "test_a_client_without_a_session_is_counted_by_its_reason",
}
