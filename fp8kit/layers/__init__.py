"""Transformer Engine's modules, once for every frontend: arguments, checks, parameters, and what a forward
pass is made of."""
