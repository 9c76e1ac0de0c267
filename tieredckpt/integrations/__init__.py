"""Integrations with training frameworks, one module each, which imports its framework itself.

They use only the public interface of a store: the store decides what is stored, where and when.
"""
