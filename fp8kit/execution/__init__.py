"""How an operation is run, once for every frontend.

==============  ==========================================================================================
file            what it holds
==============  ==========================================================================================
bound.py        ``Interface``: what goes into and comes out of an operation; ``BoundOp``: runs it on addresses
refusals.py     what is refused of a call before anything runs
plans.py        the bounded cache of bound operations; ``validate``
memory.py       where the buffers of a call lie; ``Memory``: what a frontend supplies
replay.py       recorded calls, which run again on the same or other addresses
chain.py        several operations as one
codec.py        specs as text and back
==============  ==========================================================================================
"""
