"""The numerics laboratory."""
