"""What a configuration will do before it runs: figures by formula, and a simulation that asks its very policies."""
