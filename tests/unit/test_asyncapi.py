"""The AsyncAPI document holds together, and knows all that is sent."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from snapshot_api.kinds import KINDS
from snapshot_api.manifests import message_schemas
from snapshot_shared.bus import STREAMS
from snapshot_shared.codec import encode_json
from snapshot_shared.orders import Presence


@cache
def document() -> dict[str, Any]:
    path = Path(__file__).parents[2] / "docs/asyncapi.yaml"
    found: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return found


def channels() -> dict[str, Any]:
    found: dict[str, Any] = document()["channels"]
    return found


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
    found = set(_references(document()))
    assert found
    for reference in found:
        value: Any = document()
        for word in reference.removeprefix("#/").split("/"):
            value = value[word]


def test_every_message_is_in_a_channel() -> None:
    shown = {name for channel in channels().values() for name in channel["messages"]}
    assert shown == set(document()["components"]["messages"])
    kinds = {f"{k.name.lower()}.{k.api_version.rpartition('/')[2]}" for k in KINDS.values()}
    sent = {
        schema["$ref"].rpartition("/")[2]
        for name, schema in message_schemas().items()
        if name not in kinds
    }
    assert sent <= shown


def test_what_a_stream_keeps_has_a_channel() -> None:
    addresses = {re.sub(r"{\w+}", "*", channel["address"] or "") for channel in channels().values()}
    kept = {subject for stream in STREAMS for subject in stream.subjects}
    assert kept - addresses == set()


def test_the_parameters_of_an_address_are_described() -> None:
    wrong = {}
    for name, channel in channels().items():
        address = channel["address"] or ""
        described = set(re.findall(r"{(\w+)}", address)) == set(channel.get("parameters", {}))
        if not described or not channel["description"] or fnmatch.fnmatch(address, "*[*>]*"):
            wrong[name] = channel
    assert channels()
    assert wrong == {}


def test_every_operation_has_an_action_and_a_channel_and_every_channel_one() -> None:
    used = set()
    for operation in document()["operations"].values():
        assert operation["action"] in ("send", "receive")
        used.add(operation["channel"]["$ref"])
        used |= {operation["reply"]["channel"]["$ref"]} if "reply" in operation else set()
    assert used == {f"#/channels/{name}" for name in channels()}


def test_a_message_is_valid_by_its_schema() -> None:
    schema = {"$ref": "#/components/schemas/Presence", "components": document()["components"]}
    jsonschema.Draft202012Validator.check_schema(schema)
    sent = json.loads(encode_json(Presence(node="n", boot_id="b", version="1", at=1.0)))
    jsonschema.validate(sent, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(sent | {"node": 7}, schema)
