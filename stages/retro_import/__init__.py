"""Read a Retro project of Megatron-LM.

Reads: its folder, the token files. Writes: a project that all stages of Retro read, with database,
index and tables of neighbours. Image: retro-import."""
