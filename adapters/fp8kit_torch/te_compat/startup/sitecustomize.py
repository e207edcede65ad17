"""Run when a Python process starts: the first import of ``transformer_engine`` in it then gives fp8kit_torch.

Python runs a module of this name by itself where this folder is on PYTHONPATH (``python -m
fp8kit_torch.as_transformer_engine`` puts it there for the processes that a program starts), and a file that
``fp8kit alias install`` writes runs it in every process of an environment. Nothing is imported before a
program asks for Transformer Engine; with FP8KIT_ALIAS=0 nothing is done.
"""

import os
import sys

NAMES = ("transformer_engine", "transformer_engine_torch")


class _Later:
    """Finds ``transformer_engine`` until it is first imported."""

    def find_spec(self, name, path=None, target=None):
        """A spec for the two names; None for all others."""
        if name not in NAMES or name in sys.modules:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        """fp8kit_torch under the name that is imported."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        from fp8kit_torch.te_compat.names import as_transformer_engine

        as_transformer_engine()
        return sys.modules[spec.name]

    def exec_module(self, module):
        """Nothing is left to do."""

    def find_distributions(self, context):
        """What ``importlib.metadata`` is asked before Transformer Engine is imported."""
        if (context.name or "").replace("_", "-").lower() != "transformer-engine":
            return []
        from fp8kit_torch.te_compat.names import Finder

        return Finder.find_distributions(context)


def _others():
    """Run the ``sitecustomize`` that this one stands before."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    seen = [os.path.abspath(place or os.curdir) for place in sys.path]
    rest = sys.path[seen.index(here) + 1 :] if here in seen else []
    found = PathFinder.find_spec("sitecustomize", rest)
    if found is not None and found.loader is not None:
        found.loader.exec_module(module_from_spec(found))


if os.environ.get("FP8KIT_ALIAS") != "0" and not any(
    type(each).__name__ == "_Later" for each in sys.meta_path
):
    sys.meta_path.insert(0, _Later())
if __name__ == "sitecustomize":
    _others()
