"""The ids of a reference tokenizer, many times faster, with bounded memory."""
