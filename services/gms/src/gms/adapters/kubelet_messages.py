"""The messages of the kubelet's plugin APIs, as plain values.

The fields are those of `k8s.io/kubelet/pkg/apis`: `pluginregistration/v1`, `dra/v1` and
`deviceplugin/v1beta1`, whose messages travel without their names. So this one file may name them
as it likes; v1 and v1beta1 of DRA are the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError, Message

from snapshot_shared.errors import InvalidMessage

_PACKAGE = "snapback.kubelet"
_MESSAGES = """
    message Empty {}

    message PluginInfo {
        string type = 1; string name = 2; string endpoint = 3;
        repeated string supported_versions = 4;
    }
    message RegistrationStatus { bool plugin_registered = 1; string error = 2; }

    message Claim { string namespace = 1; string uid = 2; string name = 3; }
    message Claims { repeated Claim claims = 1; }
    message Prepared { map<string, PreparedClaim> claims = 1; }
    message PreparedClaim { repeated PreparedDevice devices = 1; string error = 2; }
    message PreparedDevice {
        repeated string request_names = 1; string pool_name = 2; string device_name = 3;
        repeated string cdi_device_ids = 4;
    }
    message Unprepared { map<string, UnpreparedClaim> claims = 1; }
    message UnpreparedClaim { string error = 1; }

    message DevicePluginOptions {
        bool pre_start_required = 1; bool get_preferred_allocation_available = 2;
    }
    message PluginDevice { string ID = 1; string health = 2; }
    message DeviceList { repeated PluginDevice devices = 1; }
    message AllocateRequest { repeated ContainerRequest container_requests = 1; }
    message ContainerRequest { repeated string devices_ids = 1; }
    message AllocateResponse { repeated ContainerResponse container_responses = 1; }
    message ContainerResponse { map<string, string> envs = 1; repeated Mount mounts = 2; }
    message Mount { string container_path = 1; string host_path = 2; bool read_only = 3; }
"""
_MESSAGE = re.compile(r"message (\w+) \{(.*?)\}", re.DOTALL)
_FIELD = re.compile(r"(repeated |map<string, )?(\w+)>? (\w+) = (\d+);")


def decode(name: str, data: bytes) -> dict[str, Any]:
    """Return the fields of a message, absent ones with their defaults. InvalidMessage."""
    try:
        message = _CLASSES[name].FromString(data)
    except DecodeError as error:
        raise InvalidMessage(f"not a valid {name}: {error}") from error
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def encode(name: str, value: Mapping[str, Any]) -> bytes:
    """Return a message with these fields."""
    message = json_format.ParseDict(cast("dict[str, Any]", value), _CLASSES[name]())
    return message.SerializeToString()


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="snapback/kubelet.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGE.findall(_MESSAGES):
        message = file.message_type.add(name=name)
        for shape, kind, field, number in _FIELD.findall(fields):
            if shape.startswith("map"):
                # As protoc writes a map: a nested message of key and value.
                entry = message.nested_type.add(name=f"{field.title()}Entry")
                entry.options.map_entry = True
                _add(entry, "key", 1, "string")
                _add(entry, "value", 2, kind)
                _add(message, field, number, f"{name}.{entry.name}", is_repeated=True)
            else:
                _add(message, field, number, kind, is_repeated=bool(shape))
    return file


def _add(
    message: descriptor_pb2.DescriptorProto,
    name: str,
    number: int,
    kind: str,
    *,
    is_repeated: bool = False,
) -> None:
    types = descriptor_pb2.FieldDescriptorProto
    field = message.field.add(name=name, number=int(number))
    field.label = types.LABEL_REPEATED if is_repeated else types.LABEL_OPTIONAL
    if kind in ("string", "bool"):
        field.type = types.TYPE_STRING if kind == "string" else types.TYPE_BOOL
    else:
        field.type = types.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"


def _classes() -> dict[str, type[Message]]:
    # A pool of its own: the process may have other files with the kubelet's names.
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(_file().SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name, _ in _MESSAGE.findall(_MESSAGES)
    }


_CLASSES = _classes()
