"""Helpers for tests that ship with the library."""
