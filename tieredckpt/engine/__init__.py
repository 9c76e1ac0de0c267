"""What happens behind the training: saves, promotions, restores, repairs, evictions, on a loop of their own.

Start at `engine` (the parts and their life), `state` (what they share) and `tier` (one rung of the ladder).
"""
