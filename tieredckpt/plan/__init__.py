"""Predict what a configuration will do: figures by formula, and a simulation that uses its own policies."""
