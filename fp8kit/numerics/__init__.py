"""The numerics laboratory: what happens to the numbers of a training, and pictures of it."""
