"""An engine without a model: real vLLM scheduling around bytes that can be checked.

The real ``Scheduler``, ``KVCacheManager``, ``Request`` and connector roles of vLLM
run against a fake runner that writes, for each token, bytes that are a pure function
of layer, position and token prefix. So every block that the engine believes computed
can be compared byte by byte before it is used, and thousands of requests run in
seconds. ``model`` is the oracle, ``runner`` the worker's half, ``worker`` the place
where that half lives (this process or a second one), ``engine`` the engine's loop,
``workload`` seeded random traffic, ``reference`` a small connector that the harness
is proved with, planted bugs included.
"""
