"""Small BPE tokenizers, trained on the spot, with the templates that the field's models have."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<s>", "<|endoftext|>"]

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As SmolLM2's: a default system message, no generation tags."""

WITH_BOS = "{{ bos_token }}" + SMOLLM2
"""As Llama 3's: writes the token that its tokenizer's post-processor adds as well."""

THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] if loop.last else message['content'].split('</think>')[-1] }}{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""As DeepSeek-R1's: forgets the thinking of earlier turns, opens that of the next."""

NO_END = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Never ends a turn with a token."""


def toy_tokenizer(
    template: str | None = SMOLLM2, bos: bool = False, pad: str = "<|im_end|>", eos: str | None = "<|im_end|>"
) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose merges cross words and line breaks, so that what is tokenised together matters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["hello world", "3+1=4", "2+2=4", "x\n\ny", "assistant\n", "What is 2+2?", "user\n", "<think>\n"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, bos_token="<s>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = template
    return fast
