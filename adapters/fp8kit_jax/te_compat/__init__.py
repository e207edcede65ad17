"""Transformer Engine's names, signatures and modules for JAX: what only programs written for it need."""
