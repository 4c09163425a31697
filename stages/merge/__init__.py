"""Join every .bin/.idx pair of a folder into one.

Reads: Megatron token files of one type. Writes: PREFIX.bin and PREFIX.idx, or a share of the .bin,
or PREFIX.parts. Image: cpu."""
