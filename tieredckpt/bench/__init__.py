"""Benchmarks that users run on their own machine, as ratios within one run; the command line shows them."""
