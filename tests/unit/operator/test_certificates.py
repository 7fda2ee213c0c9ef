"""The certificate of the webhooks is renewed in time, and is trusted before it is served."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from snapshot_operator.kube.certificates import Certificates, renewal, renewed
from snapshot_operator.kube.webhook_tls import MountedCertificate, new_context, take
from snapshot_shared.errors import InvalidInput
from tests.unit.tables import each

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
NAMES = ["localhost", "198.51.100.7"]


def made(now: datetime = NOW, names: list[str] = NAMES) -> Certificates:
    return renewed(None, names, now)


def served(found: Certificates) -> x509.Certificate:
    return x509.load_pem_x509_certificate(found.certificate)


def test_a_certificate_has_the_names_and_is_of_an_authority_that_makes_no_others() -> None:
    found = made()
    (authority,) = x509.load_pem_x509_certificates(found.authorities)
    served(found).verify_directly_issued_by(authority)
    names = served(found).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(each.value) for each in names] == NAMES
    limits = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (limits.ca, limits.path_length) == (True, 0)


@pytest.mark.parametrize(("days", "is_kept"), [(0, True), (59, True), (60, False), (91, False)])
def test_a_certificate_of_ninety_days_is_renewed_after_sixty_by_the_same_authority(
    days: int, is_kept: bool
) -> None:
    found = made()
    later = renewed(found, NAMES, NOW + days * DAY)
    assert (later == found) is is_kept
    assert later.authorities == found.authorities
    served(later).verify_directly_issued_by(*x509.load_pem_x509_certificates(found.authorities))
    assert renewal(later) > NOW + days * DAY


def test_an_authority_is_followed_in_two_steps_and_both_are_trusted_meanwhile() -> None:
    found = made()
    late = NOW + 7 * 365 * DAY
    found = renewed(found, NAMES, late - DAY * 2000)
    first = renewed(found, NAMES, late)
    assert first.authorities.endswith(found.authorities)
    assert (first.certificate, first.key) == (found.certificate, found.key)
    second = renewed(first, NAMES, late)
    assert second.authorities == first.authorities
    (newer, older) = x509.load_pem_x509_certificates(second.authorities)
    served(second).verify_directly_issued_by(newer)
    assert renewed(second, NAMES, late) == second
    # The older one is kept as long as it lasts.
    assert older.not_valid_after_utc > late
    later = renewed(second, NAMES, late + 7 * 365 * DAY)
    (_, kept) = x509.load_pem_x509_certificates(later.authorities)
    assert kept == newer


def test_operators_with_other_names_share_one_certificate_and_do_not_take_turns() -> None:
    found = renewed(made(), ["other.example"], NOW + DAY)
    assert renewed(found, NAMES, NOW + DAY) == found
    names = served(found).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(each.value) for each in names} == {"other.example", *NAMES}


@each("field", Certificates._fields)
@each("value", [b"", b"no PEM"])
def test_what_cannot_be_read_is_made_again(field: str, value: bytes) -> None:
    found = renewed(made()._replace(**{field: value}), NAMES, NOW)
    assert getattr(found, field) not in (b"", b"no PEM")
    assert renewed(found, NAMES, NOW) == found


def test_a_key_that_is_none_of_the_authority_is_not_used() -> None:
    one, other = made(), made()
    found = renewed(one._replace(authority_key=other.authority_key), NAMES, NOW)
    assert found.authorities not in (one.authorities, other.authorities)


async def subject_served(context: ssl.SSLContext, trusted: Certificates) -> bytes:
    """Return the certificate that a client gets which trusts an authority alone."""

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    client = ssl.create_default_context(cadata=trusted.authorities.decode())
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client, server_hostname="localhost"
        )
        found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
    return found


async def test_a_certificate_is_taken_into_use_by_a_context_that_serves_already() -> None:
    one, other = made(datetime.now(UTC)), made(datetime.now(UTC))
    context = new_context()
    take(context, one.certificate, one.key)
    first = await subject_served(context, one)
    take(context, other.certificate, other.key)
    assert await subject_served(context, other) != first
    with pytest.raises(ssl.SSLError):
        take(context, one.certificate, other.key)
    assert await subject_served(context, other)


def put(folder: Path, found: Certificates) -> None:
    """Put a certificate into a folder as a kubelet does: both files by one rename of a link."""
    version = folder / f"..{len([*folder.iterdir()])}"
    version.mkdir(parents=True)
    (version / "tls.crt").write_bytes(found.certificate)
    (version / "tls.key").write_bytes(found.key)
    link = folder / "..data_tmp"
    link.symlink_to(version.name)
    link.rename(folder / "..data")
    for name in ("tls.crt", "tls.key"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


async def test_a_mounted_certificate_is_followed_and_a_broken_one_is_not_served(
    tmp_path: Path,
) -> None:
    one, other = made(datetime.now(UTC)), made(datetime.now(UTC))
    put(tmp_path, one)
    async with MountedCertificate(tmp_path).kept() as context:
        first = await subject_served(context, one)
        put(tmp_path, one._replace(key=other.key))
        put(tmp_path, other)
        async with asyncio.timeout(10):
            while True:
                try:
                    assert await subject_served(context, other) != first
                    break
                except ssl.SSLCertVerificationError:
                    await asyncio.sleep(0.05)


async def test_a_folder_without_a_certificate_is_named_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="SNAPBACK_WEBHOOK_CERTIFICATE_DIR") as caught:
        async with MountedCertificate(tmp_path / "none").kept():
            pass
    assert "tls.crt" in (caught.value.next_step or "")
