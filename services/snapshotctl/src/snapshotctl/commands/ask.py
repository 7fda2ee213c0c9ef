"""The command ask: put one question to a worker, and print its answer."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Annotated, Any

import typer

from snapshot_shared.errors import Aborted, DeadlineExceeded
from snapshotctl.adapters import asking
from snapshotctl.command import Namespace, RunningPod, Timeout, WorkerContainer, command, new_app
from snapshotctl.domain import formats, targets
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.sources import pod_typed
from snapshotctl.tools import Tools

MAX_PORT = 65535

app = new_app()

START_S = 10.0
"""How long the program that asks may take to start and to end, beside the time of the answer."""


@command(
    app,
    "snapshotctl ask demo-llm-restored 'What is my name?'",
    "snapshotctl ask my-worker 'My name is Ada.' --as chat",
    'snapshotctl ask my-worker \'{"op": "ask", "prompt": "Who am I?"}\' --as raw',
    "snapshotctl ask my-vllm --as /v1/models --to 8000",
)
async def ask(
    tools: Tools,
    pod: RunningPod,
    words: Annotated[
        str, typer.Argument(metavar="WORDS", help="The question; of HTTP the body of a POST.")
    ] = "",
    form: Annotated[
        str,
        typer.Option(
            "--as",
            metavar="FORM",
            help="ask; chat, which the worker remembers; raw; or the /PATH of an HTTP request.",
        ),
    ] = "ask",
    to: Annotated[
        str,
        typer.Option("--to", metavar="SOCKET|PORT", help="A socket in POD_SOCKET_DIR, or a port."),
    ] = "worker.sock",
    container: WorkerContainer = None,
    timeout: Timeout = "2m",
    namespace: Namespace = "default",
) -> None:
    """Put one question to a worker, and print its answer.

    The words are sent as the worker of deploy/examples understands them, one JSON object a line:
    {"op": "ask", "prompt": WORDS}, or with --as chat {"op": "chat", "text": WORDS}; with --as raw
    they are the line. An HTTP request is a POST where there are words. In a Kubernetes cluster the
    container needs python3.
    """
    name, space = targets.pod_named(pod), targets.checked_namespace(namespace)
    asked = _asked(words, form) | {
        "to": _checked_place(to),
        "timeout_s": formats.parse_duration(timeout),
    }
    workers = tools.workers()
    source = inspect.getsource(asking)
    program = [workers.python, "-c", source, json.dumps(asked)]
    try:
        async with asyncio.timeout(asked["timeout_s"] + START_S):
            ran = await workers.answer(space, name, container, program)
    except TimeoutError:
        raise DeadlineExceeded(
            f"pod {name} gave no answer within {timeout}", next_step="give it longer with --timeout"
        ) from None
    if ran.code:
        said = ran.err.strip().splitlines() or [f"exit code {ran.code}"]
        # The cluster may have a program of that name.
        typed = pod_typed(name, [name])
        raise Aborted(
            f"pod {name} gave no answer: {said[-1]}",
            next_step=f"see whether it serves: snapshotctl logs {typed} --tail 20; name another "
            "socket or a port with --to",
        )
    text = ran.out.decode("utf-8", "replace").rstrip("\n")
    if tools.screen.wants_table:
        tools.screen.verbatim(text)
    else:
        tools.screen.value({"pod": name, "namespace": space, "answer": _value(text)})


def _checked_place(to: str) -> str:
    """Return the name of a socket, or a port. WrongArguments."""
    if to.isascii() and to.isdigit() and not 1 <= int(to) <= MAX_PORT:
        raise WrongArguments(f"--to {to} is not between 1 and {MAX_PORT}")
    if not to or "/" in to or "\0" in to:
        raise WrongArguments(
            f"--to {to!r} is neither the name of a socket nor a port",
            next_step="as in --to worker.sock or --to 8000",
        )
    return to


def _asked(words: str, form: str) -> dict[str, Any]:
    """Return what is sent. WrongArguments."""
    if form.startswith("/"):
        return {"method": "POST" if words else "GET", "path": form, "body": words}
    lines = {
        "ask": json.dumps({"op": "ask", "prompt": words}),
        "chat": json.dumps({"op": "chat", "text": words}),
        "raw": words,
    }
    if form not in lines:
        raise WrongArguments(
            f"--as {form!r} is not understood", next_step="use ask, chat, raw or a /PATH"
        )
    if not words:
        raise WrongArguments(
            "the question is missing", next_step="snapshotctl ask my-worker 'What is my name?'"
        )
    if "\n" in lines[form]:
        raise WrongArguments(
            "--as raw sends one line, and the words have several",
            next_step="leave the line breaks out",
        )
    return {"line": lines[form]}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
