"""Frameworks: one module each, which imports its framework itself and stands on the public API alone."""
