"""How documents, conversations and questions become the samples of a GPT."""

from __future__ import annotations

from trainyard.datasets import sample_format as samples
from trainyard.datasets.fine_tuning.questions import GPT_WORDING, Wording
from trainyard.datasets.fine_tuning.sft import SftFormat
from trainyard.datasets.fine_tuning.tokenize import InstructionTokenizer
from trainyard.datasets.formats import FimFormat, InstructionFormat
from trainyard.models.family import SampleOptions
from trainyard.models.gpt.config import GPTConfig


def sample_format(
    config: GPTConfig, options: SampleOptions, wording: Wording = GPT_WORDING
) -> samples.SampleFormat | FimFormat | InstructionFormat:
    """The format that the options describe. wording: of questions."""
    tokenizer, sft = options.tokenizer, options.sft
    if sft.sft:
        return InstructionFormat(
            SftFormat(
                seq_length=config.seq_length,
                eod=tokenizer.eod,
                pad=tokenizer.pad,
                packing=sft.sft_packing,
            ),
            InstructionTokenizer(tokenizer, sft, wording),
        )
    found = samples.sample_format(options.data, tokenizer, config.seq_length, options.seed)
    return FimFormat(found, options.fim, tokenizer) if options.fim.fim_data else found
