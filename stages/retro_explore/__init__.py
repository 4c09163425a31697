"""Show the chunks, samples and neighbours of a Retro project, call by call.

Reads: a project, its token files, the files of its tokenizers. Writes: nothing. Image: cpu."""
