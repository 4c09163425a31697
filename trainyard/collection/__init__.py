"""From collected text to a clean corpus: rules, duplicates, contamination. Knows no stage."""
