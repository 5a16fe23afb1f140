"""From a model or a sensitivity to a plan: every method by its name."""
