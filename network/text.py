"""English text that each machine has, as tokens, and batches of them in an order that a seed fixes.

The text is the reference of the Python language, as the standard library carries it for `help()`
(`pydoc_data/topics.py`; licence: Python Software Foundation License 2). No file of it is kept here.
It is that of the running Python, so `digest` stands beside every result that rests on it.
"""

import hashlib
import random

import torch


def english() -> str:
    """Return the topics of `help()`, by name, one after the other."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def digest(text: str) -> str:
    """Return the SHA-256 of a text in UTF-8, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def as_bytes(text: str) -> torch.Tensor:
    """Return a token for each byte of the text in UTF-8: int64, from 0 to 255."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(torch.int64)


def as_pairs(text: str, vocabulary: int) -> torch.Tensor:
    """Return tokens of a byte-pair encoding that is trained on the text: int64.

    vocabulary: the most tokens it may have; a short text gives fewer. ImportError without the
    distribution `tokenizers`. Sennrich, Haddow and Birch (2016), over bytes as in GPT-2.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return torch.tensor(tokenizer.encode(text).ids, dtype=torch.int64)


class Batches:
    """Batch number i of a text: `batches[i]`, the same for each call.

    tokens: int64 [N], on any device. Each batch has `batch` sequences of `length` tokens that start
    at random places, and as targets the token after each. ValueError if the text is too short.
    """

    def __init__(self, tokens: torch.Tensor, batch: int, length: int, seed: int = 0):
        if len(tokens) <= length:
            raise ValueError(f"tokens: {len(tokens)}, expected more than the length of {length}")
        self.tokens, self.batch, self.length, self.seed = tokens, batch, length, seed

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and targets, each int64 [batch, length]."""
        # PyTorch's generator of the CPU takes 32 bits of a seed; this one takes all of both.
        generator, most = random.Random(f"{self.seed} {number}"), len(self.tokens) - self.length
        starts = torch.tensor([[generator.randrange(most)] for _ in range(self.batch)])
        places = (starts + torch.arange(self.length + 1)).to(self.tokens.device)
        drawn = self.tokens[places]
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
