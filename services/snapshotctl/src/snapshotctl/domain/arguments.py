"""The command line before it is parsed: options that count for all commands may stand anywhere."""

from __future__ import annotations

from collections.abc import Sequence

GLOBAL_OPTIONS = ("--server", "--cluster", "--output", "-o")
"""Each takes a value."""

FORMS = ("table", "json", "yaml")
"""What `--output` may say."""


def hoisted(arguments: Sequence[str]) -> list[str]:
    """Move the options that count for all commands in front of the command."""
    front: list[str] = []
    rest: list[str] = []
    waiting = list(reversed(arguments))
    while waiting:
        word = waiting.pop()
        if word == "--":
            rest += [word, *reversed(waiting)]
            break
        if word == "-o" and rest[:1] == ["bundle"] and waiting and waiting[-1] not in FORMS:
            # There it names the file; a form of the result cannot be the name of an archive.
            rest += [word, waiting.pop()]
        elif word in GLOBAL_OPTIONS:
            front += [word, *([waiting.pop()] if waiting else [])]
        elif word.startswith(("--server=", "--cluster=", "--output=")) or _is_short(word):
            front.append(word)
        else:
            rest.append(word)
    return front + rest


def _is_short(word: str) -> bool:
    return word.startswith("-o") and not word.startswith("--") and len(word) > 2
