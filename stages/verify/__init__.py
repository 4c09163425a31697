"""Re-reads an artifact and compares every digest with its manifest.

Reads: any artifact (a folder, a prefix, or a tree of them). Writes: nothing. Image: cpu."""
