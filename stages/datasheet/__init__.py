"""Write what is known of a corpus as one self-contained page.

Reads: the folders that collect, clean, dedup, decontaminate and mix made, and the documents at the
end. Writes: PREFIX.html and PREFIX.json, which the run card shows. Image: cpu."""
