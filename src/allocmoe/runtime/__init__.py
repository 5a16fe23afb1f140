"""Applies plans to models."""
