"""One engine, one set of images and one cluster for all tests with Docker."""

from collections.abc import Iterator

import pytest

from tests.e2e.compose import Compose
from tests.support import service_images
from tests.support.docker_engine import engine, lacking
from tests.support.service_images import REPOSITORY


@pytest.fixture(scope="session")
def docker() -> Iterator[Compose]:
    """An engine that has all images."""
    if why := lacking():
        pytest.skip(why)
    with engine() as found:
        compose = Compose(found)
        tools = compose.try_("tests/e2e/tools.sh", within_s=900)
        if tools.code:
            pytest.skip(tools.err.strip().splitlines()[-1])
        service_images.provide(found)
        yield compose


@pytest.fixture(scope="session")
def cluster(docker: Compose) -> Iterator[Compose]:
    """A cluster that is up."""
    print(f"everything is healthy {docker.up():.1f} s after `docker compose up`")
    yield docker
    if docker.containers():
        (REPOSITORY / ".e2e.log").write_text(docker.compose("logs", "--no-color", "--timestamps"))
        docker.compose("--profile", "tools", "down", "--volumes", "--timeout", "5")


@pytest.fixture(scope="session")
def played(cluster: Compose) -> str:
    """What the demo said; what it made is still there."""
    return cluster.compose("run", "--rm", "-T", "demo")
