"""The command line: one file a verb, thin over the Python functions."""
