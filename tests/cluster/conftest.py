"""A cluster for the tests of this folder."""

import os

import pytest


@pytest.fixture
def kubeconfig() -> str:
    found = os.environ.get("KUBECONFIG")
    if not found:
        pytest.skip("KUBECONFIG names no cluster")
    return found
