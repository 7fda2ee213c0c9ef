"""The AsyncAPI document holds together, and knows all that is sent."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from snapshot_shared.bus import STREAMS
from snapshot_shared.codec import encode_json
from snapshot_shared.manifests import message_schemas
from snapshot_shared.objects.kinds import KINDS
from snapshot_shared.orders import Presence

DOCUMENT = yaml.safe_load((Path(__file__).parents[2] / "docs/asyncapi.yaml").read_text("utf-8"))
CHANNELS: dict[str, Any] = DOCUMENT["channels"]


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def test_every_reference_leads_somewhere() -> None:
    found = set(_references(DOCUMENT))
    assert found
    for reference in found:
        value: Any = DOCUMENT
        for word in reference.removeprefix("#/").split("/"):
            value = value[word]


def test_every_message_is_in_a_channel() -> None:
    shown = {name for channel in CHANNELS.values() for name in channel["messages"]}
    assert shown == set(DOCUMENT["components"]["messages"])
    kinds = {f"{k.name.lower()}.{k.api_version.rpartition('/')[2]}" for k in KINDS.values()}
    sent = {
        schema["$ref"].rpartition("/")[2]
        for name, schema in message_schemas().items()
        if name not in kinds
    }
    assert sent <= shown


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: str(stream.name))
def test_what_a_stream_keeps_has_a_channel(stream: Any) -> None:
    addresses = [
        re.sub(r"{\w+}", "*", channel["address"])
        for channel in CHANNELS.values()
        if channel["address"]
    ]
    assert set(stream.subjects) <= set(addresses)


@pytest.mark.parametrize("name", CHANNELS)
def test_the_parameters_of_an_address_are_described(name: str) -> None:
    channel = CHANNELS[name]
    words = re.findall(r"{(\w+)}", channel["address"] or "")
    assert set(words) == set(channel.get("parameters", {}))
    assert channel["description"]
    assert not fnmatch.filter([channel["address"] or ""], "*[*>]*")


def test_every_operation_has_an_action_and_a_channel_and_every_channel_one() -> None:
    used = set()
    for operation in DOCUMENT["operations"].values():
        assert operation["action"] in ("send", "receive")
        used.add(operation["channel"]["$ref"])
        used |= {operation["reply"]["channel"]["$ref"]} if "reply" in operation else set()
    assert used == {f"#/channels/{name}" for name in CHANNELS}


def test_a_message_is_valid_by_its_schema() -> None:
    schema = {"$ref": "#/components/schemas/Presence", "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator.check_schema(schema)
    sent = json.loads(encode_json(Presence(node="n", boot_id="b", version="1", at=1.0)))
    jsonschema.validate(sent, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(sent | {"node": 7}, schema)
