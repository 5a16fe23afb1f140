"""Measures what a plan costs in quality and what it runs."""
