"""The certificate of the operator's webhooks, and the authority that API servers trust for it.

Time is an input; keys are drawn from the randomness of the system by `cryptography`. An authority
is followed by a newer one long before it ends, and both are trusted meanwhile: what is served and
what is trusted are never changed in one step.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_LIFE = timedelta(days=3650)
LIFE = timedelta(days=90)
EARLY = timedelta(hours=1)
"""How long before its making a certificate is valid: clocks of other machines may be behind."""

_BROKEN = (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature)


class Certificates(NamedTuple):
    """All of it as PEM. The newest authority is the first, and the key is its key."""

    authorities: bytes
    authority_key: bytes
    certificate: bytes
    key: bytes


def renewed(
    found: Certificates | None, names: Sequence[str], now: datetime, life: timedelta = LIFE
) -> Certificates:
    """Return what is to be served now: what was found, where nothing of it has to be renewed.

    What cannot be read is made again. `names` are DNS names and addresses, the first its subject.
    """
    try:
        return _renewed(found, names, now, life) if found else _made(names, now, life)
    except _BROKEN:
        return _made(names, now, life)


def renewal(found: Certificates) -> datetime:
    """Return when something has to be renewed: a third before the end of the one or the other."""
    authority = x509.load_pem_x509_certificates(found.authorities)[0]
    return min(_renewal(x509.load_pem_x509_certificate(found.certificate)), _renewal(authority))


def _renewal(certificate: x509.Certificate) -> datetime:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return end - (end - begin) / 3


def _renewed(
    found: Certificates, names: Sequence[str], now: datetime, life: timedelta
) -> Certificates:
    authorities = x509.load_pem_x509_certificates(found.authorities)
    key = _key_in(found.authority_key)
    if key.public_key() != authorities[0].public_key():
        raise ValueError("the key is not that of the authority")
    if now >= authorities[0].not_valid_after_utc:
        return _made(names, now, life)
    if now >= _renewal(authorities[0]):
        newer, newer_key = _authority(now)
        kept = [_pem(each) for each in authorities if now < each.not_valid_after_utc]
        bundle = b"".join((_pem(newer), *kept))
        return found._replace(authorities=bundle, authority_key=_private(newer_key))
    if _is_good(found, authorities, names, now):
        return found
    # Operators with other settings may share it for a while: each keeps the names of the others.
    both = list(dict.fromkeys((*names, *_names_in(found.certificate))))
    certificate, own_key = _issued(authorities[0], key, both, now, life)
    return found._replace(certificate=_pem(certificate), key=_private(own_key))


def _is_good(
    found: Certificates,
    authorities: Sequence[x509.Certificate],
    names: Sequence[str],
    now: datetime,
) -> bool:
    """Whether a certificate has these names, a trusted authority, and is not too old."""
    try:
        certificate = x509.load_pem_x509_certificate(found.certificate)
        key = _key_in(found.key)
        (issuer,) = [each for each in authorities if _has_signed(each, certificate)]
    except _BROKEN:
        return False
    is_named = set(names) <= set(_names_in(found.certificate))
    is_valid = now < min(_renewal(certificate), issuer.not_valid_after_utc)
    return is_named and is_valid and key.public_key() == certificate.public_key()


def _names_in(data: bytes) -> list[str]:
    """Return the names and addresses of a certificate; none of what is no certificate of ours."""
    try:
        certificate = x509.load_pem_x509_certificate(data)
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (*_BROKEN, x509.ExtensionNotFound):
        return []
    return [str(each.value) for each in found]


def _has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except _BROKEN:
        return False
    return True


def _made(names: Sequence[str], now: datetime, life: timedelta) -> Certificates:
    authority, key = _authority(now)
    certificate, own_key = _issued(authority, key, names, now, life)
    return Certificates(_pem(authority), _private(key), _pem(certificate), _private(own_key))


def _authority(now: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    # Two authorities of one name would be taken for one another.
    name = _named(f"snapback-webhooks-{now:%Y%m%dT%H%M%S}")
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        _builder(name, key, now, AUTHORITY_LIFE)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return builder.sign(key, hashes.SHA256()), key


def _issued(
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
    now: datetime,
    life: timedelta,
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = (
        _builder(_named(names[0]), key, now, life)
        .issuer_name(authority.subject)
        .add_extension(x509.SubjectAlternativeName(_alternatives(names)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
    )
    return builder.sign(authority_key, hashes.SHA256()), key


def _builder(
    name: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(now + life)
        .add_extension(identifier, critical=False)
    )


def _named(name: str) -> x509.Name:
    # A common name has at most 64 characters; nothing reads it but people.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _alternatives(names: Sequence[str]) -> list[x509.GeneralName]:
    return [_alternative(name) for name in names]


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _key_in(data: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(data, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError(f"expected a key of an elliptic curve, found {type(key).__name__}")
    return key


def at(seconds: float) -> datetime:
    """Return the time that is so many seconds after the epoch."""
    return datetime.fromtimestamp(seconds, UTC)
