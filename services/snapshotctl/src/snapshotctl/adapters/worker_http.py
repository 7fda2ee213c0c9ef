"""The HTTP of an engine that speaks OpenAI's API."""

from __future__ import annotations

from http import HTTPStatus

import aiohttp
import msgspec

from snapshot_shared.codec import encode_json
from snapshot_shared.errors import Aborted, DeadlineExceeded
from snapshot_shared.tasks import any_set

ANSWER_S = 120.0
AGAIN_S = 0.02
TOKENS = 16


class _Choice(msgspec.Struct, frozen=True):
    text: str
    token_ids: list[int]


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice]


class CompletionClient:
    """Asks an engine of this machine for completions, which are the same each time."""

    def __init__(self, port: str) -> None:
        """Use a port of this machine; `connect` waits for the engine there."""
        self._url = f"http://127.0.0.1:{port}"
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S))

    async def ask(self, prompt: str) -> bytes:
        """Return the text and the token ids that follow a prompt."""
        body = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "return_token_ids": True,
        }
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
                answer = await response.read()
                if response.status != HTTPStatus.OK:
                    return answer
                return encode_json(msgspec.json.decode(answer, type=_Completion).choices[0])
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine did not answer within {ANSWER_S:.0f} s", budget_s=ANSWER_S
            ) from None
        except (aiohttp.ClientError, msgspec.DecodeError, IndexError) as error:
            raise Aborted(f"the engine hung up: {error}") from error

    async def chat(self, text: str) -> bytes:
        """Return the same: the engine remembers nothing."""
        return await self.ask(text)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def serves(self) -> None:
        """Wait until the engine listens."""
        while True:
            try:
                async with self._session.get(f"{self._url}/health"):
                    return
            except aiohttp.ClientConnectionError:
                await any_set(AGAIN_S)


async def connect(port: str) -> CompletionClient:
    """Wait until an engine listens at a port of this machine."""
    client = CompletionClient(port)
    try:
        await client.serves()
    except BaseException:
        await client.close()
        raise
    return client
