"""The experiments of a paper, run again and reported."""
