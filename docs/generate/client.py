"""The reference of the client library: every public name, from its signature and docstring."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

PAGE = "client.md"

MODULES = ("snapback_client", "snapback_client.torch")
INTRO = """\
# The client library

What `snapback-client` offers to an engine. This page is made from the code by `make docs`; a worker
of one's own is in [a guide](how-to/run-your-own-worker.md), models of PyTorch in
[another](how-to/share-a-pytorch-model.md).
"""


def page() -> str:
    """Return the whole page. LookupError names what has no docstring."""
    lines = [INTRO]
    for name in MODULES:
        lines += _module(name)
    return "\n".join(lines).rstrip() + "\n"


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    yield f"## {name}\n"
    yield f"{_text(module, name)}\n"
    found = {each: getattr(module, each) for each in _public(module)}
    errors = {key: item for key, item in found.items() if _is_error(item)}
    for key, item in found.items():
        if key not in errors:
            yield from _item(key, item)
    if errors:
        yield "### Errors\n"
        yield "| error | is also | meaning |\n|---|---|---|"
        for key, item in sorted(errors.items()):
            bases = ", ".join(f"`{base.__name__}`" for base in _bases(item)) or "-"
            yield f"| `{key}` | {bases} | {_text(item, key).partition(chr(10))[0]} |"
        yield ""


def _public(module: Any) -> list[str]:
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, item in vars(module).items()
        if not name.startswith("_") and getattr(item, "__module__", "") == module.__name__
    )


def _is_error(item: Any) -> bool:
    return isinstance(item, type) and issubclass(item, BaseException)


def _bases(item: type[BaseException]) -> list[type]:
    """Return the errors of Python that an error of ours is, or that what is raised for it is."""
    kinds = [item, *item.__subclasses__()]
    known = {base for kind in kinds for base in kind.__mro__ if base.__module__ == "builtins"}
    plain = {object, BaseException, Exception, OSError, LookupError}
    return sorted(known - plain, key=lambda base: base.__name__)


def _item(name: str, item: Any) -> Iterator[str]:
    if isinstance(item, type):
        yield f"### {name}\n"
        yield f"{_text(item, name)}\n"
        made = inspect.getdoc(item.__init__) if "__init__" in _own(item) else None
        if made and not made.startswith("Use "):
            yield f"```python\n{name}{_signature(item.__init__)}\n```\n"
            yield f"{_text(item.__init__, name)}\n"
        for key, member in inspect.getmembers(item):
            if key.startswith("_") or key not in _own(item):
                continue
            yield from _member(name, key, member)
    else:
        yield f"### {name}\n"
        yield f"```python\n{name}{_signature(item)}\n```\n"
        yield f"{_text(item, name)}\n"


def _own(item: type) -> set[str]:
    ours = [base for base in item.__mro__ if base.__module__.startswith("snapback_client")]
    return {name for base in ours for name in vars(base)}


def _member(owner: str, name: str, member: Any) -> Iterator[str]:
    text = inspect.getdoc(member)
    if isinstance(member, property):
        yield f"#### {owner}.{name}\n"
        yield f"{_text(member, f'{owner}.{name}')}\n"
    elif callable(member) and text:
        yield f"#### {owner}.{name}()\n"
        waits = "await " if inspect.iscoroutinefunction(member) else ""
        yield f"```python\n{waits}{name}{_signature(member)}\n```\n"
        yield f"{_text(member, f'{owner}.{name}')}\n"


def _signature(item: Any) -> str:
    shown = str(inspect.signature(item))
    shown = re.sub(r"\((self|cls)(, )?", "(", shown)
    # Annotations are texts; a default that is an object would show its address.
    return re.sub(r"'([^']*)'", r"\1", shown) if " at 0x" not in shown else "(...)"


def _text(item: Any, name: str) -> str:
    text = inspect.getdoc(item)
    if not text:
        raise LookupError(f"{name} has no docstring")
    lines = []
    is_code = False
    for line in text.splitlines():
        indented = line.startswith("    ")
        if indented and not is_code:
            lines.append("```python")
            is_code = True
        elif is_code and line.strip() and not indented:
            lines.insert(len(lines) - (not lines[-1]), "```")
            is_code = False
        # Comments that stand below one another are not what the formatter of the page has.
        code = re.sub(r"(?<=\S) {2,}#", "  #", line.removeprefix("    "))
        lines.append(code if is_code else line)
    return "\n".join([*lines, "```"] if is_code else lines)
