"""Run when a Python process starts: the first import of ``torchao`` in it then gives fp8kit_torch as
``torchao.float8``. As ``te_compat/startup`` beside it, for the other name; FP8KIT_ALIAS=0 does nothing."""

import os
import sys


class _LaterTorchao:
    """Finds ``torchao`` until it is first imported."""

    def find_spec(self, name, path=None, target=None):
        """A spec for torchao; None for all others."""
        if name != "torchao" or name in sys.modules:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        """torchao, with fp8kit_torch as its ``float8``."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        from fp8kit_torch.torchao_compat.names import as_torchao

        return as_torchao()

    def exec_module(self, module):
        """Nothing is left to do."""

    def find_distributions(self, context):
        """What ``importlib.metadata`` is asked before torchao is imported; an installed one answers."""
        from importlib.machinery import PathFinder

        if (context.name or "").lower() != "torchao" or PathFinder.find_spec("torchao") is not None:
            return []
        from fp8kit_torch.torchao_compat.names import Finder

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
    type(each).__name__ == "_LaterTorchao" for each in sys.meta_path
):
    sys.meta_path.insert(0, _LaterTorchao())
if __name__ == "sitecustomize":
    _others()
