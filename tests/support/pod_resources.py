"""What a kubelet answers to `v1.PodResourcesLister/List`, put together field by field."""

from __future__ import annotations

from collections.abc import Sequence


def field(number: int, value: str | bytes) -> bytes:
    """Return a string or a message as a field of protobuf."""
    data = value.encode() if isinstance(value, str) else value
    length, sizes = len(data), bytearray()
    while length >= 0x80:
        sizes.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([number << 3 | 2]) + bytes([*sizes, length]) + data


def number(of: int, value: int) -> bytes:
    """Return a small number as a field of protobuf."""
    return bytes([of << 3, value])


def pod(name: str, *containers: bytes, namespace: str = "default") -> bytes:
    """Return a PodResources, as a field of the answer."""
    held = b"".join(field(3, container) for container in containers)
    return field(1, field(1, name) + field(2, namespace) + held)


def container(name: str, *rows: bytes) -> bytes:
    """Return a ContainerResources; `rows` are what it holds."""
    cpus, memory = field(3, b"\x01\x02"), field(4, field(1, "memory") + number(2, 7))
    return field(1, name) + cpus + memory + b"".join(rows)


def limit(resource: str, ids: Sequence[str]) -> bytes:
    """Return the devices that a device plugin gave, as a field of a container."""
    topology = field(3, field(1, number(1, 0)))
    return field(2, field(1, resource) + b"".join(field(2, each) for each in ids) + topology)


def claim(driver: str, *devices: str) -> bytes:
    """Return the devices of a claim, as a field of a container."""
    held = b"".join(
        field(4, field(1, field(1, f"{driver}/x={device}")) + field(2, driver) + field(4, device))
        for device in devices
    )
    return field(5, field(2, "gpu") + field(3, "default") + held)
