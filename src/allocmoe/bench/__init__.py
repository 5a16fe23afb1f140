"""Times prefill and decode of plans against the unmodified model."""
