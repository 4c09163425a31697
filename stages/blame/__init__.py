"""Which documents, of which sources, a step of a run was made of; and where a source was served.

Reads: token files, their sidecars (.docs), optionally a run. Writes: nothing. Image: cpu."""
