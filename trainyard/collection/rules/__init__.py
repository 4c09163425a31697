"""Rules that change a document or drop it, each with the publication that it is from."""
