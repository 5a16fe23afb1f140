"""What the model families call their parts: data, and the code that finds them in a model."""

from allocmoe.models.families import FAMILIES, REFUSED, Family, family_of
from allocmoe.models.layers import MoELayer, MoEModel, inspect_model

__all__ = ["FAMILIES", "REFUSED", "Family", "MoELayer", "MoEModel", "family_of", "inspect_model"]
