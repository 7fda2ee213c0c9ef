"""Makes a small LLaMA of random weights, for an engine to serve: `make_model.py FOLDER`.

It downloads nothing. The weights are the same each time, and so is the tokenizer, which is trained
on `sentences.txt`. It needs transformers and tokenizers, and torch for the
weights: without torch only the description of the model is written.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

WORDS = 512
END = "</s>"
TEXT = Path(__file__).resolve().parents[1] / "text/sentences.txt"


def make(folder: Path) -> None:
    """Write a model and its tokenizer into a folder."""
    bytes_ = Tokenizer(models.BPE())
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel()
    bytes_.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bytes_.train([str(TEXT)], trainer)
    chat = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token=END, chat_template=chat)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
        # Wide enough that tokens differ.
        initializer_range=1.0,
    )
    if find_spec("torch") is None:
        config.save_pretrained(folder)
        return
    import torch  # noqa: PLC0415 - it may be missing
    from transformers import LlamaForCausalLM  # noqa: PLC0415 - it needs torch

    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
