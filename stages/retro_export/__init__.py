"""Write a Retro project for Megatron-LM, or under the names of its guides.

Reads: a project. Writes: the folder of a project of Megatron-LM, or embeddings, index and
neighbours as single files. Image: retro-export."""
