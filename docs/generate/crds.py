"""The CustomResourceDefinitions of deploy/crds, as files for `kubectl apply`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

from snapshot_api.schema.definitions import definitions

HEADER = "# Made from the structs of snapshot_api by `make docs`; do not edit.\n"


class _Dumper(yaml.SafeDumper):
    """Writes what occurs twice twice."""

    def ignore_aliases(self, _data: object) -> bool:
        return True


# A field of a report is called `n`, which kubectl reads as false and PyYAML does not.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^[nNyY]$"), list("nNyY"))


def files() -> Iterator[tuple[str, str]]:
    """Return the path of each file, from the root of the repository, and its text."""
    for found in definitions():
        text = yaml.dump(found, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
        yield f"deploy/crds/{found['metadata']['name']}.yaml", f"{HEADER}---\n{text}"
