"""Fetches web pages from lists of URLs: politely, bounded, and from public addresses alone."""
