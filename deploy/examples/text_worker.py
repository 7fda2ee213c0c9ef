"""A small language model that is trained when it starts, as a worker that can be captured.

It writes a text on, word by word, from the sentences of `text/sentences.txt` and from what it has
learned since. Its first layer, of SIZE_MIB, is in GPU memory, over all devices; its words are
chosen by a second one, the readout. To train that, all sentences are sent through the first layer
PASSES times, from the second time on with words left out, so that it also writes on what it has not
seen whole. This takes most of a cold start, and is not done again after a restore.

It listens as `worker.py` does, whose server it uses, and answers one JSON object a line:

    {"op": "ask", "prompt": "..."}   writes the prompt on, up to the end of the sentence
    {"op": "chat", "text": "..."}    learns a sentence

The first layer is computed in whole numbers that are exact in float32, so what it makes of a text,
of which the answer has a digest as its `proof`, is the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

# Read when numpy is imported. Several threads would wait for each other on a machine that is busy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from worker import LAYER_MIB, LIMIT, WIDTH, Floats, Layers, requantized, run

from snapback_client import MemoryPool, Worker, device_count

SENTENCES = Path(__file__).parent / "text" / "sentences.txt"
OWN = "model.npz"
"""The file with what is not in a pool."""
CONTEXT = 4
"""How many words the next one is chosen by."""
SHIFT = 5
"""A layer's sums are divided by 2 to this power, so that about a third of them reach LIMIT."""
RATE = 60.0
STEPS = 50
"""Of gradient descent, after each pass and when a sentence is learned."""
LEFT_OUT = 0.2
"""The share of the words that later passes leave out."""
MAX_WORDS = 24
START, END = "", "."
"""Stand before the first word of a sentence, and after its last."""
UNKNOWN = "?"
"""Stands for a word that no sentence has."""


def tokens(text: str) -> list[str]:
    """Return the words and marks of a text, in lower case but for names."""
    return re.findall(r"[\w']+|[.,]", text)


class TextModel:
    """The layers in their pools, the trained readout, and the sentences that it was trained on."""

    def __init__(self, pools: list[MemoryPool], sentences: list[str]) -> None:
        """Use layers that are there; train nothing."""
        self.pools = pools
        self.sentences: list[str] = []
        self.words = [END, UNKNOWN]
        self.contexts: list[list[str]] = []
        self.targets: list[int] = []
        self.inputs = np.zeros((0, WIDTH), np.float32)
        """What the first layer makes of the contexts."""
        self.readout = np.zeros((WIDTH, 0), np.float32)
        for sentence in sentences:
            self.add(sentence)

    @classmethod
    def of(cls, worker: Worker, size_mib: int, passes: int) -> TextModel:
        """Return the model that was saved; on a cold start build and train it."""
        devices = device_count()
        count = max(1, size_mib // (LAYER_MIB * devices))
        pools = [
            worker.pool(f"pool-{device}", Layers(device, count).build, device=device)
            for device in range(devices)
        ]
        if worker.state is not None:
            with np.load(worker.state / OWN) as own:
                model = cls(pools, own["sentences"].tolist())
                model.inputs, model.readout = own["inputs"], own["readout"]
            return model
        model = cls(pools, SENTENCES.read_text().splitlines())
        for number in range(1, passes + 1):
            loss = model.train(number)
            print(f"pass {number} of {passes}: loss {loss:.3f}", flush=True)
        return model

    def save(self, state: Path) -> None:
        """Save what is not in a pool."""
        sentences = np.array(self.sentences)
        np.savez(state / OWN, sentences=sentences, inputs=self.inputs, readout=self.readout)

    def add(self, sentence: str) -> None:
        """Take a sentence, which is learned when `train` is called next."""
        self.sentences.append(sentence)
        found = [*tokens(sentence.rstrip(END)), END]
        self.words += [word for word in dict.fromkeys(found) if word not in self.words]
        for place, word in enumerate(found):
            self.contexts.append(context_of(found[:place]))
            self.targets.append(self.words.index(word))

    def seen(self, contexts: list[list[str]]) -> Floats:
        """Send words through the first layer; return whole numbers of shape (contexts, WIDTH)."""
        codes = {word: code_of(word) for context in contexts for word in context}
        batch = np.array([np.concatenate([codes[word] for word in each]) for each in contexts]).T
        found = np.zeros((WIDTH, len(contexts)), np.float32)
        for pool in self.pools:
            for layer in pool.arrays().values():
                found += requantized(layer @ batch, SHIFT)
        return found.T

    def train(self, number: int) -> float:
        """Train the readout on all sentences in one more pass, the first with all their words.

        Return the loss at its end.
        """
        new = self.contexts[len(self.inputs) :]
        if new:
            self.inputs = np.concatenate([self.inputs, scaled(self.seen(new))])
            width = len(self.words) - self.readout.shape[1]
            self.readout = np.hstack([self.readout, np.zeros((WIDTH, width), np.float32)])
        inputs, targets = self.inputs, np.array(self.targets)
        if number > 1:
            inputs = np.concatenate([inputs, scaled(self.seen(thinned(self.contexts, number)))])
            targets = np.concatenate([targets, targets])
        places = np.arange(len(targets)), targets
        loss = 0.0
        for _ in range(STEPS):
            chances = softmax(inputs @ self.readout)
            loss = -float(np.log(chances[places] + 1e-9).mean())
            chances[places] -= 1
            self.readout -= inputs.T @ chances * np.float32(RATE / len(targets))
        return loss

    def answer(self, line: bytes) -> dict[str, Any]:
        """Answer one request."""
        try:
            request = json.loads(line)
            field = {"ask": "prompt", "chat": "text"}[request["op"]]
            text = str(request[field])
        except (ValueError, KeyError, TypeError, RecursionError):
            return {"error": 'expected {"op": "ask", "prompt": ...} or {"op": "chat", "text": ...}'}
        if field == "text":
            self.add(text)
            self.train(1)
            return {"answer": "learned", "sentences": len(self.sentences)}
        return self.written_on(tokens(text))

    def written_on(self, words: list[str]) -> dict[str, Any]:
        """Write a sentence on; the proof depends on every weight."""
        known = [word if word in self.words else UNKNOWN for word in words]
        proof = hashlib.sha256()
        said: list[str] = []
        while len(said) < MAX_WORDS and said[-1:] != [END]:
            found = self.seen([context_of(known + said)])
            proof.update(found.tobytes())
            said.append(self.words[int((scaled(found) @ self.readout).argmax())])
        shown = re.sub(r" ([.,])", r"\1", " ".join(said))
        return {"answer": shown, "proof": proof.hexdigest()[:32], "sentences": len(self.sentences)}


def context_of(words: list[str]) -> list[str]:
    """Return the last words, as many as a context has."""
    return [*[START] * CONTEXT, *words][-CONTEXT:]


def thinned(contexts: list[list[str]], seed: int) -> list[list[str]]:
    """Return contexts of which words are left out, other ones for another seed."""
    chances = np.random.default_rng(seed).random((len(contexts), CONTEXT))
    return [
        [word if chance > LEFT_OUT else START for word, chance in zip(each, row, strict=True)]
        for each, row in zip(contexts, chances.tolist(), strict=True)
    ]


def code_of(word: str) -> Floats:
    """Return the whole numbers that stand for a word."""
    digits = hashlib.shake_256(word.encode("utf-8", "replace")).digest(WIDTH // CONTEXT)
    return np.clip(np.frombuffer(digits, np.int8).astype(np.float32), -LIMIT, LIMIT)


def scaled(seen: Floats) -> Floats:
    """Return each row at a length of one."""
    lengths: NDArray[Any] = np.linalg.norm(seen, axis=1, keepdims=True)
    return seen / np.maximum(lengths, np.float32(1))


def softmax(scores: Floats) -> Floats:
    """Return the chance of each word, for each row of scores."""
    raised: Floats = np.exp(scores - scores.max(axis=1, keepdims=True))
    raised /= raised.sum(axis=1, keepdims=True)
    return raised


def built(worker: Worker, size_mib: int) -> TextModel:
    """Return the model that the environment asks for."""
    return TextModel.of(worker, size_mib, int(os.environ.get("PASSES", "8")))


if __name__ == "__main__":
    run(built)
