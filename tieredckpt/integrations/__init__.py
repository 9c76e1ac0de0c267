"""Integrations with training frameworks, one module each, which imports its framework itself.

They are built on the public face of a store alone: what is stored, where and when is the store's to decide.
"""
