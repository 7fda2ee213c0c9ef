"""The backend keeps what the GPU memory service promises of transfers."""

import pytest
from example_backend import ExampleBackend

from gms.conformance.transfers import FileBackendContract


class TestExampleBackend(FileBackendContract):
    @pytest.fixture(scope="module")
    def backend(self) -> ExampleBackend:
        return ExampleBackend()
