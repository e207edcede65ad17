"""The kernel contract (``protocol``), who implements it (``registry``, and the engines' folders), and which
implementation is taken (``policy``, ``dispatch``)."""
