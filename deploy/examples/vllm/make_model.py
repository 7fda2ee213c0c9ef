"""Makes a small LLaMA of random weights, for an engine to serve: `make_model.py FOLDER`.

Nothing is downloaded. The weights and the tokenizer, bytes and what is often side by side in
`sentences.txt`, are the same each time. It needs torch, transformers and tokenizers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token=END)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
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
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
