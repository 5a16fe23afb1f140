"""A plan inside an unmodified vLLM: the only place that imports vllm."""
