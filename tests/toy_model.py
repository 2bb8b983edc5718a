"""The tokenizer of the models that tests build."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+-=abcdefghijklmnopqrstuvwxyz ?:."


def save_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """A tokenizer with a token a character, ``<pad>`` = 0 and ``<eos>`` = 1."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    tokenizer.save_pretrained(path)
    return tokenizer
