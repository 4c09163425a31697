"""Build the sample indices of a run ahead of it, where no GPU waits.

Reads: token file pairs (merge, tokenize). Writes: a folder of index caches, for
--data-cache-path of pretrain. Image: cpu."""
