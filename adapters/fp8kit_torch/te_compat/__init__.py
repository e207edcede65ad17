"""Transformer Engine's names, modules and files: what only programs written for it need."""
