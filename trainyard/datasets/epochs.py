"""How many samples one pass over the training split has. Reads the lengths of documents; no
torch."""

from __future__ import annotations

from trainyard.datasets.config import DataConfig, has_weights
from trainyard.datasets.mock import MockTokens
from trainyard.datasets.sample_format import SampleFormat
from trainyard.datasets.samples import count_samples
from trainyard.datasets.splits import documents_of_split, open_tokens, sources_of, tokens_of
from trainyard.datasets.token_rows import TokenSource
from trainyard.errors import ConfigError


def samples_of_epoch(data: DataConfig, seq_length: int) -> int:
    """Samples of `seq_length` tokens in one pass over the training split of all sources.

    Raises ConfigError for a blend by weight, of which no pass exists."""
    data = data.expanded()
    form = SampleFormat(seq_length, seed=0, vocab_size=1, eod=0)
    if data.mock_data:
        size = data.dataset_size
        tokens = None if size is None else size * seq_length + int(form.extra_token)
        made_up = MockTokens(form.vocab_size, form.eod, tokens_of_a_third=tokens)
        return _samples(made_up, data, form)
    sources = sources_of(data, "train")
    if len(sources) > 1 and has_weights(sources):
        raise ConfigError(
            "--epochs: a blend by weight takes its sources at different speeds, so no pass over "
            "all of them exists; give --train-samples, or the prefixes without weights"
        )
    return sum(_samples(open_tokens(one.prefix, data), data, form) for one in sources)


def _samples(file: TokenSource, data: DataConfig, form: SampleFormat) -> int:
    documents = documents_of_split(file, data, form, "train")
    num_tokens = tokens_of(file, documents)
    return count_samples(num_tokens, form.seq_length, int(form.extra_token), True)
