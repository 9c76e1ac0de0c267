"""The bytes layer: blob stores, their contract (`base`), and wrappers that add a behaviour (`wrap`).

A store is imported from its own module, so that none of them loads what another needs.
"""
